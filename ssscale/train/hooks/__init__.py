"""Hooks: what a run does besides its steps, one file per purpose."""
