"""A run that cannot go on: the report so far, what stopped it and where, exit code 1."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

MODEL = """
import torch
from torch import nn

torch.library.define("{lib}::no_fake", "(Tensor x) -> Tensor")
torch.library.impl("{lib}::no_fake", "CPU", lambda x: x.clone())
torch.library.impl("{lib}::no_fake", "CUDA", lambda x: x.clone())


@torch.library.custom_op("{lib}::opaque", mutates_args=())
def opaque(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.linear = nn.Linear(128, 128)

    def forward(self, x):
        return getattr(self, self.kind)(self.linear(x))

    def plain(self, x):
        return x

    def library(self, x):
        return torch.ops.{lib}.no_fake(x)  # library

    def custom(self, x):
        return opaque(x)  # custom

    def aten(self, x):
        torch.histogram(x.detach(), 4)  # aten
        return x

    def value(self, x):
        assert (x > 100).any(), "too small"  # value
        return x

    def numpy(self, x):
        return x.detach().numpy()  # numpy

    def dlpack(self, x):
        torch.utils.dlpack.to_dlpack(x.detach())  # dlpack
        return x

    def extension(self, x):
        if x.requires_grad:
            raise RuntimeError("x must be a CUDA tensor")  # extension
        return x

    def triton(self, x):
        import triton.runtime.jit
        y = torch.empty_like(x)
        triton.runtime.jit.KERNEL[(1,)](x, y, 128, BLOCK=64)  # triton
        return y

    def hook(self, x):
        x = x * 1
        x.register_hook(self.on_gradient)
        return x

    def on_gradient(self, gradient):
        raise ValueError("in the backward")  # hook

    def wrong(self, x):
        return x @ x  # wrong


class Model(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.embedding = nn.Embedding(1000, 128)
        self.layers = nn.ModuleList([Block("plain"), Block(kind), Block("plain")])
        self.head = nn.Linear(128, 1000)

    def forward(self, ids):
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)
"""
KINDS = {
    "library": ("no meta kernel", "NotImplementedError", "no_fake"),
    "aten": ("no meta kernel", "NotImplementedError", "aten.histogram"),
    "value": ("unknown value", "AssertionError", None),
    "numpy": ("error", "TypeError", None),
    "dlpack": ("custom kernel", "KernelError", "DLPack"),
    "extension": ("custom kernel", "RuntimeError", None),
    "triton": ("custom kernel", "KernelError", "my_kernels.fused_norm"),
    "hook": ("error", "ValueError", None),
    "wrong": ("error", "RuntimeError", "aten.bmm"),
}


class KernelInterface:
    """As in triton/runtime/jit.py."""

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.run(*args, grid=grid, warmup=False, **kwargs)


class JITFunction(KernelInterface):
    def __init__(self, fn):
        self.fn = fn

    def run(self, *args, grid, warmup, **kwargs):
        raise AssertionError("a kernel was launched")


class Autotuner(KernelInterface):
    def __init__(self, fn):
        self.fn = fn

    def run(self, *args, **kwargs):
        raise AssertionError("kernels were timed")


@pytest.fixture
def triton(monkeypatch):
    """The parts of Triton that a launch passes through; CPU builds of torch come without it."""
    pytest.importorskip("torch._dynamo")  # asks for the real Triton when it is first imported

    def fused_norm(x, y, n):
        pass

    fused_norm.__module__, fused_norm.__qualname__ = "my_kernels", "fused_norm"
    jit, autotuner = types.ModuleType("triton.runtime.jit"), types.ModuleType("triton.runtime.autotuner")
    jit.KernelInterface, jit.JITFunction, autotuner.Autotuner = KernelInterface, JITFunction, Autotuner
    jit.KERNEL = Autotuner(JITFunction(fused_norm))
    package, runtime = types.ModuleType("triton"), types.ModuleType("triton.runtime")
    package.runtime, runtime.jit, runtime.autotuner = runtime, jit, autotuner
    for module in (package, runtime, jit, autotuner):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    return jit


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "broken.py"
    # Operators live as long as the process: each test names its own.
    text = MODEL.replace("{lib}", f"memprof_test_{abs(hash(str(tmp_path)))}")
    text += "".join(f"\n\ndef make_{kind}():\n    return Model({kind!r})\n" for kind in KINDS)
    path.write_text(text)
    return path


def line_of(path: Path, kind: str) -> int:
    return next(n for n, line in enumerate(path.read_text().splitlines(), 1) if line.endswith(f"# {kind}"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_report_so_far_names_what_stopped_it(memprof, file, tmp_path, kind, triton):
    expected, error, op = KINDS[kind]
    capture = tmp_path / "failed.memprof"
    result = memprof("profile", "--model", f"{file}:make_{kind}", "--context-length", 64, "--json", "--save", capture)
    assert result.exit_code == 1
    assert "Traceback" not in result.stderr
    report = result.json
    failure = report["failure"]
    assert (failure["kind"], failure["error"]) == (expected, error)
    assert failure["phase"] == ("backward of step 1" if kind == "hook" else "forward of step 1")
    place = f"broken.py:{line_of(file, kind)}"
    assert place in failure["source"] and place in result.stderr
    if kind != "hook":  # a hook belongs to no module
        assert failure["module"] == "layers.1"
    assert op is None or op in failure["op"]
    found = [finding for finding in report["findings"] if finding["id"] == "run-failed"]
    assert len(found) == 1 and report["findings"][0] is found[0] and found[0]["severity"] == "error"
    assert place in found[0]["title"]
    text = " ".join(evidence["text"] for evidence in found[0]["evidence"])
    assert error in text and "fix: " in text
    assert ("GPU" in text) == (expected != "unknown value")
    # The run up to there: whole stages before, a peak with its tensors, no verdict that was not reached.
    names = [stage["name"] for stage in report["stages"]]
    assert names[:5] == ["context", "parameters", "inputs", "embedding", "layer 0"]
    assert ("backward" in names) == (kind == "hook") and "optimizer step" not in names
    parameters = 4 * report["target"]["num_parameters"]
    assert parameters <= report["peak"]["categories"]["parameters"] < 1.02 * parameters
    assert sum(report["peak"]["categories"].values()) == report["peak"]["allocated_bytes"]
    assert report["verdict"]["fits"] is None
    # And the same again out of the saved capture.
    again = memprof("show", capture, "--json")
    assert again.json == report and again.exit_code == 1
    shown = memprof("show", capture).stdout
    said = f"Failed: the run stopped in {failure['phase']}, with {error}"
    if expected != "error":  # it is not the program's own
        what = error if failure["op"] is None else f"{failure['op']} ({error})"
        said = f"Not simulated: the run stopped in {failure['phase']}, at {what}"
    assert said in " ".join(shown.split()) and "Fits" not in shown


def test_a_run_that_fails_beyond_the_gpu_says_both(memprof, file):
    result = memprof("profile", "--model", f"{file}:make_library", "--gpu-vram", "0.42", "--json")
    assert result.exit_code == 1
    assert result.json["verdict"]["fits"] is False
    assert {"run-failed", "does-not-fit"} <= {finding["id"] for finding in result.json["findings"]}


def test_a_run_that_fails_before_the_gpu_is_used_is_one_error(memprof, tmp_path):
    path = tmp_path / "early.py"
    path.write_text(
        "import torch\n\n\nclass Model(torch.nn.Linear):\n    def to(self, *a):\n        raise OSError('no file')\n"
        "\n\ndef make():\n    return Model(4, 4)\n"
    )
    result = memprof("profile", "--model", f"{path}:make", "--json")
    assert result.exit_code == 1 and list(result.json) == ["schema", "error"]
    assert "the run failed in building the model with OSError" in result.stderr
    assert f"no file ({path}:6)" in result.stderr


def test_debug_shows_the_traceback_of_what_was_raised(file):
    from memprof.cli.main import run
    from memprof.errors import RunFailedError

    with pytest.raises(RunFailedError) as raised:
        run(["profile", "--model", f"{file}:make_value", "--debug"])
    assert isinstance(raised.value.__cause__, AssertionError)


def test_a_block_that_raises_reports_what_was_and_why():
    import torch

    import memprof as library

    def divides(gpu):
        with gpu:
            kept = torch.zeros(1 << 20, device="cuda")
            return len(kept) / 0

    gpu = library.virtual_gpu("t4")
    with pytest.raises(ZeroDivisionError):
        divides(gpu)
    report = gpu.report()
    assert report.peak.allocated_bytes == 4 << 20
    assert report.failure is not None and report.failure.error == "ZeroDivisionError"
    assert report.failure.source is not None and "test_failed_runs.py" in report.failure.source


@pytest.mark.parametrize(("line", "read"), [("print(\n    f'{loss.item():.2f}'\n)", False), ("n = loss.item()", True)])
def test_a_number_that_was_only_shown_decided_nothing(memprof, script, line, read):
    name = script(
        f"import torch\n\nloss = torch.nn.Linear(8, 8).cuda()(torch.rand(8, 8, device=0)).sum()\n{line}\n[][1]"
    )
    result = memprof("run", "--gpu", "rtx-4090", "--json", name)
    assert result.json["failure"]["error"] == "IndexError"
    assert ("a value that is not computed" in result.json["findings"][0]["title"]) is read
