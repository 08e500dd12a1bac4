"""What the other ranks of a program contribute: `alone.py` where none of them runs, `together.py` where some do."""
