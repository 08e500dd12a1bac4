"""Monitoring of a command: its processes, their CUDA allocators and the GPUs, once a second. Needs no torch.

`memprof/monitor/probe/sitecustomize.py` runs inside the command and must not import memprof; all other modules run in
memprof's process.
"""
