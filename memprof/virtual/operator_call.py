"""Operators and their calls: the kind of an operator, and the arguments of a call with the devices of its tensors."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memprof.torch_private.pytree import tree_map_only
from memprof.trace.events import HOST, is_gpu
from memprof.virtual import shapes
from memprof.virtual.device_rules import accepts_host_scalars
from memprof.virtual.gpus import Gpus
from memprof.watch.recorder import Recorder

_aten = torch.ops.aten
_META = torch.device("meta")
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)

# Minimum size of virtual host tensors: an 8B model built on the CPU must not fill a laptop's memory.
MIN_VIRTUAL_BYTES = 1 << 20
MIN_COUNTED_BYTES = 1 << 12  # minimum size of counted host tensors; smaller ones are not worth an event

MOVES_STORAGE = frozenset({_aten.set_, _aten.resize_, _aten.resize_as_})
OVERWRITES = frozenset({_aten.fill_, _aten.zero_, _aten.copy_})
_LIKE_FACTORIES = frozenset(
    {
        _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like,
        _aten.randint_like,
    }
)  # fmt: skip
_NEW_FACTORIES = frozenset({_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided})


class OpKind(enum.Enum):
    """The effect of an operator on storages."""

    VIEW = enum.auto()
    IN_PLACE = enum.auto()
    ALLOCATES = enum.auto()


@dataclass(slots=True, eq=False)
class OpInfo:
    """Facts about one operator overload (from op_info.py)."""

    func: Any
    packet: Any
    name: str
    kind: OpKind
    handler: Callable[..., Any] | None  # kernel of kernels/
    runs_on_any_device: bool  # whether `handler` also runs without any tensor on a GPU
    expansion: Callable[..., Any] | None  # runs the operator's inner operators; None: the operator runs as one
    runs_in_python: bool
    input_copies: Callable[..., Any] | None
    scratch: Callable[..., Any] | None
    uses_cublas: bool
    uses_cublaslt: Callable[..., bool] | None
    mixes_devices: bool
    returns_sparse: bool
    is_concatenation: bool
    may_run_in_place: bool  # in a backward pass without modes
    is_partial_write: bool

    def accepts_host_tensor(self, tensor: torch.Tensor) -> bool:
        """Return whether the operator's CUDA kernel accepts `tensor`, which is on the host."""
        return tensor.dim() == 0 and accepts_host_scalars(self.func)


class DeviceTable(Protocol):
    """Table of the simulated devices of tensors."""

    recorder: Recorder
    gpus: Gpus

    def device_of(self, tensor: torch.Tensor) -> str:
        """Return the name of the simulated device of `tensor`, such as "cuda:0"."""


class OperatorCall:
    """One call of an operator: its arguments, its key in the layout cache, and the devices of its tensors."""

    __slots__ = (
        "args", "func", "gpu", "key", "kwargs", "on_gpu", "on_host", "on_meta", "quantized", "real", "sparse",
        "tensors",
    )  # fmt: skip

    def __init__(self, func: Any, args: Any, kwargs: Any, devices: DeviceTable) -> None:
        self.func = func
        self.gpu = devices.gpus.first  # GPU of the call if any of its tensors is on a GPU: that of the first tensor
        self.set_arguments(args, kwargs, devices)

    def set_arguments(self, args: Any, kwargs: Any, devices: DeviceTable) -> None:
        """Set the arguments, and derive the key and the tensors of the call from them."""
        self.args = args
        self.kwargs = kwargs
        self.key: list[Any] = [id(self.func)]
        self.tensors: list[torch.Tensor] = []
        self.real: list[torch.Tensor] = []  # tensors with data: small tensors in host memory
        self.on_gpu = self.on_host = self.on_meta = self.sparse = self.quantized = False
        for arg in args:
            self._inspect(arg, devices)
        for name, arg in kwargs.items():
            self.key.append(name)
            self._inspect(arg, devices)

    def _inspect(self, arg: Any, devices: DeviceTable) -> None:
        if isinstance(arg, torch.Tensor):
            self.tensors.append(arg)
            if arg.layout is not torch.strided or arg.is_quantized:
                self.sparse |= arg.layout is not torch.strided
                self.quantized |= arg.is_quantized
                self._note_device(devices.device_of(arg), arg.is_meta)
                self.key.append(object())  # prevents caching
                if not arg.is_meta:
                    self.real.append(arg)
            elif arg.is_meta:
                self.key.append((arg.size(), arg.stride(), arg.dtype))
                recorder = devices.recorder
                index = recorder.storages.index_by_address.get(arg.untyped_storage()._cdata)
                if index is None:  # an empty tensor, or the program's own meta tensor
                    self._note_device(devices.device_of(arg), True)
                elif recorder.trace.storages[index].device == HOST:
                    self.on_host = True
                else:
                    self.on_gpu = True
            else:
                self.real.append(arg)
                self.key.append(("real", arg.size(), arg.dtype))
        elif isinstance(arg, (list, tuple)):
            self.key.append(len(arg))
            for item in arg:
                self._inspect(item, devices)
        elif isinstance(arg, _STORAGES):
            self.key.append(arg.nbytes())  # a reference to the storage itself would keep it alive as long as the cache
        else:
            self.key.append(arg.__class__)
            self.key.append(arg)

    def _note_device(self, device: str, is_meta: bool) -> None:
        self.on_gpu |= is_gpu(device)
        self.on_host |= device == HOST and is_meta
        self.on_meta |= device == "meta"

    @property
    def device(self) -> str | None:
        """Return the virtual device of the inputs: a GPU, HOST, or None if no input is virtual."""
        if self.on_gpu:
            return self.gpu
        return HOST if self.on_host else None

    def count_factory_bytes(self) -> int:
        """Return the bytes that a factory such as `empty` or `empty_like` allocates; 0 for other operators."""
        if self.kwargs.get("layout") not in (None, torch.strided):
            return 0
        packet = self.func.overloadpacket
        shape = self.args[0] if self.args else ()
        dtype = self.kwargs.get("dtype")
        if isinstance(shape, torch.Tensor):
            dtype = dtype or shape.dtype
            if packet in _LIKE_FACTORIES:
                shape = shape.shape
            elif packet in _NEW_FACTORIES:
                shape = self.args[1]
        if not isinstance(shape, (list, tuple)) or not all(isinstance(size, int) for size in shape):
            return 0
        return int(torch.Size(shape).numel() * (dtype or torch.get_default_dtype()).itemsize)


def find_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in `value`, also those in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in find_tensors(item)]
    return []


def is_in_place(func: Any) -> bool:
    """Return whether the name of `func` is that of an in-place function, such as `add_`."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def returns_only_written(func: Any) -> bool:
    """Return whether `func` is a library's operator that returns only arguments that it writes into.

    False for torch's own operators: they resize the tensors that they write into.
    """
    returns = func._schema.returns
    return func.namespace not in _TORCH_NAMESPACES and all(r.alias_info and r.alias_info.is_write for r in returns)


_TORCH_NAMESPACES = ("aten", "prims", "prim")


def _pair_arguments(call: OperatorCall) -> list[tuple[Any, Any]]:
    arguments = call.func._schema.arguments
    value_by_name = {argument.name: value for argument, value in zip(arguments, call.args, strict=False)} | call.kwargs
    return [(argument, value_by_name[argument.name]) for argument in arguments if argument.name in value_by_name]


def find_written_arguments(call: OperatorCall) -> list[Any]:
    """Return the arguments that `call` writes into."""
    return [value for argument, value in _pair_arguments(call) if argument.is_write]


def get_returned_arguments(call: OperatorCall) -> Any:
    """Return the result of `call`, an operator that returns the arguments that it writes into."""
    value_by_alias = {frozenset(a.alias_info.before_set): value for a, value in _pair_arguments(call) if a.is_write}
    results = [value_by_alias[frozenset(a.alias_info.before_set)] for a in call.func._schema.returns]
    return tuple(results) if len(results) > 1 else results[0] if results else None


def run_on_meta(call: OperatorCall) -> Any:
    """Run `call` on meta tensors; if its meta kernel rejects host tensors, convert these to meta tensors first."""
    try:
        return shapes.run(call.func, call.args, call.kwargs)
    except RuntimeError:
        if not call.real or call.device is None:
            raise
    return shapes.run(call.func, to_meta(call.args), to_meta(call.kwargs))


def to_meta(value: Any, on_move: Callable[[torch.Tensor, torch.Tensor], None] | None = None) -> Any:
    """Return `value` with meta tensors in place of real tensors; `on_move` is called with each (real, meta) pair."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        moved = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
        if on_move is not None:
            on_move(tensor, moved)
        return moved

    return tree_map_only(torch.Tensor, move, value)
