"""Collectives between ranks: `single_rank.py` for a rank that runs alone, `multi_rank.py` for several."""
