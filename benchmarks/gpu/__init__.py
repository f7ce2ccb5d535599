"""The lookup and whole models on GPUs, measured there or modeled from compiled kernels."""
