"""Reference workloads: attention, KV cache, fused kernels, a small engine. Stands alone."""
