"""When DDP's first buckets are freed, after they were rebuilt: python -m tests.gpu.questions.ddp_buckets PAUSE_S."""

from __future__ import annotations

import argparse
import json
import tempfile
import time

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("pause", type=float, help="seconds between steps")
    pause = parser.parse_args().pause
    with tempfile.NamedTemporaryFile() as meeting:
        dist.init_process_group("nccl", init_method=f"file://{meeting.name}", rank=0, world_size=1)
        model = nn.parallel.DistributedDataParallel(nn.Sequential(*[nn.Linear(2048, 2048) for _ in range(8)]).cuda())
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        data = torch.randn(64, 2048, device="cuda")
        steps = []
        for _ in range(6):
            torch.cuda.reset_peak_memory_stats()
            model(data).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.synchronize()
            at_once = torch.cuda.memory_allocated()
            time.sleep(pause)
            steps.append(
                {
                    "peak": torch.cuda.max_memory_allocated(),
                    "allocated": at_once,
                    "after the pause": torch.cuda.memory_allocated(),
                }
            )
        print(json.dumps(steps))
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
