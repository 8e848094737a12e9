"""neo-lite: NEO (CPU offloading of decode attention) rebuilt step by step on a real Llama."""
