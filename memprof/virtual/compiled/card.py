"""What Dynamo and Inductor ask of the card, answered below `torch.cuda`, whose own functions stay what they are."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from memprof.virtual.cards import Cards


def patches(cards: Cards, properties: Any, drivers: list[tuple[Any, str, Any]]) -> Iterator[tuple[Any, str, Any]]:
    """The patches (owner, name, replacement).

    Args:
        cards: how many there are, and which is current.
        properties: of one of them.
        drivers: what stands for the driver in the run.
    """
    from torch._dynamo import device_interface
    from torch.utils import _triton

    def returning(value: Any) -> Callable[..., Any]:
        return lambda *args, **kwargs: value

    # Streams of an accelerator are asked for wherever there is one.
    yield from (patch for patch in drivers if patch[1].startswith("_cuda") or patch[1] == "default_generators")
    # torch built for CUDA would ask a driver that is not there which of its devices is current.
    yield torch._C, "_accelerator_getAccelerator", returning(None)
    for name in ("exchange_device", "maybe_exchange_device"):
        yield torch.cuda, f"_{name}", lambda device: cards.select(device)
        yield device_interface.CudaInterface, name, staticmethod(cards.select)
    yield torch.cuda, "_is_compiled", returning(True)
    yield torch.cuda, "_initialized", True
    yield torch.cuda, "_cached_device_count", cards.number
    yield torch.cuda, "_get_device_properties", returning(properties)
    yield device_interface, "get_cuda_stream", returning(0)
    yield device_interface, "caching_worker_device_properties", {"cuda": [properties] * cards.number}
    yield device_interface, "caching_worker_current_devices", {}
    yield device_interface.CudaInterface, "get_raw_stream", staticmethod(returning(0))
    yield _triton, "triton_hash_with_backend", returning("memprof")
    triton = sys.modules.get("triton.runtime.driver")
    if triton is not None:
        # Asked for the target of the program's own kernels, whose first form says which arguments they write.
        kind: Any = importlib.import_module("triton.backends.compiler")
        target = kind.GPUTarget("cuda", 10 * properties.major + properties.minor, properties.warp_size)
        yield triton.driver, "_active", SimpleNamespace(get_current_target=returning(target))
