"""CPU kernels compiled by Numba: vector tiles and loops on torch's own threads."""
