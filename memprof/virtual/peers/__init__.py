"""Contributions of a program's other ranks: `alone.py` if this rank runs alone, `together.py` if others run too."""
