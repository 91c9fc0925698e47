"""Stick-breaking kernels for bf16 and fp16 in which each thread holds 16 adjacent keys of a row (README.md)."""
