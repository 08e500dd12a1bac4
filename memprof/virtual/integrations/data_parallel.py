"""Patches of torch.nn.DataParallel and torch.cuda.comm, whose C++ and NCCL code distributes tensors over GPUs.

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
    """Patches of the copies that `nn.DataParallel` and `torch.cuda.comm` make between GPUs."""

    def patches(self, context: InstallContext) -> Iterator[Patch]:
        """Yield patches that copy between GPUs by `Tensor.copy_` and `Tensor.to`, and run replicas without threads."""
        yield cuda.broadcast.patch(_broadcast)
        yield cuda.broadcast_coalesced.patch(_broadcast_coalesced)
        yield cuda.scatter.patch(_scatter)
        yield cuda.gather.patch(_gather)
        yield torch.cuda.nccl, "is_available", _has_nccl
        yield torch.cuda.nccl, "reduce", _reduce
        # The package `torch.nn.parallel` has a function of the same name as the module.
        yield sys.modules["torch.nn.parallel.parallel_apply"], "threading", _SynchronousThreading


class _SynchronousThread:
    """A thread that runs its target when it is started."""

    def __init__(self, target: Callable[..., None], args: Any = ()) -> None:
        self._target_and_args = target, args

    def start(self) -> None:
        target, args = self._target_and_args
        target(*args)

    def join(self) -> None:
        pass


_SynchronousThreading = SimpleNamespace(Thread=_SynchronousThread, Lock=contextlib.nullcontext)


def _broadcast(tensor: torch.Tensor, devices: Sequence[int]) -> list[torch.Tensor]:
    """Return `tensor` for each of `devices`: itself on its own GPU, a copy on the others."""
    own_device = tensor.get_device()
    return [tensor if device == own_device else torch.empty_like(tensor, device=f"cuda:{device}") for device in devices]


def _broadcast_coalesced(tensors: _Tensors, devices: Sequence[int], buffer_size: int) -> list[list[torch.Tensor]]:
    """Return for each GPU its copies of `tensors`, which are views of flat buffers of one dtype and about `buffer_size`
    bytes. The first GPU keeps the tensors themselves."""
    copies: list[dict[int, torch.Tensor]] = [{} for _ in devices]
    copies[0] = dict(enumerate(tensors))
    for group in _group_by_dtype(tensors, buffer_size):
        parts = [tensors[index].detach() for index in group]
        flat = parts[0].contiguous().view(-1) if len(parts) == 1 else flatten_dense_tensors(parts)
        for position, copy in enumerate(_broadcast(flat, devices)[1:], 1):
            copies[position].update(zip(group, (p.detach() for p in unflatten_dense_tensors(copy, parts)), strict=True))
    return [[device_copies[index] for index in range(len(tensors))] for device_copies in copies]


def _group_by_dtype(tensors: _Tensors, min_bytes: int) -> list[list[int]]:
    """Return groups of indices of tensors with one dtype, of `min_bytes` or more except the last (`take_tensors`)."""
    full_groups: list[list[int]] = []
    open_groups: dict[torch.dtype, list[int]] = {}
    sizes: dict[torch.dtype, int] = {}
    for index, tensor in enumerate(tensors):
        dtype = tensor.dtype
        open_groups.setdefault(dtype, []).append(index)
        sizes[dtype] = sizes.get(dtype, 0) + tensor.nbytes
        if sizes[dtype] >= min_bytes:
            full_groups.append(open_groups.pop(dtype))
            sizes[dtype] = 0
    return [*full_groups, *open_groups.values()]


def _scatter(
    tensor: torch.Tensor, devices: Sequence[int], chunk_sizes: Any = None, dim: int = 0, streams: Any = None
) -> tuple[torch.Tensor, ...]:
    """Return chunks of `tensor`, each on its GPU of `devices`; a chunk that is already there stays a view. Chunks are
    copied on `streams` (one per GPU), if given."""
    chunks = list(tensor.chunk(len(devices), dim) if chunk_sizes is None else tensor.split(list(chunk_sizes), dim))
    for position, device in enumerate(devices[: len(chunks)]):
        with (streams[position] if streams else None) or contextlib.nullcontext():
            chunks[position] = chunks[position].to(f"cuda:{device}", non_blocking=True)
    return tuple(chunks)


def _gather(tensors: _Tensors, dim: int, destination: int | None = None) -> torch.Tensor:
    """Return `tensors` concatenated along `dim`, on the GPU `destination` (None: the current one; -1: the host)."""
    shape = list(tensors[0].shape)
    shape[dim] = sum(tensor.shape[dim] for tensor in tensors)
    layouts = {suggest_layout(tensor) for tensor in tensors}
    layout = layouts.pop() if len(layouts) == 1 else torch.contiguous_format
    device = "cpu" if destination == -1 else "cuda" if destination is None else f"cuda:{destination}"
    gathered = torch.empty(shape, dtype=tensors[0].dtype, device=device, memory_format=layout)
    begin = 0
    for tensor in tensors:
        gathered.narrow(dim, begin, tensor.shape[dim]).copy_(tensor, non_blocking=True)
        begin += tensor.shape[dim]
    return gathered


def _has_nccl(tensors: _Tensors) -> bool:
    """Return whether NCCL supports `tensors`: dense, contiguous, and each on a different GPU."""
    devices = [tensor.get_device() for tensor in tensors]
    are_supported = all(tensor.is_cuda and not tensor.is_sparse and tensor.is_contiguous() for tensor in tensors)
    return are_supported and len(set(devices)) == len(devices)


def _reduce(inputs: _Tensors, output: Any = None, *args: Any, **kwargs: Any) -> None:
    """Do nothing: `output` already exists, and sums are not computed."""
