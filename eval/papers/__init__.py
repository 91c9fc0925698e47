"""The experiments of the papers, each a command, and their figures."""
