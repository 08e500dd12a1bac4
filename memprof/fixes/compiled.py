"""Fix compile: each layer runs compiled by torch.compile."""

from __future__ import annotations

import importlib.util
import sys
from typing import Any

import torch
from torch import nn

from memprof.fixes.applied import Changes, ReplacedForward, has_forward
from memprof.fixes.catalog.fix import Fix, Numerics
from memprof.installer import format_install_command
from memprof.torch_private import inductor
from memprof.workload.layers import find_layers


@Fix(
    name="compile", order=145, numerics=Numerics.EXACT, saves=("activations", "temporaries"),
    changes="compile layers by torch.compile, which fuses operators and recomputes what is cheap",
    cost="layers are compiled before they first run, and again for inputs of another kind",
    conflicts={
        "cpu-offload-weights": "compiled code takes its weights where they were when it was made",
        "8-bit-weights": "quantized layers end the graphs", "4-bit-weights": "quantized layers end the graphs",
        "qlora": "quantized layers end the graphs",
    },
    edit="memprof.fixes.spec_edits:check_parallel", detect=lambda spec: spec.compile, compiles=True,
    ladder_order=85, script_order=15, headroom_order=20,
)  # fmt: skip
def install(model: nn.Module, changes: Changes) -> None:
    """Replace the forward of each layer by one that torch.compile compiles at its first call.

    Layers are compiled separately, since a graph of the full model would lose the changes of other fixes, such as a
    loss in chunks. Raises UsageError if Inductor cannot run, a layer is compiled already, or the model has no layers.
    """
    missing = _find_missing_compiler(model)
    if missing is not None:
        raise changes.does_not_apply("Inductor cannot run here", *missing)
    layers = find_layers(model, changes.fix)
    for name, module in layers:
        if has_forward(module, Compiled) or getattr(module, "_compiled_call_impl", None) is not None:
            raise changes.already_on(name)
        changes.set_attribute(module, "forward", Compiled(module))
    changes.note(f"{len(layers)} layers are compiled when they are first called: {layers[0][0]} to {layers[-1][0]}")


def _find_missing_compiler(model: nn.Module) -> tuple[str, str] | None:
    """Return (missing compiler, how to install it) if Inductor cannot run on the device of `model`, else None.
    A virtual GPU needs Triton for the code around kernels; a CPU needs a C++ compiler for the kernels themselves."""
    device_type = next((parameter.device.type for parameter in model.parameters()), "cpu")
    if device_type != "cpu":
        has_triton = "triton" in sys.modules or importlib.util.find_spec("triton") is not None
        return None if has_triton else ("no Triton", format_install_command("triton"))
    if not (inductor.get_cpp_compiler.exists() and inductor.InvalidCxxCompiler.exists()):
        return None
    try:
        inductor.get_cpp_compiler()
    except inductor.InvalidCxxCompiler.get():
        return "no compiler of C++", "install g++ or clang++, or name one by CXX"
    return None


class Compiled(ReplacedForward):
    """Replaced forward of a module, compiled at its first call; a copy of the module compiles its own."""

    DERIVED = ("_compiled",)  # attributes that two equal layers may differ in, since one was called and one was not

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self._compiled: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the compiled forward; the first call compiles it."""
        if self._compiled is None:
            self._compiled = torch.compile(self._forward)
        return self._compiled(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_compiled": None}
