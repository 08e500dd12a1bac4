"""Errors about two devices: what the message names, and the advice that follows."""

from __future__ import annotations

import pytest

from memprof.doctor.mismatch import Mismatch, format_title, list_advice, read_mismatch
from memprof.doctor.tracebacks import TracebackFrame

SAME = "Expected all tensors to be on the same device, but"


@pytest.mark.parametrize(
    ("message", "mismatch"),
    [
        (
            f"{SAME} found at least two devices, cuda:0 and cpu! (when checking argument for argument mat2 in method "
            "wrapper_CUDA_mm)",
            Mismatch(("cuda:0", "cpu"), "mat2", "mm"),
        ),
        (
            f"{SAME} found at least two devices, mps:0 and cpu! (when checking arguments in method wrapper_MPS__bmm)",
            Mismatch(("mps:0", "cpu"), "", "bmm"),
        ),
        (f"{SAME} found at least two devices, cuda:0 and cuda:1!", Mismatch(("cuda:0", "cuda:1"))),
        (
            f"{SAME} got index is on cpu, different from other tensors on cuda:0 (when checking argument in method "
            "wrapper_CUDA__index_select)",
            Mismatch(("cpu", "cuda:0"), "index", "index_select"),
        ),
        (
            "Input type (torch.cuda.FloatTensor) and weight type (torch.FloatTensor) should be the same",
            Mismatch(("cuda", "cpu"), "input"),
        ),
        (
            "Input type (torch.FloatTensor) and bias type (MPSFloatType) should be the same",
            Mismatch(("cpu", "mps"), "input"),
        ),
        ("Expected device cuda:0 but got device cpu for second argument", Mismatch(("cpu", "cuda:0"))),
        (
            "Expected object of device type cuda but got device type cpu for argument #3 'index' in call to f",
            Mismatch(("cpu", "cuda"), "index"),
        ),
        (
            "Expected object of backend CPU but got backend CUDA for argument #4 'm'",
            Mismatch(("cuda", "cpu"), "m"),
        ),
        ("Expected object of device type xpu but got device type cpu", Mismatch(("cpu", "xpu"))),
        ("Expected object of device type npu but got device type cpu", Mismatch(("cpu", "npu"))),
        ("Expected object of type torch.cuda.LongTensor but got type torch.LongTensor", Mismatch(("cpu", "cuda"))),
        ("Tensor on device cuda:0 is not on the expected device meta!", Mismatch(("cuda:0", "meta"))),
        (
            "Tensor for argument #2 'mat1' is on CPU, but expected it to be on GPU (while checking arguments for mm)",
            Mismatch(("cpu", "cuda"), "mat1"),
        ),
        (
            "Tensor for argument #1 'self' is on CUDA:1, but expected it to be on cpu",
            Mismatch(("cuda:1", "cpu"), "self"),
        ),
        ("Expected a 'cuda' device type for generator but found 'cpu'", Mismatch(("cpu", "cuda"), "generator")),
        ("can't convert cuda:0 device type tensor to numpy.", Mismatch(("cuda:0",), is_numpy=True)),
        ("Cannot copy out of meta tensor; no data!", Mismatch(("meta",))),
        (
            "indices should be either on cpu or on the same device as the indexed tensor (cpu)",
            Mismatch(("cuda", "cpu"), "indices"),
        ),
        (
            "indices should be either on cpu or on the same device as the indexed tensor (cuda:1)",
            Mismatch(("cpu", "cuda:1"), "indices"),
        ),
        ("indices should be either on cpu or on the same device", Mismatch(("cuda", "cpu"), "indices")),
        ("Placeholder storage has not been allocated on MPS device!", Mismatch(("cpu", "mps"))),
        ("Expected all tensors on one device, found CUDA:0 and also CPU", Mismatch(("cuda:0", "cpu"))),
        (
            "found CUDA:0 and also CPU (when checking argument for argument mat2 in method wrapper_CUDA_mm)",
            Mismatch(("cuda:0", "cpu"), "mat2", "mm"),
        ),
        (f"{SAME} (when checking argument for argument weight in method wrapper_XPU_mm)", Mismatch((), "weight", "mm")),
    ],
)
def test_what_a_message_names(message: str, mismatch: Mismatch):
    assert read_mismatch(message) == mismatch


@pytest.mark.parametrize(
    ("mismatch", "words"),
    [
        (Mismatch(("cuda:0",), is_numpy=True), ["cuda:0", "numpy"]),
        (Mismatch(("meta",)), ["meta", "no data"]),
        (Mismatch(("cpu", "cuda:0"), "mat2", "mm"), ["cpu and cuda:0", "for mm", "'mat2'"]),
        (Mismatch(()), ["two devices"]),
    ],
)
def test_what_a_title_names(mismatch: Mismatch, words: list[str]):
    assert [word for word in words if word not in format_title(mismatch)] == []


def test_a_title_of_devices_alone():
    assert format_title(Mismatch(("cpu", "cuda"))) == "Tensors on cpu and cuda meet"


MOVE_BATCH = "batch = {name: tensor.to(model.device) for name, tensor in batch.items()}"
MOVE_TENSOR = "torch.zeros(n, device=other.device)  # or tensor.to(other.device)"
MODULE_LIST = "self.layers = torch.nn.ModuleList(layers)  # then model.to(device)"
BUFFER = 'self.register_buffer("mask", mask, persistent=False)'
FIND_ALL = "memprof profile --model MODEL --fix device-placement"


@pytest.mark.parametrize(
    ("mismatch", "commands"),
    [
        (Mismatch(("cuda:0",), is_numpy=True), ["tensor.detach().cpu().numpy()"]),
        (
            Mismatch(("cuda:0", "meta")),
            ['model = AutoModelForCausalLM.from_pretrained(MODEL, device_map="auto")'],
        ),
        (Mismatch(("cpu", "cuda"), "generator"), ['torch.Generator(device="cuda")']),
        (
            Mismatch(("cuda:0", "cuda:1"), "mat2"),
            ["print(model.hf_device_map)", "tensor = tensor.to(other.device)", 'device_map={"": 0}'],
        ),
        (Mismatch(("cpu", "cuda:0"), "", "index_select"), [MOVE_BATCH, 'model.to("cuda")', MOVE_TENSOR, FIND_ALL]),
        (Mismatch(("cpu", "cuda:0"), "", "embedding"), [MOVE_BATCH, 'model.to("cuda")', MOVE_TENSOR, FIND_ALL]),
        *(
            (Mismatch(("cpu", "cuda:0"), name), [MOVE_BATCH, 'model.to("cuda")', MOVE_TENSOR, FIND_ALL])
            for name in ("index", "indices", "input")
        ),
        *(
            (Mismatch(("cpu", "cuda:0"), name), [MODULE_LIST, MOVE_TENSOR, BUFFER, FIND_ALL])
            for name in ("mat2", "weight", "bias", "running_mean", "running_var")
        ),
        (Mismatch(("cpu", "cuda:0"), "other"), [MOVE_TENSOR, BUFFER, FIND_ALL]),
        # A GPU without its number may be the other one.
        (Mismatch(("cuda", "cuda:0")), [MOVE_TENSOR, BUFFER, FIND_ALL]),
        (Mismatch(("mps", "mps:0")), [MOVE_TENSOR, BUFFER, FIND_ALL]),
    ],
)
def test_advice_for_the_tensor_that_is_elsewhere(mismatch: Mismatch, commands: list[str]):
    steps = list(list_advice(mismatch, []))
    assert [step.command for step in steps] == commands
    assert all(step.what for step in steps)
    assert [step.fix for step in steps if step.fix] == (["device-placement"] if FIND_ALL in commands else [])
    assert [step.code for step in steps if step.command != FIND_ALL] == ["python"] * (
        len(steps) - (FIND_ALL in commands)
    )


@pytest.mark.parametrize(
    "mismatch",
    [
        Mismatch(("cuda:0",), is_numpy=True),
        Mismatch(("cuda:0", "cuda:1")),
        Mismatch(("cpu", "cuda:0"), "index"),
        Mismatch(("cpu", "cuda:0"), "weight"),
        Mismatch(("cpu", "cuda:0")),
    ],
)
def test_advice_has_the_innermost_line(mismatch: Mismatch):
    frames = [TracebackFrame("/w/lib/net.py", 31, "forward"), TracebackFrame("/w/train.py", 5, "main")]
    places = [step.what for step in list_advice(mismatch, frames) if ".py" in step.what]
    assert places
    assert all(" at net.py:31" in place for place in places)
