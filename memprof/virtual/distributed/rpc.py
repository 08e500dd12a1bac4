"""Patch of torch.distributed.rpc that raises an error: a rank that runs alone would wait for other ranks forever."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from memprof.patching import Extension, Patch
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import unsupported_error


class RpcRejection(Extension):
    """Patch of `torch.distributed.rpc.init_rpc`, once the module is imported."""

    imports = ("torch.distributed.rpc",)

    def make_module_patches(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield a replacement of `init_rpc` that raises for more than one process."""
        original = getattr(module, "init_rpc", None)  # not in every build
        if original is None:
            return

        def init_rpc(
            name: str, backend: Any = None, rank: int = -1, world_size: int | None = None, *rest: Any, **options: Any
        ) -> Any:
            num_processes = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
            if num_processes > 1:
                raise unsupported_error(
                    f"calls other processes by torch.distributed.rpc ({name} of {num_processes})",
                    "run the part that trains without it, as a process of its own",
                )
            return original(name, backend, rank, world_size, *rest, **options)

        yield module, "init_rpc", init_rpc
