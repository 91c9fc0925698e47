"""Multi-query repeated associative recall (arXiv:2410.17980, Section 5.1): task, small models and training."""
