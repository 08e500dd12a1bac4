"""`torch.distributed` for one rank of a program that is written for many.

`joining.py` gives the program its process groups. `group.py` is such a group: what its collectives allocate on this
rank. What the others contribute says `memprof/virtual/peers`.
"""
