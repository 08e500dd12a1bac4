"""torch.nn.DataParallel and torch.cuda.comm: torch's C++ and NCCL code that distributes tensors over GPUs.

In torch each replica runs in a thread, which would see no virtual GPU; here the replicas run one after the other, each
on its GPU. NCCL's own memory is outside torch's allocator, and unknown. Sources: torch/csrc/cuda/comm.cpp and
torch/csrc/utils/tensor_flatten.cpp.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.cuda.nccl
import torch.nn.parallel

from memprof.patching import Extension, Patch
from memprof.torch_private import cuda
from memprof.torch_private.tensors import flatten_dense_tensors, unflatten_dense_tensors
from memprof.virtual.install_context import InstallContext
from memprof.virtual.kernels.copies import suggest_layout

_Tensors = Sequence[torch.Tensor]


class DataParallel(Extension):
    """The copies between GPUs of `nn.DataParallel` and `torch.cuda.comm`."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches that replace the copies between GPUs by plain ones, and the threads by synchronous calls."""
        yield cuda.broadcast.patch(_broadcast)
        yield cuda.broadcast_coalesced.patch(_broadcast_coalesced)
        yield cuda.scatter.patch(_scatter)
        yield cuda.gather.patch(_gather)
        yield torch.cuda.nccl, "is_available", _has_nccl
        yield torch.cuda.nccl, "reduce", _reduce
        # The package `torch.nn.parallel` has a function of the same name as the module.
        yield sys.modules["torch.nn.parallel.parallel_apply"], "threading", _Threads


class _SynchronousThread:
    """A thread that runs its target when it is started."""

    def __init__(self, target: Callable[..., None], args: Any = ()) -> None:
        self._work = target, args

    def start(self) -> None:
        target, args = self._work
        target(*args)

    def join(self) -> None:
        pass


_Threads = SimpleNamespace(Thread=_SynchronousThread, Lock=contextlib.nullcontext)


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    """Return the tensor itself for its own GPU, and a copy for each other GPU."""
    own = tensor.get_device()
    return [tensor if device == own else torch.empty_like(tensor, device=f"cuda:{device}") for device in devices]


def _broadcast_coalesced(tensors: _Tensors, devices: Sequence[int], buffer_size: int) -> list[list[torch.Tensor]]:
    """Return copies of the tensors for each GPU, by flat buffers of about `buffer_size` bytes of one dtype: a temporary
    buffer, and one on each other GPU, whose parts are the copies."""
    copies: list[dict[int, torch.Tensor]] = [{} for _ in devices]
    copies[0] = dict(enumerate(tensors))
    for group in _group_by_dtype(tensors, buffer_size):
        parts = [tensors[index].detach() for index in group]
        flat = parts[0].contiguous().view(-1) if len(parts) == 1 else flatten_dense_tensors(parts)
        for place, sent in enumerate(_broadcast(flat, devices)[1:], 1):
            copies[place].update(zip(group, (p.detach() for p in unflatten_dense_tensors(sent, parts)), strict=True))
    return [[found[index] for index in range(len(tensors))] for found in copies]


def _group_by_dtype(tensors: _Tensors, limit: int) -> list[list[int]]:
    """Return groups of indices of tensors with one dtype, each of at least `limit` bytes (take_tensors)."""
    done: list[list[int]] = []
    open_groups: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    for index, tensor in enumerate(tensors):
        kind = tensor.dtype
        open_groups.setdefault(kind, []).append(index)
        sizes[kind] = sizes.get(kind, 0) + tensor.nbytes
        if sizes[kind] >= limit:
            done.append(open_groups.pop(kind))
            sizes[kind] = 0
    return [*done, *open_groups.values()]


def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], chunk_sizes: Any = None, dim: int = 0, streams: Any = None
) -> tuple[torch.Tensor, ...]:
    """Return parts of `tensor`, each on its GPU; a part that is already there stays a view. Parts of a host tensor are
    copied on the caller's `streams`, if given."""
    chunks = list(tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim))
    for place, device in enumerate(devices[: len(chunks)]):
        with (streams[place] if streams else None) or contextlib.nullcontext():
            chunks[place] = chunks[place].to(f"cuda:{device}", non_blocking=True)
    return tuple(chunks)


def _gather(tensors: _Tensors, dim: int, destination: int | None = None) -> torch.Tensor:
    """Return all parts in one new tensor, on a GPU or (-1) on the host."""
    size = list(tensors[0].shape)
    size[dim] = sum(tensor.shape[dim] for tensor in tensors)
    layouts = {suggest_layout(tensor) for tensor in tensors}
    layout = layouts.pop() if len(layouts) == 1 else torch.contiguous_format
    device = "cpu" if destination == -1 else "cuda" if destination is None else f"cuda:{destination}"
    whole = torch.empty(size, dtype=tensors[0].dtype, device=device, memory_format=layout)
    begin = 0
    for tensor in tensors:
        whole.narrow(dim, begin, tensor.shape[dim]).copy_(tensor, non_blocking=True)
        begin += tensor.shape[dim]
    return whole


def _has_nccl(tensors: _Tensors) -> bool:
    """Return whether NCCL supports these tensors: dense, contiguous, each on a different GPU."""
    devices = [tensor.get_device() for tensor in tensors]
    plain = all(tensor.is_cuda and not tensor.is_sparse and tensor.is_contiguous() for tensor in tensors)
    return plain and len(set(devices)) == len(devices)


def _reduce(inputs: _Tensors, output: Any = None, *args: Any, **kwargs: Any) -> None:
    """Write the sum of the inputs into `output`, which the caller made."""
