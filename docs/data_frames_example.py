"""Prints what docs/data-frames.md shows: the tables of a small training run, asked with pandas.

python docs/data_frames_example.py
"""

from __future__ import annotations

import torch
from torch import nn

import memprof

MIB = 2**20


def layer() -> nn.Module:
    """Two linear layers with an activation between them."""
    return nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024))


def main() -> None:
    """Two training steps on a virtual GPU, and three questions."""
    with memprof.virtual_gpu("rtx-4090") as gpu:
        model = nn.Sequential(*(layer() for _ in range(6))).to("cuda")
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(2048, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    frames = gpu.report().frames()

    for name, frame in frames.items():
        print(f"{name:11} {len(frame):3} rows, {len(frame.columns):2} columns")

    stages = frames["stages"].nlargest(3, "peak_allocated_bytes").set_index(["name", "step"])
    print("\nThe highest stages, MiB")
    print((stages[["allocated_bytes", "peak_allocated_bytes"]] / MIB).round(1).to_string())

    ledger = frames["ledger"].pivot_table("bytes", "category", "phase", aggfunc="sum", fill_value=0)
    print("\nWhat the peak is made of, by phase of birth, MiB")
    print((ledger / MIB).round(1).to_string())

    tensors = frames["tensors"]
    large = tensors[tensors["bytes"] >= 16 * MIB]
    total = large["total_bytes"].sum() / MIB
    print(f"\n{large['count'].sum()} tensors of 16 MiB or more have {total:,.1f} MiB of the peak")


if __name__ == "__main__":
    main()
