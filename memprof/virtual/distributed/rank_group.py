"""The process group of a rank on the virtual GPU, with the allocations of its collectives.

Collectives allocate on this rank as NCCL's do (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp).
`memprof/virtual/peers` has the values that other ranks contribute. NCCL's memory outside the caching allocator is not
known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from memprof.torch_private import distributed
from memprof.virtual.install_context import InstallContext
from memprof.virtual.peers.known_values import GroupRank, Parts

BACKEND = "memprof_rank"
_ProcessGroup: Any = getattr(dist, "ProcessGroup", object)
_Work: Any = getattr(dist, "Work", object)
_Tensors = Sequence[torch.Tensor]


class CompletedWork(_Work):
    """Handle of a collective. As in ProcessGroupNCCL, `inputs` stay alive until `wait`, and `results` as long as the
    handle."""

    def __init__(self, results: Any, inputs: Any = (), waits: Sequence[Callable[..., Any]] = ()) -> None:
        super().__init__()
        self._results = list(results)
        self._inputs = inputs
        self._waits = waits
        self._sender: Any = 0  # rank that sent, once received

    def wait(self, timeout: Any = None) -> bool:
        """Wait for the other ranks, set the results, and release the inputs."""
        waits, self._waits = self._waits, ()
        for wait in waits:
            self._sender = wait()
        self._inputs = ()
        return True

    synchronize = block_current_stream = wait

    def _source_rank(self) -> int:
        return int(self._sender)

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
    """A process group of torch.distributed whose collectives are simulated (`context.rank_backend`), without NCCL."""

    supports_splitting = supports_coalescing = True
    supports_time_estimate = False

    def __init__(self, group_rank: GroupRank, backend_name: str, context: InstallContext) -> None:
        super().__init__(group_rank.rank, group_rank.size)
        self.group_rank = group_rank
        self._rank, self._size = group_rank.rank, group_rank.size
        self._backend_name = backend_name
        self._backend = context.rank_backend
        self._on_gpu = context.is_on_gpu
        self._count_sent_bytes = context.dispatch_mode.meter.count_collective
        self._owners = context.recorder.owners
        self._stream: Any = None  # NCCL's stream for sends and receives
        self._num_calls = 0
        # Functions that wait for the calls of a group of calls (`_coalescing_manager`); None outside a group.
        self._coalesced_waits: list[Callable[..., Any]] | None = None

    # -- properties -------------------------------------------------------------------------------------------------

    def size(self) -> int:
        return self._size

    @property
    def group_name(self) -> str:
        """Return the name by which torch's operators look up the group."""
        return str(distributed.world.get().pg_names[self])

    @property
    def _device_types(self) -> list[torch.device]:
        """Return the device types that the backend supports; torch sends objects from the host if "cpu" is one."""
        devices_by_backend = {"nccl": ["cuda"], "gloo": ["cpu", "cuda"], "mpi": ["cpu", "cuda"]}
        device_names = [part.partition(":")[0] for part in self._backend_name.split(",") if ":" in part]
        device_names = device_names or devices_by_backend.get(self._backend_name, ["cpu", "cuda"])
        return [torch.device(name) for name in device_names]

    @property
    def _has_nccl(self) -> bool:
        return "nccl" in self._backend_name or self._backend_name == "undefined"

    def getBackendName(self) -> str:  # noqa: N802
        return BACKEND

    _get_backend_name = getBackendName

    def _get_backend(self, device: Any) -> Any:
        return self

    def _set_sequence_number_for_group(self) -> None:
        self._num_calls = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._num_calls

    def _start_coalescing(self, device: Any) -> None:
        self._coalesced_waits = []

    def _end_coalescing(self, device: Any) -> Any:
        waits, self._coalesced_waits = self._coalesced_waits, None
        return CompletedWork([], waits=waits or ())

    # -- collectives ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        self._record_sent_bytes("allreduce", tensors, 2 * self._remote_fraction)
        self._owners.mark_reduced(tensors)
        waits = [self._backend.all_reduce(tensor, _find_reduction(opts), self.group_rank) for tensor in tensors]
        return self._complete(tensors, waits=waits)

    def reduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        self._record_sent_bytes("reduce", tensors, 1)
        self._owners.mark_reduced(tensors)
        root = 0 if opts is None else opts.rootRank
        waits = [self._backend.reduce(tensor, _find_reduction(opts), root, self.group_rank) for tensor in tensors]
        return self._complete(tensors, waits=waits)

    def broadcast(self, tensors: _Tensors, opts: Any = None) -> Any:
        self._record_sent_bytes("broadcast", tensors, 1)
        root = 0 if opts is None else opts.rootRank
        return self._complete(
            tensors, waits=[self._backend.broadcast(tensor, root, self.group_rank) for tensor in tensors]
        )

    def barrier(self, opts: Any = None) -> Any:
        """Wait for all ranks; NCCL's barrier allocates a tensor of one element on the GPU."""
        results = [torch.zeros(1, device="cuda")] if self._has_nccl else []
        return self._complete(results, waits=[self._backend.barrier(self.group_rank)])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        self._complete([], waits=[self._backend.barrier(self.group_rank)]).wait()

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Gather a tensor from each rank; NCCL gathers tensors of equal size into a buffer, and copies its parts."""
        self._record_sent_bytes("allgather", [part for parts in outputs for part in parts], self._remote_fraction)
        buffers: list[Any] = []
        waits = []
        for parts, tensor in zip(outputs, inputs, strict=True):
            buffers.append(self._make_flat_buffer(parts, tensor))
            self._owners.mark_gathered(parts, [tensor])
            waits.append(self._backend.all_gather(Parts(parts), tensor, self.group_rank))
        return self._complete(buffers if buffers[0] is not None else outputs, inputs, waits)

    def reduce_scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> Any:
        """Reduce and scatter; NCCL first copies tensors of equal size into a flat buffer."""
        self._record_sent_bytes("reduce_scatter", [part for parts in inputs for part in parts], self._remote_fraction)
        buffers, waits = [], []
        for tensor, parts in zip(outputs, inputs, strict=True):
            buffers.append(self._make_flat_buffer(parts, tensor))
            waits.append(self._backend.reduce_scatter(tensor, Parts(parts), _find_reduction(opts), self.group_rank))
        return self._complete(outputs, (buffers, inputs), waits)

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Gather tensors on one rank; `outputs` is empty on other ranks."""
        root = self._rank if opts is None else opts.rootRank
        parts = Parts(outputs[0]) if outputs else None
        return self._complete(outputs, inputs, [self._backend.gather(parts, inputs[0], root, self.group_rank)])

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> Any:
        """Scatter the tensors of one rank; `inputs` is empty on other ranks."""
        root = self._rank if opts is None else opts.rootRank
        parts = Parts(inputs[0]) if inputs else None
        return self._complete(outputs, inputs, [self._backend.scatter(outputs[0], parts, root, self.group_rank)])

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        self._record_sent_bytes("alltoall", inputs, self._remote_fraction)
        return self._complete(
            outputs, inputs, [self._backend.all_to_all(Parts(outputs), Parts(inputs), self.group_rank)]
        )

    def alltoall_base(
        self, output: Any, tensor: Any, out_splits: Any = (), in_splits: Any = (), opts: Any = None
    ) -> Any:
        """Exchange parts of `tensor`, split along the first dimension, between all ranks."""
        self._record_sent_bytes("alltoall", [tensor], self._remote_fraction)
        outputs, inputs = Parts([output], self._size, out_splits), Parts([tensor], self._size, in_splits)
        return self._complete([output], tensor, [self._backend.all_to_all(outputs, inputs, self.group_rank)])

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        if output.numel() != tensor.numel() * self._size:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        self._record_sent_bytes("allgather", [output], self._remote_fraction)
        self._owners.mark_gathered([output], [tensor])
        parts = _split_evenly(output, self._size)
        return self._complete([output], tensor, [self._backend.all_gather(parts, tensor, self.group_rank)])

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        if tensor.numel() != output.numel() * self._size:
            raise ValueError("input tensor must be the same size as output size times world size")
        self._record_sent_bytes("reduce_scatter", [tensor], self._remote_fraction)
        self._owners.mark_reduced([tensor])
        parts = _split_evenly(tensor, self._size)
        waits = [self._backend.reduce_scatter(output, parts, _find_reduction(opts), self.group_rank)]
        return self._complete([output], tensor, waits)

    def allgather_into_tensor_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        works = [self._allgather_base(output, tensor) for output, tensor in zip(outputs, inputs, strict=True)]
        return self._complete(outputs, inputs, [work.wait for work in works])

    def reduce_scatter_tensor_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        works = [self._reduce_scatter_base(*pair, opts) for pair in zip(outputs, inputs, strict=True)]
        return self._complete(outputs, inputs, [work.wait for work in works])

    def allgather_coalesced(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Gather several tensors; `outputs` has for each rank a list with one tensor per input."""
        self._record_sent_bytes("allgather", [part for parts in outputs for part in parts], self._remote_fraction)
        pairs = zip(zip(*outputs, strict=True), inputs, strict=True)
        waits = [self._backend.all_gather(Parts(parts), tensor, self.group_rank) for parts, tensor in pairs]
        return self._complete(outputs, inputs, waits)

    def send(self, tensors: _Tensors, rank: int, tag: int = 0) -> Any:
        """Send `tensors` to one rank, without waiting for the receiver."""
        self._record_sent_bytes("send", tensors, 1)
        waits = [self._backend.send(tensor, rank, tag, self.group_rank) for tensor in tensors]
        return self._complete(tensors, waits=[*self._use_nccl_stream(tensors), *waits])

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> Any:
        return self.recv(tensors, None, tag)

    def recv(self, tensors: _Tensors, rank: int | None, tag: int = 0) -> Any:
        waits = [self._backend.receive(tensor, rank, tag, self.group_rank) for tensor in tensors]
        return self._complete(tensors, waits=[*self._use_nccl_stream(tensors), *waits])

    def _use_nccl_stream(self, tensors: _Tensors) -> list[Callable[[], None]]:
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

    def _record_sent_bytes(self, name: str, tensors: _Tensors, fraction: float) -> None:
        """Record that `fraction` of the bytes of `tensors` is sent, as by rings (nccl-tests, PERFORMANCE.md)."""
        for tensor in tensors:
            if self._size > 1 and self._on_gpu(tensor):
                self._count_sent_bytes(f"c10d.{name}", tensor, round(tensor.numel() * tensor.element_size() * fraction))

    @property
    def _remote_fraction(self) -> float:
        """Return the fraction of evenly distributed data that is on other ranks."""
        return (self._size - 1) / self._size

    def _make_flat_buffer(self, parts: _Tensors, tensor: torch.Tensor) -> torch.Tensor | None:
        """Return NCCL's buffer for all `parts` (`newLikeFlat`); None if their shapes differ: each is sent alone."""
        if not self._has_nccl or not self._on_gpu(tensor) or any(part.shape != parts[0].shape for part in parts):
            return None
        return torch.empty((len(parts), *tensor.shape), dtype=tensor.dtype, device=tensor.device)

    def _complete(self, results: Any, inputs: Any = (), waits: Sequence[Any] = ()) -> Any:
        self._num_calls += 1
        work = CompletedWork(results, inputs, [wait for wait in waits if wait is not None])
        if self._coalesced_waits is not None:
            self._coalesced_waits.append(work.wait)
        return work


def _find_reduction(opts: Any) -> str:
    """Return the reduction in a collective's options, such as "SUM"."""
    if opts is None:
        return "SUM"
    reduction = opts.reduceOp
    return str(getattr(reduction, "op", reduction)).rpartition(".")[2]


def _split_evenly(tensor: torch.Tensor, size: int) -> Parts:
    return Parts([tensor], size) if tensor.dim() == 1 else _FlatParts([tensor], size)


class _FlatParts(Parts):
    """Equal parts of a flattened tensor."""

    def split(self) -> _Tensors:
        return list(self.tensors[0].reshape(len(self.element_counts), -1))
