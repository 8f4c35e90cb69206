"""cuda-bindings."""
