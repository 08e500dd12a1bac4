"""Rejection of torch.distributed.rpc, where a rank that runs alone would wait for other processes forever."""

from __future__ import annotations

import os
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from memprof.patching import Extension, Patch
from memprof.virtual.install_context import InstallContext
from memprof.virtual.limits import unsupported_error


class Rpc(Extension):
    """Patch of `torch.distributed.rpc`, once the module is imported."""

    imports = ("torch.distributed.rpc",)

    def patches_of(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield a replacement of `init_rpc` that raises for more than one process."""
        original = getattr(module, "init_rpc", None)  # not in every build
        if original is None:
            return

        def init_rpc(
            name: str, backend: Any = None, rank: int = -1, world_size: int | None = None, *rest: Any, **options: Any
        ) -> Any:
            size = int(os.environ.get("WORLD_SIZE", 1)) if world_size is None else world_size
            if size > 1:
                raise unsupported_error(
                    f"calls other processes by torch.distributed.rpc ({name} of {size})",
                    "run the part that trains without it, as a process of its own",
                )
            return original(name, backend, rank, world_size, *rest, **options)

        yield module, "init_rpc", init_rpc
