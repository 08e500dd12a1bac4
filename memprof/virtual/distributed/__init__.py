"""Patches of `torch.distributed`, by which one rank of a program runs without the processes of other ranks.

`process_groups.py` creates the program's process groups, `rank_group.py` is the class of these groups, with the
allocations of their collectives, and `memprof/virtual/peers` has the values that other ranks contribute.
"""
