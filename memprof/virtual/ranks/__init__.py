"""One rank of a program that is written for many.

`joining.py` gives the program its process groups. `group.py` is such a group: what its collectives allocate on this
rank. `alone.py` says what the others contribute where there are none: what this rank has itself.
"""
