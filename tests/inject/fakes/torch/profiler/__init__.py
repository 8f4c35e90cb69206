"""The session API."""
