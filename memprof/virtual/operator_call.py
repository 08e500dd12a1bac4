"""One operator and one call of it: the operator's kind, its arguments, and the devices of its tensors."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from memprof.torch_private.pytree import tree_map_only
from memprof.trace.events import GPU, HOST, is_gpu
from memprof.virtual import shapes
from memprof.virtual.device_rules import accepts_host_scalars
from memprof.watch.recorder import Recorder

_aten = torch.ops.aten
_META = torch.device("meta")
_STORAGES = (torch.UntypedStorage, torch.TypedStorage)

# Minimum size of virtual host tensors: an 8B model built on the CPU must not fill a laptop's memory.
MIN_VIRTUAL_HOST_BYTES = 1 << 20
MIN_COUNTED_HOST_BYTES = 1 << 12  # minimum size of counted host tensors; smaller ones are not worth an event

MOVES_STORAGE = frozenset({_aten.set_, _aten.resize_, _aten.resize_as_})
OVERWRITES = frozenset({_aten.fill_, _aten.zero_, _aten.copy_})
_LIKE = frozenset(
    {
        _aten.empty_like, _aten.zeros_like, _aten.ones_like, _aten.full_like, _aten.rand_like, _aten.randn_like,
        _aten.randint_like,
    }
)  # fmt: skip
_NEW = frozenset({_aten.new_empty, _aten.new_zeros, _aten.new_ones, _aten.new_full, _aten.new_empty_strided})


class OpKind(enum.Enum):
    """The effect of an operator on storages."""

    VIEW = enum.auto()
    IN_PLACE = enum.auto()
    ALLOCATES = enum.auto()


@dataclass(slots=True, eq=False)
class OpInfo:
    """The facts about one operator overload (made by op_info.py)."""

    func: Any
    packet: Any
    name: str
    kind: OpKind
    handler: Callable[..., Any] | None  # kernel of kernels/
    runs_on_any_device: bool  # whether `handler` also runs without any tensor on a GPU
    expansion: Callable[..., Any] | None  # runs the operator's inner operators; None: the operator runs as one
    in_python: bool
    input_copies: Callable[..., Any] | None
    scratch: Callable[..., Any] | None
    uses_cublas: bool
    uses_cublaslt: Callable[..., bool] | None
    mixes_devices: bool
    makes_sparse: bool
    is_cat: bool
    maybe_in_place: bool  # in a backward pass without modes
    is_partial_write: bool

    def accepts_host_tensor(self, tensor: torch.Tensor) -> bool:
        """Return whether the kernel on a GPU accepts `tensor` on the host."""
        return tensor.dim() == 0 and accepts_host_scalars(self.func)


class DeviceTable(Protocol):
    """Access to the devices of tensors."""

    recorder: Recorder

    def device_of(self, tensor: torch.Tensor) -> str:
        """Return the device that the program believes `tensor` to be on."""


class OperatorCall:
    """One call of an operator: its arguments, its key in the layout cache, and the devices of its tensors."""

    __slots__ = (
        "args", "func", "gpu", "key", "kwargs", "on_gpu", "on_host", "on_meta", "quantized", "real", "sparse",
        "tensors",
    )  # fmt: skip

    def __init__(self, func: Any, args: Any, kwargs: Any, devices: DeviceTable) -> None:
        self.func = func
        self.gpu = GPU  # GPU of the call if any of its tensors is on a GPU: that of the first tensor
        self.set_arguments(args, kwargs, devices)

    def set_arguments(self, args: Any, kwargs: Any, devices: DeviceTable) -> None:
        """Set the arguments, and inspect all tensors in them."""
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
            for part in arg:
                self._inspect(part, devices)
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

    def factory_bytes(self) -> int:
        """Return the bytes that a factory allocates, by a shape or like a tensor; 0 for other operators."""
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


def find_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in a result or an argument, also those in nested lists and tuples."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (list, tuple)):
        return [tensor for part in value for tensor in find_tensors(part)]
    return []


def in_place(func: Any) -> bool:
    """Return whether `func` changes its first argument, as its name says."""
    name = getattr(func, "__name__", "")
    return name.endswith("_") and not name.endswith("__")


def fills_arguments(func: Any) -> bool:
    """Return whether a library's operator returns only arguments that it writes: in place, or with `out`.

    torch's own operators are excluded: they resize the tensors that they write into.
    """
    returns = func._schema.returns
    return func.namespace not in _OF_TORCH and all(one.alias_info and one.alias_info.is_write for one in returns)


_OF_TORCH = ("aten", "prims", "prim")


def _arguments(call: OperatorCall) -> list[tuple[Any, Any]]:
    arguments = call.func._schema.arguments
    given = {one.name: value for one, value in zip(arguments, call.args, strict=False)} | call.kwargs
    return [(one, given[one.name]) for one in arguments if one.name in given]


def written(call: OperatorCall) -> list[Any]:
    """Return the arguments that `call` writes into."""
    return [value for one, value in _arguments(call) if one.is_write]


def given_back(call: OperatorCall) -> Any:
    """Return the result of an operator that returns the arguments that it writes into."""
    into = {frozenset(one.alias_info.before_set): value for one, value in _arguments(call) if one.is_write}
    results = [into[frozenset(one.alias_info.before_set)] for one in call.func._schema.returns]
    return tuple(results) if len(results) > 1 else results[0] if results else None


def run_on_meta(call: OperatorCall) -> Any:
    """Run an operator on meta tensors; where its meta kernel rejects host numbers, convert these first."""
    try:
        return shapes.run(call.func, call.args, call.kwargs)
    except RuntimeError:
        if not call.real or call.device is None:
            raise
    return shapes.run(call.func, to_meta(call.args), to_meta(call.kwargs))


def to_meta(value: Any, then: Callable[[torch.Tensor, torch.Tensor], None] | None = None) -> Any:
    """Return arguments with real tensors replaced by meta tensors; `then` is called with each (real, meta) pair."""

    def move(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_meta:
            return tensor
        moved = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=_META)
        if then is not None:
            then(tensor, moved)
        return moved

    return tree_map_only(torch.Tensor, move, value)
