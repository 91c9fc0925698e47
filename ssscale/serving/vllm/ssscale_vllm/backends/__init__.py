"""Attention backends over vLLM's paged cache."""
