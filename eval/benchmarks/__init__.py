"""Comparisons of speed: with plain torch, with the `hf` backend of lm-eval, and of kernels on trained activations."""
