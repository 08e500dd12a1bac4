"""A process group on the virtual GPU: rank R of N, of which every collective is done when it is called.

It allocates on this rank what NCCL's does (torch/csrc/distributed/c10d/ProcessGroupNCCL.cpp). What the others
contribute says `alone.py`. What NCCL takes of the card outside the caching allocator is not known.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from memprof.virtual.ranks.alone import Alone

BACKEND = "memprof_rank"
_ProcessGroup: Any = getattr(dist, "ProcessGroup", object)
_Work: Any = getattr(dist, "Work", object)
_c10d: Any = getattr(dist, "distributed_c10d", None)
_Tensors = Sequence[torch.Tensor]


class Done(_Work):
    """The handle of work that is finished. What it was given lives until it is waited for, what it made as long as the
    handle does (`stashed_for_allocator_safety_`, `outputs_`)."""

    def __init__(self, made: Any, given: Any = ()) -> None:
        super().__init__()
        self._made = list(made)
        self._given = given

    def wait(self, timeout: Any = None) -> bool:
        """Nothing to wait for."""
        self._given = ()
        return True

    synchronize = block_current_stream = wait

    def is_completed(self) -> bool:
        """It is."""
        return True

    is_success = is_completed

    def exception(self) -> None:
        """None was raised."""

    def result(self) -> Any:
        """What it made."""
        return self._made

    def get_future(self) -> Any:
        """The same, as a future."""
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._made)
        return future


class Group(_ProcessGroup):
    """Rank `rank` of `size`.

    Args:
        backend: as the program asked for it.
        others: what the other ranks contribute.
        on_card: whether a tensor is on a card.
    """

    supports_splitting = supports_coalescing = True
    supports_time_estimate = False

    def __init__(
        self, rank: int, size: int, backend: str, others: Alone, on_card: Callable[[torch.Tensor], bool]
    ) -> None:
        super().__init__(rank, size)
        self._rank, self._size = rank, size
        self._backend = backend
        self._others = others
        self._on_card = on_card
        self._calls = 0

    # -- what it says of itself -------------------------------------------------------------------------------------

    def size(self) -> int:
        """Ranks in it."""
        return self._size

    @property
    def group_name(self) -> str:
        """The name by which operators of torch find it."""
        return str(_c10d._world.pg_names[self])

    @property
    def _device_types(self) -> list[torch.device]:
        """Those that it has a backend for: objects are sent from the host if it is one, else from the card."""
        of_backend = {"nccl": ["cuda"], "gloo": ["cpu", "cuda"], "mpi": ["cpu", "cuda"]}
        named = [part.partition(":")[0] for part in self._backend.split(",") if ":" in part]
        return [torch.device(kind) for kind in named or of_backend.get(self._backend, ["cpu", "cuda"])]

    @property
    def _has_nccl(self) -> bool:
        return "nccl" in self._backend or self._backend == "undefined"

    def getBackendName(self) -> str:  # noqa: N802
        """As torch asks for it."""
        return BACKEND

    def _get_backend(self, device: Any) -> Any:
        return self

    def _get_backend_name(self) -> str:
        return BACKEND

    def _set_sequence_number_for_group(self) -> None:
        self._calls = 0

    def _get_sequence_number_for_group(self) -> int:
        return self._calls

    def _start_coalescing(self, device: Any) -> None:
        pass

    def _end_coalescing(self, device: Any) -> Any:
        return Done([])

    # -- collectives ------------------------------------------------------------------------------------------------

    def allreduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        """In place."""
        for tensor in tensors:
            self._others.reduce(tensor, _reduction(opts), self._size)
        return self._done(tensors)

    def reduce(self, tensors: _Tensors, opts: Any = None) -> Any:
        """To one rank; what the others have then is not said, and stays."""
        return self.allreduce(tensors, opts) if opts is None or opts.rootRank == self._rank else self._done(tensors)

    def broadcast(self, tensors: _Tensors, opts: Any = None) -> Any:
        """From one rank, whose tensors are like this one's."""
        if opts is not None and opts.rootRank != self._rank and any(map(self._others.knows, tensors)):
            self._others.say("broadcast", "What another rank broadcasts is taken to be what this one has itself")
        return self._done(tensors)

    def barrier(self, opts: Any = None) -> Any:
        """NCCL's reduces a number on the card."""
        return self._done([torch.zeros(1, device="cuda")] if self._has_nccl else [])

    def monitored_barrier(self, timeout: Any = None, wait_all_ranks: bool = False) -> None:
        """All have come."""

    def allgather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """NCCL gathers tensors of one size into one, and copies the parts out of it."""
        made: list[Any] = []
        for parts, tensor in zip(outputs, inputs, strict=True):
            made.append(self._flat(parts, tensor))
            self._others.gather(parts, tensor)
        return self._done(made if made[0] is not None else outputs, inputs)

    def reduce_scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> Any:
        """NCCL scatters tensors of one size from one, into which they are copied."""
        flat = []
        for tensor, parts in zip(outputs, inputs, strict=True):
            flat.append(self._flat(parts, tensor))
            self._others.copy(tensor, parts[self._rank])
            self._others.reduce(tensor, _reduction(opts), self._size)
        return self._done(outputs, (flat, inputs))

    def gather(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """To one rank: the others give no lists."""
        for parts in outputs:
            self._others.gather(parts, inputs[0])
        return self._done(outputs, inputs)

    def scatter(self, outputs: _Tensors, inputs: Sequence[_Tensors], opts: Any = None) -> Any:
        """From one rank: the others give no lists."""
        for tensor in outputs:
            if inputs:
                self._others.copy(tensor, inputs[0][self._rank])
            else:
                self._others.forget(tensor, "scatter", "is given by a scatter of another")
        return self._done(outputs, inputs)

    def alltoall(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """What each sends this rank is what this one sends itself."""
        self._others.gather(outputs, inputs[self._rank])
        return self._done(outputs, inputs)

    def alltoall_base(
        self, output: Any, tensor: Any, out_splits: Any = (), in_splits: Any = (), opts: Any = None
    ) -> Any:
        """The same with the parts in one tensor, one after the other along its first dimension."""
        if self._others.knows(tensor) or self._others.knows(output):
            parts = _parts(output, out_splits, self._size)
            self._others.gather(parts, _parts(tensor, in_splits, self._size)[self._rank])
        return self._done([output], tensor)

    def _allgather_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        if output.numel() != tensor.numel() * self._size:
            raise ValueError("output tensor size must be equal to world_size times input tensor size")
        if self._others.knows(tensor) or self._others.knows(output):
            self._others.gather(list(output.view(self._size, -1)), tensor.view(-1))
        return self._done([output], tensor)

    def _reduce_scatter_base(self, output: Any, tensor: Any, opts: Any = None) -> Any:
        if tensor.numel() != output.numel() * self._size:
            raise ValueError("input tensor must be the same size as output size times world size")
        if self._others.knows(tensor) or self._others.knows(output):
            self._others.copy(output, tensor.view(self._size, -1)[self._rank].view(output.shape))
            self._others.reduce(output, _reduction(opts), self._size)
        return self._done([output], tensor)

    def allgather_into_tensor_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """One by one."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._allgather_base(output, tensor)
        return self._done(outputs, inputs)

    def reduce_scatter_tensor_coalesced(self, outputs: _Tensors, inputs: _Tensors, opts: Any = None) -> Any:
        """One by one."""
        for output, tensor in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, tensor, opts)
        return self._done(outputs, inputs)

    def allgather_coalesced(self, outputs: Sequence[_Tensors], inputs: _Tensors, opts: Any = None) -> Any:
        """Lists of parts: of each rank, one of each tensor."""
        for parts in outputs:
            for part, tensor in zip(parts, inputs, strict=True):
                self._others.gather([part], tensor)
        return self._done(outputs, inputs)

    def send(self, tensors: _Tensors, rank: int, tag: int = 0) -> Any:
        """To somebody who takes it."""
        for tensor in tensors:
            self._others.send(tensor)
        return self._done(tensors)

    def recv(self, tensors: _Tensors, rank: int, tag: int = 0) -> Any:
        """From somebody who is like this rank."""
        for tensor in tensors:
            self._others.receive(tensor)
        return self._done(tensors)

    def recv_anysource(self, tensors: _Tensors, tag: int = 0) -> Any:
        """The same."""
        return self.recv(tensors, -1, tag)

    # Names of these in releases of torch before and after 2.12.
    allreduce_coalesced = allreduce
    all_gather_single = _allgather_base
    reduce_scatter_single = _reduce_scatter_base
    all_to_all_single = alltoall_base
    all_gather_single_coalesced = allgather_into_tensor_coalesced
    reduce_scatter_single_coalesced = reduce_scatter_tensor_coalesced

    def _flat(self, parts: _Tensors, tensor: torch.Tensor) -> torch.Tensor | None:
        """As `newLikeFlat`; tensors of several sizes are sent one by one instead."""
        if not self._has_nccl or not self._on_card(tensor) or any(part.shape != parts[0].shape for part in parts):
            return None
        return torch.empty((len(parts), *tensor.shape), dtype=tensor.dtype, device=tensor.device)

    def _done(self, made: Any, given: Any = ()) -> Any:
        self._calls += 1
        return Done(made, given)


def _reduction(opts: Any) -> str:
    if opts is None:
        return "SUM"
    reduction = opts.reduceOp
    return str(getattr(reduction, "op", reduction)).rpartition(".")[2]


def _parts(tensor: torch.Tensor, splits: Any, size: int) -> _Tensors:
    return tensor.split(list(splits)) if splits else tensor.chunk(size)
