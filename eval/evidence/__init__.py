"""Measures again what README and docs/results state, on the GPUs of one machine."""
