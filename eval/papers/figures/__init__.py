"""The figures of the papers, each drawn from result files. `python -m eval.papers.figures` is the command."""
