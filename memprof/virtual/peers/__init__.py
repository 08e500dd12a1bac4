"""Values of collectives: `single_rank.py` for a rank that runs alone, `multi_rank.py` for ranks that run together."""
