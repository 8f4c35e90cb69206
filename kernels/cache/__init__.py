"""KV caches behind one protocol: contiguous or in pages, plain or quantised."""
