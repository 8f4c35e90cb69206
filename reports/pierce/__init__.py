"""Ways out of the cache-penetration detector: notices to people and programs, live table, metrics, page."""
