"""`%%memprof` on a cell, with what it asks of IPython's shell in a stub for it."""

from __future__ import annotations

import pytest

import memprof
from memprof.errors import UsageError
from memprof.notebook import run_cell


class Shell:
    def __init__(self):
        self.user_ns, self.magics = {"In": [""] * 8}, {}

    def transform_cell(self, cell):
        return cell

    def register_magic_function(self, function, magic_kind, magic_name):
        self.magics[magic_kind, magic_name] = function


CELL = 'import torch\nkept = torch.zeros(1 << 20, device="cuda")\n'


def test_a_cell_runs_in_the_notebooks_names_and_gives_the_report():
    shell = Shell()
    memprof.load_ipython_extension(shell)
    report = shell.magics["cell", "memprof"]("--gpu rtx-4090 --alloc-conf expandable_segments:True", CELL)
    assert report.peak.allocated_bytes == 4 << 20
    assert report.device.name == "NVIDIA GeForce RTX 4090"
    assert shell.user_ns["kept"].shape == (1 << 20,)
    assert report.peak.tensors[0].source.startswith("cell 7:2")


@pytest.mark.parametrize("line", ["--gpux", "--gpu rtx-4091", "--gpu-vram much", "word", "'"])
def test_what_is_wrong_is_said_in_a_sentence(line, capsys):
    with pytest.raises(UsageError):
        run_cell(Shell(), line, "raise SystemExit")
    shell = Shell()
    memprof.load_ipython_extension(shell)
    assert shell.magics["cell", "memprof"](line, "raise SystemExit") is None
    assert capsys.readouterr().out.startswith("error: ")
