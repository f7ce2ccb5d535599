"""The lookup and whole models on GPUs: measured there, or modelled from compiled kernels."""
