"""One operator and one call of it, looked over once: what kind it is, what it takes, where its tensors live."""

from __future__ import annotations

import enum
from collections.abc import Callable
from typing import Any

import torch

from memprof.torch_private.pytree import tree_map_only
from memprof.trace.events import GPU, HOST
from memprof.virtual import shapes
from memprof.virtual.device_rules import mixes, takes_numbers_of_host
from memprof.virtual.engine import FILLS_ZEROS
from memprof.virtual.kernels import registry
from memprof.virtual.kernels.expansion import expansion, in_python
from memprof.virtual.kernels.in_place_backward import CANDIDATES
from memprof.watch.caches import WRITES

_aten = torch.ops.aten
_META = torch.device("meta")

HOST_VIRTUAL_BYTES = 1 << 20
"""Host tensors from this size on are virtual too: an 8B model built on the CPU must not fill a laptop's memory."""
HOST_COUNTED_BYTES = 1 << 12
"""Host tensors from this size on are counted; what is smaller is not worth an event."""

MOVES_STORAGE = frozenset({_aten.set_, _aten.resize_, _aten.resize_as_})
OVERWRITES = frozenset({_aten.fill_, _aten.zero_, _aten.copy_})
_ALIASES = frozenset({_aten._unsafe_view, _aten.lift_fresh, _aten.detach, _aten.alias})
_LIKE = frozenset(
    {
        _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like,
        _aten.randint_like,
    }
)  # fmt: skip
_NEW = frozenset({_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided})


_MAKES_SPARSE = frozenset(
    {
        _aten._to_sparse, _aten._to_sparse_csr, _aten._to_sparse_csc, _aten._to_sparse_bsr, _aten._to_sparse_bsc,
        _aten._sparse_coo_tensor_with_dims_and_tensors,
        _aten._sparse_compressed_tensor_unsafe, _aten._sparse_coo_tensor_unsafe, _aten.sparse_compressed_tensor,
        _aten.sparse_coo_tensor,
    }
)  # fmt: skip
"""Operators that make a sparse tensor of others."""


class Kind(enum.Enum):
    """What an operator does with storages."""

    VIEW = enum.auto()
    IN_PLACE = enum.auto()
    ALLOCATES = enum.auto()


class Operator:
    """What is known of one operator overload."""

    __slots__ = (
        "anywhere",
        "expansion",
        "func",
        "handler",
        "in_python",
        "input_copies",
        "joins",
        "kind",
        "makes_sparse",
        "maybe_in_place",
        "mixes_devices",
        "name",
        "packet",
        "scratch",
        "uses_cublas",
        "uses_cublaslt",
        "writes_part",
    )

    def __init__(self, func: Any) -> None:
        self.func = func
        self.packet = packet = func.overloadpacket
        self.name = func._schema.name.replace("::", ".")
        if packet in _ALIASES or func.is_view:
            self.kind = Kind.VIEW
        elif func._schema.is_mutable:
            self.kind = Kind.IN_PLACE
        else:
            self.kind = Kind.ALLOCATES
        self.handler = registry.kernel_of(packet) or registry.kernel_of(func)
        self.anywhere = packet in registry.anywhere or func in registry.anywhere
        self.expansion = expansion(func) if self.handler is None else None
        self.in_python = self.expansion is not None and in_python(func) is not None
        self.input_copies = registry.input_copies.get(packet)
        self.scratch = registry.scratch.get(packet)
        self.uses_cublas = packet in registry.uses_cublas
        self.uses_cublaslt = packet in registry.uses_cublaslt
        self.mixes_devices = mixes(func)
        self.makes_sparse = packet in _MAKES_SPARSE
        self.joins = packet is torch.ops.aten.cat
        self.maybe_in_place = func in CANDIDATES or func in FILLS_ZEROS
        self.writes_part = packet in WRITES

    def takes_of_host(self, tensor: torch.Tensor) -> bool:
        """Whether the kernel on the card takes this tensor of the host."""
        return tensor.dim() == 0 and takes_numbers_of_host(self.func)


class Call:
    """One operator call: its arguments, its key for remembered layouts, and where its tensors live."""

    __slots__ = (
        "args",
        "card",
        "func",
        "key",
        "kwargs",
        "on_gpu",
        "on_host",
        "on_meta",
        "quantized",
        "real",
        "sparse",
        "tensors",
    )

    def __init__(self, func: Any, args: Any, kwargs: Any) -> None:
        self.func = func
        self.args = args
        self.kwargs = kwargs
        self.key: list[Any] = [id(func)]
        self.tensors: list[torch.Tensor] = []
        self.real: list[torch.Tensor] = []
        """Those with data of their own: small tensors in host memory."""
        self.card = GPU
        """Where it runs if any of its tensors is on a card: that of the first."""
        self.on_gpu = False
        self.on_host = False
        self.on_meta = False
        self.sparse = False
        """Whether a sparse tensor is among them."""
        self.quantized = False
        """Whether one of torch's own quantized types is."""

    @property
    def device(self) -> str | None:
        """The virtual device of the inputs: a card, HOST, or None if none of them is virtual."""
        if self.on_gpu:
            return self.card
        return HOST if self.on_host else None

    def factory_bytes(self) -> int:
        """Bytes of what a factory is about to make, by a shape or after a tensor; 0 if it is none or sparse."""
        if self.kwargs.get("layout") not in (None, torch.strided):
            return 0
        packet = self.func.overloadpacket
        shape = self.args[0] if self.args else ()
        dtype = self.kwargs.get("dtype")
        if isinstance(shape, torch.Tensor):
            dtype = dtype or shape.dtype
            if packet in _LIKE:
                shape = shape.shape
            elif packet in _NEW:
                shape = self.args[1]
        if not isinstance(shape, (list, tuple)) or not all(isinstance(size, int) for size in shape):
            return 0
        return int(torch.Size(shape).numel() * (dtype or torch.get_default_dtype()).itemsize)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors in a result or an argument, lists looked into."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in tensors_of(part)]
    return []


def in_place(func: Any) -> bool:
    """Whether the name of `func` says that it changes its first argument."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def fills_arguments(func: Any) -> bool:
    """Whether an operator of a library returns nothing but arguments that it writes: in place, or with `out`.

    torch's own are asked otherwise: theirs resize what they are to write into.
    """
    returns = func._schema.returns
    return func.namespace not in _OF_TORCH and all(one.alias_info and one.alias_info.is_write for one in returns)


_OF_TORCH = ("aten", "prims", "prim")


def _arguments(call: Call) -> list[tuple[Any, Any]]:
    """Each argument of the schema that `call` has, and its value."""
    arguments = call.func._schema.arguments
    given = {one.name: value for one, value in zip(arguments, call.args, strict=False)} | call.kwargs
    return [(one, given[one.name]) for one in arguments if one.name in given]


def written(call: Call) -> list[Any]:
    """What `call` writes into."""
    return [value for one, value in _arguments(call) if one.is_write]


def given_back(call: Call) -> Any:
    """What an operator returns that returns what it writes into."""
    into = {frozenset(one.alias_info.before_set): value for one, value in _arguments(call) if one.is_write}
    results = [into[frozenset(one.alias_info.before_set)] for one in call.func._schema.returns]
    return tuple(results) if len(results) > 1 else results[0] if results else None


def run_on_meta(call: Call) -> Any:
    """The operator run on meta tensors. Some meta kernels do not take what CUDA's do, a number on the host."""
    try:
        return shapes.run(call.func, call.args, call.kwargs)
    except RuntimeError:
        if not call.real or call.device is None:
            raise
    return shapes.run(call.func, all_meta(call.args), all_meta(call.kwargs))


def all_meta(value: Any, then: Callable[[torch.Tensor, torch.Tensor], None] | None = None) -> Any:
    """Real tensors in arguments as meta ones; `then` is given each pair."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        moved = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
        if then is not None:
            then(tensor, moved)
        return moved

    return tree_map_only(torch.Tensor, move, value)
