"""What case study 4 is about, as typed specifications."""

from memprof.spec import TargetSpec

BEFORE = TargetSpec(
    model="llama-3.1-8b",
    dtype="float32",
    batch_size=2,
    context_length=128,
    npt="low-rank",
    npt_rank=64,
    npt_num_ranks=128,
    npt_combine="sequential",
    npt_init="orthogonal",
    npt_layers="15",
    steps=1,
    gpu="h100-80gb",
)
"""One component of 128 rank-1 updates, one after another, as the report's training script had it before."""

AFTER = BEFORE.edit(npt_combine="batched", npt_init="fast")
"""The report's change."""

MERGED = AFTER.edit(npt_combine="merged")
"""What is better than it."""

COUNTS = (32, 64, 128)
"""Rank-1 updates: what the report recommends to begin with, and what it had."""
