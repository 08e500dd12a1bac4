"""Imports what commands that simulate need: a process that has imported this file answers them in a second.

The server of `memprof mcp` forks its processes from such a one. A first use of the virtual GPU imports what it patches.
"""

import torch
import transformers.modeling_utils  # noqa: F401

import memprof
import memprof.cli.analyze
import memprof.cli.doctor
import memprof.cli.estimate
import memprof.cli.main
import memprof.cli.profile
import memprof.cli.recommend
import memprof.cli.run
import memprof.flows.profile
import memprof.flows.script
import memprof.report.terminal.brief
import memprof.script.capture
import memprof.workload.step

with memprof.virtual_gpu() as gpu:
    torch.nn.Linear(1, 1, device="cuda")
gpu.report()
