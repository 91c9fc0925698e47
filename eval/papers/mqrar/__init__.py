"""Multi-query repeated associative recall (arXiv:2410.17980, Section 5.1): the task, small models, their training."""
