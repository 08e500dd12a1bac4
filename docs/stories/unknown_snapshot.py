"""Makes the snapshot of docs/stories.md, as a program that somebody else wrote would, and analyses it.

python docs/stories/unknown_snapshot.py
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from pathlib import Path

from memprof.cli.main import run

PROGRAM = """
import torch
from torch import nn

model = nn.Sequential(nn.Linear(1024, 8192), nn.GELU(), nn.Linear(8192, 1024)).cuda()
optimizer = torch.optim.AdamW(model.parameters())
outputs = []
for step in range(200):
    out = model(torch.randn(4096, 1024, device="cuda"))
    out.square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()
    outputs.append(out.detach())
"""


def main() -> None:
    """Record, and analyse."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("train.py").write_text(PROGRAM, encoding="utf-8")
        for command in (
            ["run", "--json", "--gpu-vram", "2", "--until-exit", "--save", "run.memprof", "train.py"],
            ["export", "run.memprof", "--to", "snapshot.pickle"],
        ):
            quiet = io.StringIO()
            with contextlib.redirect_stdout(quiet), contextlib.redirect_stderr(quiet), contextlib.suppress(SystemExit):
                run(command)
        run(["analyze", "--full", "snapshot.pickle", "--top", "4"])


if __name__ == "__main__":
    sys.exit(main())
