"""The lookup and whole models on GPUs: measured there, and kernels compiled and launches counted without one."""
