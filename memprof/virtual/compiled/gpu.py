"""The GPU as Dynamo and Inductor see it, answered below `torch.cuda`, whose own functions stay what they are."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

from memprof.torch_private import cuda, dynamo, inductor
from memprof.virtual.cuda_api.driver import returning
from memprof.virtual.gpus import Gpus


def patches(gpus: Gpus, properties: Any, drivers: list[tuple[Any, str, Any]]) -> Iterator[tuple[Any, str, Any]]:
    """Yield the patches (owner, name, replacement)."""

    # Streams of an accelerator are requested wherever there is one.
    yield from (patch for patch in drivers if patch[1].startswith("_cuda") or patch[1] == "default_generators")
    # torch built for CUDA would ask a driver that is not there which of its devices is current.
    yield cuda.accelerator_get_accelerator.patch(returning(None))
    for name in (cuda.exchange_device_of_torch, cuda.maybe_exchange_device_of_torch):
        yield name.patch(lambda device: gpus.select(device))
    for name in (dynamo.cuda_exchange_device, dynamo.cuda_maybe_exchange_device):
        yield name.patch(staticmethod(gpus.select))
    yield cuda.is_compiled.patch(returning(True))
    yield cuda.initialized.patch(True)
    yield cuda.cached_device_count.patch(gpus.number)
    yield cuda.get_device_properties.patch(returning(properties))
    yield dynamo.get_cuda_stream.patch(returning(0))
    yield dynamo.caching_worker_device_properties.patch({"cuda": [properties] * gpus.number})
    yield dynamo.caching_worker_current_devices.patch({})
    yield dynamo.cuda_get_raw_stream.patch(staticmethod(returning(0)))
    yield inductor.triton_hash_with_backend.patch(returning("memprof"))
    triton = sys.modules.get("triton.runtime.driver")
    if triton is not None:
        # Asked for the target of the program's own kernels, whose first form says which arguments they write.
        kind: Any = importlib.import_module("triton.backends.compiler")
        target = kind.GPUTarget("cuda", 10 * properties.major + properties.minor, properties.warp_size)
        yield triton.driver, "_active", SimpleNamespace(get_current_target=returning(target))
