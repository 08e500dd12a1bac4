"""`torch.distributed` for one rank of a program that is written for many.

`joining.py` creates the program's process groups. `group.py` is a group: the allocations of the collectives on this
rank. `memprof/virtual/peers` has the contributions of the other ranks.
"""
