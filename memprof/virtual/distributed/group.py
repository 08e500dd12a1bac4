"""Process group on the virtual GPU: rank R of N, whose collectives complete when they are called.

Collectives allocate on this rank as NCCL's do (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). `alone.py` has the
contributions of the other ranks. The memory of NCCL outside the caching allocator is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from memprof.torch_private import distributed
from memprof.virtual.install_context import InstallContext
from memprof.virtual.peers.known import GroupRank, Parts

BACKEND = "memprof_rank"
_ProcessGroup: Any = getattr(dist, "ProcessGroup", object)
_Work: Any = getattr(dist, "Work", object)
_Tensors = Sequence[torch.Tensor]


class CompletedWork(_Work):
    """Handle of a collective, complete once waited for. Inputs live until `wait`, outputs as long as the handle
    (`stashed_for_allocator_safety_`, `outputs_`)."""

    def __init__(self, results: Any, given: Any = (), waits: Sequence[Callable[..., Any]] = ()) -> None:
        super().__init__()
        self._results = list(results)
        self._given = given
        self._waits = waits
        self._source: Any = 0

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the contributions of the other ranks."""
        waits, self._waits = self._waits, ()
        for wait in waits:
            self._source = wait()
        self._given = ()
        return True

    synchronize = block_current_stream = wait

    def _source_rank(self) -> int:
        return int(self._source)

    def is_completed(self) -> bool:
        return True

    is_success = is_completed

    def exception(self) -> None:
        """Return None: no collective fails."""

    def result(self) -> Any:
        return self._results

    def get_future(self) -> Any:
        """Return the result as a completed future, whose callbacks run at once."""
        self.wait()
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._results)
        return future


class RankGroup(_ProcessGroup):
    """Process group of one rank, with the methods that torch calls."""

    supports_splitting = supports_coalescing = True
    supports_time_estimate = False

    def __init__(self, place: GroupRank, backend: str, context: InstallContext) -> None:
        super().__init__(place.rank, place.size)
        self.place = place
        self._rank, self._size = place.rank, place.size
        self._backend = backend
        self._others = context.others
        self._on_gpu = context.is_on_gpu
        self._meter_sent = context.tracker.meter.sent
        self._owners = context.recorder.owners
        self._stream: Any = None  # NCCL's stream for sends and receives
        self._calls = 0
        # Waits to run at the end of a group of calls (`_coalescing_manager`).
        self._coalesced: list[Callable[..., Any]] | None = None

    # -- properties -------------------------------------------------------------------------------------------------

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        """Return the name by which torch's operators look up the group."""
        return str(distributed.world.get().pg_names[self])

    @property
    def _device_types(self) -> list[torch.device]:
        """Return the devices with a backend; torch sends objects from the host if possible, else from the GPU."""
        devices_by_backend = {"nccl": ["cuda"], "gloo": ["cpu", "cuda"], "mpi": ["cpu", "cuda"]}
        named = [part.partition(":")[0] for part in self._backend.split(",") if ":" in part]
        return [torch.device(kind) for kind in named or devices_by_backend.get(self._backend, ["cpu", "cuda"])]

    @property
    def _has_nccl(self) -> bool:
        return "nccl" in self._backend or self._backend == "undefined"

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    _get_backend_name = getBackendName

    def _get_backend(self, device: Any) -> Any:
        return self

    def _set_sequence_number_for_group(self) -> None:
        self._calls = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced = []

    def _end_coalescing(self, device: Any) -> Any:
        waits, self._coalesced = self._coalesced, None
        return CompletedWork([], waits=waits or ())

    # -- collectives ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        self._note_sent("allreduce", tensors, 2 * self._remote_share)
        self._owners.mark_reduced(tensors)
        waits = [self._others.all_reduce(tensor, _reduction(opts), self.place) for tensor in tensors]
        return self._complete(tensors, waits=waits)

    def reduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        self._note_sent("reduce", tensors, 1)
        self._owners.mark_reduced(tensors)
        root = 0 if opts is None else opts.rootRank
        waits = [self._others.reduce(tensor, _reduction(opts), root, self.place) for tensor in tensors]
        return self._complete(tensors, waits=waits)

    def broadcast(self, tensors: _Tensors, opts: Any = None) -> Any:
        self._note_sent("broadcast", tensors, 1)
        root = 0 if opts is None else opts.rootRank
        return self._complete(tensors, waits=[self._others.broadcast(tensor, root, self.place) for tensor in tensors])

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks; NCCL's barrier reduces a number on the GPU."""
        results = [torch.zeros(1, device="cuda")] if self._has_nccl else []
        return self._complete(results, waits=[self._others.barrier(self.place)])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self._complete([], waits=[self._others.barrier(self.place)]).wait()

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Gather a tensor of each rank; NCCL gathers tensors of one size into one buffer, and copies the parts."""
        self._note_sent("allgather", [part for parts in outputs for part in parts], self._remote_share)
        buffers: list[Any] = []
        waits = []
        for parts, tensor in zip(outputs, inputs, strict=True):
            buffers.append(self._make_flat_buffer(parts, tensor))
            self._owners.mark_gathered(parts, [tensor])
            waits.append(self._others.all_gather(Parts(parts), tensor, self.place))
        return self._complete(buffers if buffers[0] is not None else outputs, inputs, waits)

    def reduce_scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> Any:
        """Reduce and scatter; NCCL copies tensors of one size into one buffer first."""
        self._note_sent("reduce_scatter", [part for parts in inputs for part in parts], self._remote_share)
        flat, waits = [], []
        for tensor, parts in zip(outputs, inputs, strict=True):
            flat.append(self._make_flat_buffer(parts, tensor))
            waits.append(self._others.reduce_scatter(tensor, Parts(parts), _reduction(opts), self.place))
        return self._complete(outputs, (flat, inputs), waits)

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Gather to one rank; the other ranks pass no output lists."""
        root = self._rank if opts is None else opts.rootRank
        parts = Parts(outputs[0]) if outputs else None
        return self._complete(outputs, inputs, [self._others.gather(parts, inputs[0], root, self.place)])

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> Any:
        """Scatter from one rank; the other ranks pass no input lists."""
        root = self._rank if opts is None else opts.rootRank
        parts = Parts(inputs[0]) if inputs else None
        return self._complete(outputs, inputs, [self._others.scatter(outputs[0], parts, root, self.place)])

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        self._note_sent("alltoall", inputs, self._remote_share)
        return self._complete(outputs, inputs, [self._others.all_to_all(Parts(outputs), Parts(inputs), self.place)])

    def alltoall_base(
        self, output: Any, tensor: Any, out_splits: Any = (), in_splits: Any = (), opts: Any = None
    ) -> Any:
        """Exchange the parts of one tensor, split along the first dimension."""
        self._note_sent("alltoall", [tensor], self._remote_share)
        takes, gives = Parts([output], self._size, out_splits), Parts([tensor], self._size, in_splits)
        return self._complete([output], tensor, [self._others.all_to_all(takes, gives, self.place)])

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        if output.numel() != tensor.numel() * self._size:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        self._note_sent("allgather", [output], self._remote_share)
        self._owners.mark_gathered([output], [tensor])
        parts = _split_evenly(output, self._size)
        return self._complete([output], tensor, [self._others.all_gather(parts, tensor, self.place)])

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        if tensor.numel() != output.numel() * self._size:
            raise ValueError("input tensor must be the same size as output size times world size")
        self._note_sent("reduce_scatter", [tensor], self._remote_share)
        self._owners.mark_reduced([tensor])
        parts = _split_evenly(tensor, self._size)
        waits = [self._others.reduce_scatter(output, parts, _reduction(opts), self.place)]
        return self._complete([output], tensor, waits)

    def allgather_into_tensor_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        works = [self._allgather_base(output, tensor) for output, tensor in zip(outputs, inputs, strict=True)]
        return self._complete(outputs, inputs, [work.wait for work in works])

    def reduce_scatter_tensor_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        works = [self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return self._complete(outputs, inputs, [work.wait for work in works])

    def allgather_coalesced(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Gather several tensors; `outputs` has for each rank a list with a part of each tensor."""
        self._note_sent("allgather", [part for parts in outputs for part in parts], self._remote_share)
        pairs = zip(zip(*outputs, strict=True), inputs, strict=True)
        waits = [self._others.all_gather(Parts(parts), tensor, self.place) for parts, tensor in pairs]
        return self._complete(outputs, inputs, waits)

    def send(self, tensors: _Tensors, rank: int, tag: int = 0) -> Any:
        """Send to one rank, without waiting for the receiver."""
        self._note_sent("send", tensors, 1)
        waits = [self._others.send(tensor, rank, tag, self.place) for tensor in tensors]
        return self._complete(tensors, waits=[*self._use_stream_of_nccl(tensors), *waits])

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> Any:
        return self.recv(tensors, None, tag)

    def recv(self, tensors: _Tensors, rank: int | None, tag: int = 0) -> Any:
        waits = [self._others.receive(tensor, rank, tag, self.place) for tensor in tensors]
        return self._complete(tensors, waits=[*self._use_stream_of_nccl(tensors), *waits])

    def _use_stream_of_nccl(self, tensors: _Tensors) -> list[Callable[[], None]]:
        """Record `tensors` on NCCL's stream for sends and receives (`pointToPoint`), and return the functions to call
        when the program waits. Collectives record no streams from torch 2.8 on."""
        tensors = [tensor for tensor in tensors if self._has_nccl and self._on_gpu(tensor)]
        if not tensors:
            return []
        device = tensors[0].device
        stream = self._stream = self._stream or torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        for tensor in tensors:
            tensor.record_stream(stream)
        return [lambda: torch.cuda.current_stream(device).wait_stream(stream)]

    # Names of the methods from torch 2.12 on.
    allreduce_coalesced = allreduce
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _note_sent(self, name: str, tensors: _Tensors, share: float) -> None:
        """Record that `share` of the bytes of `tensors` leaves the GPU, in a ring (nccl-tests, PERFORMANCE.md)."""
        for tensor in tensors:
            if self._size > 1 and self._on_gpu(tensor):
                self._meter_sent(f"c10d.{name}", tensor, round(tensor.numel() * tensor.element_size() * share))

    @property
    def _remote_share(self) -> float:
        """Return the fraction of evenly distributed data that is on other ranks."""
        return (self._size - 1) / self._size

    def _make_flat_buffer(self, parts: _Tensors, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return NCCL's buffer for all parts (`newLikeFlat`); None for tensors of several sizes, sent one by one."""
        if not self._has_nccl or not self._on_gpu(tensor) or any(part.shape != parts[0].shape for part in parts):
            return None
        return torch.empty((len(parts), *tensor.shape), dtype=tensor.dtype, device=tensor.device)

    def _complete(self, results: Any, given: Any = (), waits: Sequence[Any] = ()) -> Any:
        self._calls += 1
        work = CompletedWork(results, given, [wait for wait in waits if wait is not None])
        if self._coalesced is not None:
            self._coalesced.append(work.wait)
        return work


def _reduction(opts: Any) -> str:
    if opts is None:
        return "SUM"
    reduction = opts.reduceOp
    return str(getattr(reduction, "op", reduction)).rpartition(".")[2]


def _split_evenly(tensor: torch.Tensor, size: int) -> Parts:
    return Parts([tensor], size) if tensor.dim() == 1 else _FlatParts([tensor], size)


class _FlatParts(Parts):
    def each(self) -> _Tensors:
        return list(self.tensors[0].reshape(len(self.sizes), -1))
