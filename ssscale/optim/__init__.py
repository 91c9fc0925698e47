"""Optimizers, one file each (base.py says what such a file declares)."""
