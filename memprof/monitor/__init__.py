"""A watched command: its processes, their CUDA allocators and the GPUs, once a second. Needs no torch.

`memprof/monitor/probe/sitecustomize.py` runs inside the command and must stand alone; everything else runs in memprof.
"""
