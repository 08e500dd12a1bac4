"""Contributions of a program's other ranks: `alone.py` where none of them runs, `together.py` where some do."""
