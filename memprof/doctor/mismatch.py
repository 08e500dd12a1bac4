"""Diagnosis of errors about tensors on two devices: the devices, the operator's argument, and advice."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from memprof.doctor.diagnosis import Advice
from memprof.doctor.tracebacks import TracebackFrame
from memprof.fixes.catalog import find_fixes_for

_DEVICE = r"((?:cuda|cpu|mps|xpu|meta|npu|hip)(?::\d+)?)"
_TWO_DEVICES = re.compile(rf"found at least two devices, {_DEVICE} and {_DEVICE}")
_OTHER_DEVICE = re.compile(rf"got (\w+) is on {_DEVICE}, different from other tensors on {_DEVICE}")
_ARGUMENT_AND_METHOD = re.compile(r"checking (?:argument|arguments) (?:for argument (\w+) )?in method (\w+)")
_INPUT_TYPES = re.compile(r"[Ii]nput type \((?:torch\.)?(\S+?)\) and (weight|bias) type \((?:torch\.)?(\S+?)\)")
_EXPECTED_OBJECT = re.compile(
    r"Expected object of (?:device type|backend|type) (\S+) but got (?:device type|backend|type) (\S+)"
)
_EXPECTED_ON = re.compile(
    rf"argument #?\d* ?'?(\w*)'? is on (?:the )?{_DEVICE},? ?but expected (?:it|them) to be on (?:the )?{_DEVICE}", re.I
)
_ANY_TWO_DEVICES = re.compile(rf"found .{{0,40}}?{_DEVICE}.{{0,40}}?{_DEVICE}", re.I)
_MODULE_BUFFERS = re.compile(rf"buffers on device {_DEVICE}.{{0,40}}?on device:? {_DEVICE}")
_NUMPY_CONVERSION = re.compile(rf"can't convert {_DEVICE}")
_UNEXPECTED_DEVICE = re.compile(rf"Tensor on device {_DEVICE} is not on the expected device {_DEVICE}")
_GENERATOR_DEVICE = re.compile(r"Expected an? '?(\w+)'? device type for generator but found '?(\w+)'?")
_WEIGHT_ARGUMENTS = ("mat2", "weight", "running_mean", "running_var", "bias")


@dataclass(frozen=True, slots=True)
class Mismatch:
    """Tensors of one operator on several devices: devices (the unexpected one first), named argument and kernel."""

    devices: tuple[str, ...]
    argument: str = ""
    kernel: str = ""
    is_numpy: bool = False


def _parse_device(type_name: str) -> str:
    return next((name for name in ("cuda", "mps", "xpu", "npu") if name in type_name.lower()), "cpu")


def read_mismatch(message: str) -> Mismatch:
    """Return the devices, argument and kernel that the one-line error `message` names."""
    argument = _ARGUMENT_AND_METHOD.search(message)
    name, kernel = (argument[1] or "", argument[2]) if argument else ("", "")
    kernel = re.sub(r"^wrapper_+(?:CUDA_+|MPS_+|XPU_+)?_*", "", kernel)
    if match := _OTHER_DEVICE.search(message):
        return Mismatch((match[2], match[3]), match[1], kernel)
    if match := _TWO_DEVICES.search(message):
        return Mismatch((match[1], match[2]), name, kernel)
    if match := _INPUT_TYPES.search(message):
        return Mismatch((_parse_device(match[1]), _parse_device(match[3])), "input", "")
    if match := re.search(rf"xpected device {_DEVICE} but got device {_DEVICE}", message):
        return Mismatch((match[2], match[1]))
    if match := _EXPECTED_OBJECT.search(message):
        return Mismatch((_parse_device(match[2]), _parse_device(match[1])), _find_argument_name(message), "")
    if match := _UNEXPECTED_DEVICE.search(message) or _MODULE_BUFFERS.search(message):
        return Mismatch((match[1], match[2]))
    if match := _EXPECTED_ON.search(message):
        return Mismatch((match[2].lower().replace("gpu", "cuda"), match[3].lower().replace("gpu", "cuda")), match[1])
    if match := _GENERATOR_DEVICE.search(message):
        return Mismatch((match[2], match[1]), "generator")
    if match := _NUMPY_CONVERSION.search(message):
        return Mismatch((match[1],), is_numpy=True)
    if "out of meta tensor" in message:
        return Mismatch(("meta",))
    if "indices should be either on" in message:
        tensor_match = re.search(r"indexed tensor \((\w+(?::\d+)?)\)", message)
        tensor_device = tensor_match[1] if tensor_match else "cpu"
        return Mismatch(("cuda" if tensor_device == "cpu" else "cpu", tensor_device), "indices")
    if "Placeholder storage" in message:
        return Mismatch(("cpu", "mps"))
    if re.search(r"is on (?:the )?CPU", message):
        return Mismatch(("cpu", "cuda"), _find_argument_name(message))
    match = _ANY_TWO_DEVICES.search(message)
    return Mismatch((match[1].lower(), match[2].lower()), name, kernel) if match else Mismatch((), name, kernel)


def _find_argument_name(message: str) -> str:
    match = re.search(r"argument #?\d+ '(\w+)'", message)
    return match[1] if match else ""


def format_title(mismatch: Mismatch) -> str:
    """Return a one-line description of `mismatch`."""
    if mismatch.is_numpy:
        return f"A tensor on {mismatch.devices[0]} is turned into a numpy array"
    if mismatch.devices == ("meta",):
        return "A tensor on meta, which has no data, is copied"
    devices = " and ".join(mismatch.devices) or "two devices"
    kernel = f" for {mismatch.kernel}" if mismatch.kernel else ""
    argument = f"; torch names the argument {mismatch.argument!r}" if mismatch.argument else ""
    return f"Tensors on {devices} meet{kernel}{argument}"


def list_advice(mismatch: Mismatch, frames: list[TracebackFrame]) -> Iterator[Advice]:
    """Yield advice for tensors on several devices, likeliest first; `frames` are the traceback's, innermost first."""
    location = f" at {frames[0].file.rsplit('/', 1)[-1]}:{frames[0].line}" if frames else ""
    if mismatch.is_numpy:
        yield Advice.python(f"take the tensor to the host first{location}", "tensor.detach().cpu().numpy()")
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
        problem = "the model is spread over GPUs (device_map) and a tensor of one layer's GPU meets another's"
        yield Advice.python(f"{problem}: see where each layer is", "print(model.hf_device_map)")
        advice = f"move the tensor to the other's device before they meet{location}"
        yield Advice.python(advice, "tensor = tensor.to(other.device)")
        yield Advice.python("or keep the whole model on one GPU, if it fits", 'device_map={"": 0}')
        return
    is_lookup = "index_select" in mismatch.kernel or "embedding" in mismatch.kernel
    is_input = is_lookup or mismatch.argument in ("index", "indices", "input")
    if is_input:
        yield Advice.python(
            f"the inputs are on another device than the model: move the batch{location}",
            "batch = {name: tensor.to(model.device) for name, tensor in batch.items()}",
        )
        yield Advice.python("or the model was never moved", 'model.to("cuda")')
    elif mismatch.argument in _WEIGHT_ARGUMENTS:
        yield Advice.python(
            f"a weight is on another device: a module made after model.to(), or kept in a plain list or dict{location}",
            "self.layers = torch.nn.ModuleList(layers)  # then model.to(device)",
        )
    code = "torch.zeros(n, device=other.device)  # or tensor.to(other.device)"
    yield Advice.python(f"make the tensor where the others are{location}", code)
    if not is_input:
        yield Advice.python(
            "a tensor that a module keeps moves with model.to() once it is a buffer",
            'self.register_buffer("mask", mask, persistent=False)',
        )
    placement = find_fixes_for("device-mismatch")[0].name
    description = "find every such place without a GPU, and put the tensors right"
    yield Advice(description, f"memprof profile --model MODEL --fix {placement}", fix=placement)
