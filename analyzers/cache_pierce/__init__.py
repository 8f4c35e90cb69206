"""Cache penetration: look-ups of keys that are in no cache and in no store behind it, so that all go through."""
