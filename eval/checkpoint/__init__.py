"""Scores and texts of one checkpoint: validation loss, lm-eval's tasks and those of users, RULER, samples."""
