"""Facts about each operator: its effect on storages, and its kernel in kernels/."""

from __future__ import annotations

from typing import Any

import torch

from memprof.virtual.device_rules import MIXES_DEVICES
from memprof.virtual.engine import FILLS_ZEROS
from memprof.virtual.kernels import registry
from memprof.virtual.kernels.expansion import find_expansion, find_python_body
from memprof.virtual.kernels.inplace_backward_formulas import OUT_OF_PLACE_OPERATORS
from memprof.virtual.operator_call import OpInfo, OpKind
from memprof.watch.caches import WRITE_OPERATORS

_aten = torch.ops.aten
_ALIASES = frozenset({_aten._unsafe_view, _aten.lift_fresh, _aten.detach, _aten.alias})
_RETURNS_SPARSE = frozenset(
    {
        _aten._to_sparse, _aten._to_sparse_csr, _aten._to_sparse_csc, _aten._to_sparse_bsr, _aten._to_sparse_bsc,
        _aten._sparse_coo_tensor_with_dims_and_tensors,
        _aten._sparse_compressed_tensor_unsafe, _aten._sparse_coo_tensor_unsafe, _aten.sparse_compressed_tensor,
        _aten.sparse_coo_tensor,
    }
)  # fmt: skip
registry.import_kernels()


def describe_operator(func: Any) -> OpInfo:
    """Return the facts about the operator overload `func`."""
    packet = func.overloadpacket
    if packet in _ALIASES or func.is_view:
        kind = OpKind.VIEW
    else:
        kind = OpKind.IN_PLACE if func._schema.is_mutable else OpKind.ALLOCATES
    handler = registry.find_kernel(packet) or registry.find_kernel(func)
    expansion = find_expansion(func) if handler is None else None
    return OpInfo(
        func=func,
        packet=packet,
        name=func._schema.name.replace("::", "."),
        kind=kind,
        handler=handler,
        runs_on_any_device=packet in registry.host_kernels or func in registry.host_kernels,
        expansion=expansion,
        runs_in_python=expansion is not None and find_python_body(func) is not None,
        input_copies=registry.input_copies.get(packet),
        scratch=registry.scratch.get(packet),
        uses_cublas=packet in registry.uses_cublas,
        uses_cublaslt=registry.uses_cublaslt.get(packet),
        mixes_devices=packet in MIXES_DEVICES,
        returns_sparse=packet in _RETURNS_SPARSE,
        is_concatenation=packet is _aten.cat,
        may_run_in_place=func in OUT_OF_PLACE_OPERATORS or func in FILLS_ZEROS,
        is_partial_write=packet in WRITE_OPERATORS,
    )
