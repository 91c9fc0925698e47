"""Random damage and kills: a run goes on to the same bits, or says in one sentence why not.

`kinds.py` says what a kind is, `of_*.py` hold the kinds, `kills.py` the kills. `python -m tests.chaos` tries all of them.
"""
