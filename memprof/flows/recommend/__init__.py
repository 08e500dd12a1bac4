"""`memprof recommend`: what fits a card, and the configuration to use. Everything is found by simulated runs.

`largest.py` answers for a card alone, `search.py` for a model and a goal; `foretell.py` says what the
lengths of a data set do to it, `cards.py` what would fit if nothing does, and `snippet.py` writes the code to paste.
"""
