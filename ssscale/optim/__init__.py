"""Optimizers, one per file. base.py defines their interface."""
