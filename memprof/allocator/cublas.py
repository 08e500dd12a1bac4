"""Workspaces that torch's cuBLAS handles allocate from the caching allocator."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass

from memprof.allocator.releases import Change
from memprof.units import KIB, MIB

WORKSPACE = "cublas workspace"  # names in a trace
LT_WORKSPACE = "cublaslt workspace"
_HIP_CONFIGS = ("CUBLAS_WORKSPACE_CONFIG", "HIPBLAS_WORKSPACE_CONFIG", "ROCBLAS_WORKSPACE_CONFIG")  # the first counts
# The operators that cuBLAS runs.
PRODUCTS = (
    "mm", "addmm", "addmm_", "bmm", "baddbmm", "baddbmm_", "addbmm", "addbmm_", "mv", "addmv", "addmv_", "dot", "vdot",
)  # fmt: skip


def _read_config(default: int, *variables: str) -> int:
    """Return the size in bytes that the first of these environment variables sets, else `default`."""
    config = next((os.environ[name] for name in variables if name in os.environ), "")
    pairs = re.findall(r":(\d+):(\d+)", config)
    return sum(int(size) * int(count) for size, count in pairs) * KIB if pairs else default


@dataclass(frozen=True)
class CublasWorkspace:
    """Workspace of torch's cuBLAS handles, in bytes (aten/src/ATen/cuda/CublasHandlePool.cpp).

    A handle that keeps its workspace has one per thread and stream: the autograd thread's first matrix product
    allocates a second workspace.
    """

    num_bytes: int
    lt_num_bytes: int  # the separate workspace of cuBLASLt (products with a bias); 0 where it shares the other one
    is_permanent: bool  # whether a handle keeps its workspace until the end of the process
    is_lt_permanent: bool  # the same of cuBLASLt's; without, a product takes and releases it

    @classmethod
    def for_gpu(
        cls, compute_capability: tuple[int, int], torch_version: tuple[int, int], gcn_arch: str = ""
    ) -> CublasWorkspace:
        """Return the workspace of a GPU under a torch release; CUBLAS_WORKSPACE_CONFIG overrides the size. On an AMD
        GPU, which has a `gcn_arch`, those of hipBLAS and hipBLASLt."""
        if gcn_arch:
            default = (128 if gcn_arch.startswith(("gfx94", "gfx95")) else 32) * MIB
            num_bytes = _read_config(default, *_HIP_CONFIGS)
            return cls(num_bytes, lt_num_bytes=76 * MIB, is_permanent=True, is_lt_permanent=True)
        major = compute_capability[0]
        is_large = major == 9 or (major in (10, 12) and Change.BLACKWELL_WORKSPACE.is_in(torch_version))
        default = 4096 * 8 * KIB if is_large else (4096 * 2 + 16 * 8) * KIB
        num_bytes = _read_config(default, _HIP_CONFIGS[0])
        is_kept = os.environ.get("TORCH_CUBLAS_WORKSPACE_CACHE") == "1"
        return cls(
            num_bytes,
            lt_num_bytes=0 if Change.LT_WORKSPACE_SHARED.is_in(torch_version) else MIB,
            is_permanent=is_kept or not Change.WORKSPACE_PER_CALL.is_in(torch_version),
            is_lt_permanent=Change.LT_WORKSPACE_KEPT.is_in(torch_version),
        )

    def find_name(self, op: str, num_bytes: int) -> str | None:
        """Return the workspace's name if an allocation of `num_bytes` by `op` is a workspace; else None."""
        if op.removeprefix("aten.") not in PRODUCTS:
            return None
        return {self.num_bytes: WORKSPACE, self.lt_num_bytes: LT_WORKSPACE}.get(num_bytes)
