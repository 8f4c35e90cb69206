"""Sources of cache look-ups: a proxy, MONITOR, events in a file, an engine's KV-cache events, scraped counters."""
