"""torchaudio without its compiled operators, as when PyPI's CUDA build is installed beside torch for the CPU.

The package's Python code is installed, but its import fails when its libraries are loaded. Here the operators are
defined; audio.py has the allocations of their kernels.

Sources: src/libtorchaudio of pytorch/audio@v2.11.0 (rnnt/compute.cpp, forced_align/compute.cpp, lfilter.cpp,
overdrive.cpp, utils.cpp), torchaudio/_extension.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.patching import Patch
from memprof.stubs.packages import NO_STUBS_HINT
from memprof.virtual.kernels import registry

SCHEMAS = {
    "rnnt_loss_forward": (
        "(Tensor logits, Tensor targets, Tensor logit_lengths, Tensor target_lengths, int blank, float clamp, "
        "bool fused_log_softmax) -> (Tensor, Tensor)"
    ),
    "forced_align": (
        "(Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank) -> (Tensor, Tensor)"
    ),
    "_lfilter_core_loop": (
        "(Tensor input_signal_windows, Tensor a_coeff_flipped, Tensor(a!) padded_output_waveform) -> Tensor(a!)"
    ),
    "_overdrive_core_loop": (
        "(Tensor waveform, Tensor temp, Tensor(a!) last_in, Tensor(b!) last_out, Tensor(c!) output_waveform) -> "
        "(Tensor(a!), Tensor(b!), Tensor(c!))"
    ),
}
_LIBRARIES = ("_torchaudio", "libtorchaudio")
_NOT_LOADED = (
    "torchaudio's compiled operators cannot be loaded here (a build for CUDA beside torch for the CPU): they are "
    f"replaced by stubs, allocating as those of 2.11.0 do {NO_STUBS_HINT}"
)


@functools.cache
def _define_operators() -> tuple[torch.library.Library, torch.library.Library]:
    """Define torchaudio's operators, without kernels, for the lifetime of the process; return their libraries."""
    library, private_library = (torch.library.Library(name, "FRAGMENT") for name in ("torchaudio", "_torchaudio"))
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
    for name, return_type, value in (("is_align_available", "bool", True), ("cuda_version", "int?", None)):
        private_library.define(f"{name}() -> {return_type}")
        private_library.impl(name, lambda value=value: value, "CompositeImplicitAutograd")
    return library, private_library


def get_patches(module: Any, assume: Callable[[str], None]) -> Iterator[Patch]:
    """Yield a patch of the function in `module`, torchaudio._extension.utils, that loads compiled libraries."""
    original_load = module._load_lib

    def load(lib: str) -> bool:
        try:
            return bool(original_load(lib))
        except OSError:
            if lib not in _LIBRARIES:
                raise
        assume(_NOT_LOADED)
        _define_operators()
        registry.register_library_operators("torchaudio")
        return True

    yield module, "_load_lib", load
