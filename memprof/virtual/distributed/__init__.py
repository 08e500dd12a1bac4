"""Patches of `torch.distributed`, by which one rank of a program runs without the processes of other ranks.

`process_groups.py` creates the program's process groups, `rank_group.py` defines their class, with the allocations
of collectives, and `memprof/virtual/peers` has the values that other ranks contribute.
"""
