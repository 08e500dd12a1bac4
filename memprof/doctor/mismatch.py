"""Diagnosis of errors about tensors on two devices: the devices, the operator's argument, and advice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from memprof.doctor.diagnosis import Advice
from memprof.doctor.tracebacks import TracebackFrame
from memprof.fixes.catalog import find_helpful

_DEVICE = r"((?:cuda|cpu|mps|xpu|meta|npu|hip)(?::\d+)?)"
_TWO_DEVICES = re.compile(rf"found at least two devices, {_DEVICE} and {_DEVICE}")
_OTHER_DEVICE = re.compile(rf"got (\w+) is on {_DEVICE}, different from other tensors on {_DEVICE}")
_ARGUMENT = re.compile(r"checking (?:argument|arguments) (?:for argument (\w+) )?in method (\w+)")
_TYPES = re.compile(r"[Ii]nput type \((?:torch\.)?(\S+?)\) and (weight|bias) type \((?:torch\.)?(\S+?)\)")
_OBJECT = re.compile(
    r"Expected object of (?:device type|backend|type) (\S+) but got (?:device type|backend|type) (\S+)"
)
_EXPECTED_ON = re.compile(
    rf"argument #?\d* ?'?(\w*)'? is on (?:the )?{_DEVICE},? ?but expected (?:it|them) to be on (?:the )?{_DEVICE}", re.I
)
_ANY_TWO = re.compile(rf"found .{{0,40}}?{_DEVICE}.{{0,40}}?{_DEVICE}", re.I)
_MODULE = re.compile(rf"buffers on device {_DEVICE}.{{0,40}}?on device:? {_DEVICE}")
_NUMPY = re.compile(rf"can't convert {_DEVICE}")
_EXPECTED = re.compile(rf"Tensor on device {_DEVICE} is not on the expected device {_DEVICE}")
_GENERATOR = re.compile(r"Expected an? '?(\w+)'? device type for generator but found '?(\w+)'?")
_WEIGHTS = ("mat2", "weight", "running_mean", "running_var", "bias")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The devices of a mismatch, the unexpected one first if known, and the argument and kernel that torch names."""

    devices: tuple[str, ...]
    argument: str = ""
    kernel: str = ""
    is_numpy: bool = False


def _parse_device(type_name: str) -> str:
    return next((name for name in ("cuda", "mps", "xpu", "npu") if name in type_name.lower()), "cpu")


def read_mismatch(message: str) -> Mismatch:
    """Return the mismatch in an error about two devices; `text` is one line."""
    argument = _ARGUMENT.search(message)
    name, kernel = (argument[1] or "", argument[2]) if argument else ("", "")
    kernel = re.sub(r"^wrapper_+(?:CUDA_+|MPS_+|XPU_+)?_*", "", kernel)
    if found := _OTHER_DEVICE.search(message):
        return Mismatch((found[2], found[3]), found[1], kernel)
    if found := _TWO_DEVICES.search(message):
        return Mismatch((found[1], found[2]), name, kernel)
    if found := _TYPES.search(message):
        return Mismatch((_parse_device(found[1]), _parse_device(found[3])), "input", "")
    if found := re.search(rf"xpected device {_DEVICE} but got device {_DEVICE}", message):
        return Mismatch((found[2], found[1]))
    if found := _OBJECT.search(message):
        return Mismatch((_parse_device(found[2]), _parse_device(found[1])), _find_argument_name(message), "")
    if found := _EXPECTED.search(message) or _MODULE.search(message):
        return Mismatch((found[1], found[2]))
    if found := _EXPECTED_ON.search(message):
        return Mismatch((found[2].lower().replace("gpu", "cuda"), found[3].lower().replace("gpu", "cuda")), found[1])
    if found := _GENERATOR.search(message):
        return Mismatch((found[2], found[1]), "generator")
    if found := _NUMPY.search(message):
        return Mismatch((found[1],), is_numpy=True)
    if "out of meta tensor" in message:
        return Mismatch(("meta",))
    if "indices should be either on" in message:
        held = re.search(r"indexed tensor \((\w+(?::\d+)?)\)", message)
        indexed = held[1] if held else "cpu"
        return Mismatch(("cuda" if indexed == "cpu" else "cpu", indexed), "indices")
    if "Placeholder storage" in message:
        return Mismatch(("cpu", "mps"))
    if re.search(r"is on (?:the )?CPU", message):
        return Mismatch(("cpu", "cuda"), _find_argument_name(message))
    found = _ANY_TWO.search(message)
    return Mismatch((found[1].lower(), found[2].lower()), name, kernel) if found else Mismatch((), name, kernel)


def _find_argument_name(message: str) -> str:
    match = re.search(r"argument #?\d+ '(\w+)'", message)
    return match[1] if match else ""


def format_title(mismatch: Mismatch) -> str:
    """Return a description of the mismatch in one line."""
    if mismatch.is_numpy:
        return f"A tensor on {mismatch.devices[0]} is turned into a numpy array"
    if mismatch.devices == ("meta",):
        return "A tensor on meta, which has no data, is copied"
    met = " and ".join(mismatch.devices) or "two devices"
    what = f" for {mismatch.kernel}" if mismatch.kernel else ""
    which = f"; torch names the argument {mismatch.argument!r}" if mismatch.argument else ""
    return f"Tensors on {met} meet{what}{which}"


def list_advice(mismatch: Mismatch, frames: list[TracebackFrame]) -> Iterator[Advice]:
    """Yield advice for a mismatch, likeliest first."""
    at = f" at {frames[0].file.rsplit('/', 1)[-1]}:{frames[0].line}" if frames else ""
    if mismatch.is_numpy:
        yield Advice.python(f"take the tensor to the host first{at}", "tensor.detach().cpu().numpy()")
        return
    if "meta" in mismatch.devices:
        yield Advice.python(
            "some weights were never loaded: load with a device_map, or make them on a device and then load",
            'model = AutoModelForCausalLM.from_pretrained(MODEL, device_map="auto")',
        )
        return
    gpus = {device for device in mismatch.devices if device not in ("cpu", "cuda", "mps")}
    if mismatch.argument == "generator":
        yield Advice.python("make the generator on the device of the tensors", 'torch.Generator(device="cuda")')
        return
    if len(gpus) > 1:
        met = "the model is spread over GPUs (device_map) and a tensor of one layer's GPU meets another's"
        yield Advice.python(f"{met}: see where each layer is", "print(model.hf_device_map)")
        moved = f"move the tensor to the other's device before they meet{at}"
        yield Advice.python(moved, "tensor = tensor.to(other.device)")
        yield Advice.python("or keep the whole model on one GPU, if it fits", 'device_map={"": 0}')
        return
    is_input = mismatch.argument in ("index", "indices", "input")
    if is_input or "index_select" in mismatch.kernel or "embedding" in mismatch.kernel:
        yield Advice.python(
            f"the inputs are on another device than the model: move the batch{at}",
            "batch = {name: tensor.to(model.device) for name, tensor in batch.items()}",
        )
        yield Advice.python("or the model was never moved", 'model.to("cuda")')
    elif mismatch.argument in _WEIGHTS:
        yield Advice.python(
            f"a weight is on another device: a module made after model.to(), or kept in a plain list or dict{at}",
            "self.layers = torch.nn.ModuleList(layers)  # then model.to(device)",
        )
    made = "torch.zeros(n, device=other.device)  # or tensor.to(other.device)"
    yield Advice.python(f"make the tensor where the others are{at}", made)
    yield Advice.python(
        "a tensor that a module keeps moves with model.to() once it is a buffer",
        'self.register_buffer("mask", mask, persistent=False)',
    )
    placement = find_helpful("device-mismatch")[0].name
    what = "find every such place without a GPU, and put the tensors right"
    yield Advice(what, f"memprof profile --model MODEL --fix {placement}", fix=placement)
