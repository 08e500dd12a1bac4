"""A check of the private names that the installed torch lacks, and whether memprof runs without them."""

from __future__ import annotations

import importlib
import os
import pkgutil

from memprof.torch_private.names import PRIVATE_NAMES, PrivateName, refusal

for _file in pkgutil.iter_modules([os.path.dirname(__file__)]):  # importing one lists its names
    if _file.name not in ("__main__", "check"):
        importlib.import_module(f"{__package__}.{_file.name}")


def expected_names() -> list[PrivateName]:
    """Return the names that a build of torch like the installed one has."""
    import torch

    absent = set()
    if torch.version.cuda is None:
        absent.add("CUDA")
    if not torch.distributed.is_available():
        absent.add("distributed")
    return [name for name in PRIVATE_NAMES if name.build not in absent]


def refuse_missing() -> None:
    """Refuse a torch that lacks a name without which memprof cannot run; import none of its modules for the others.
    Raises MemprofError: it does."""
    missing = [name for name in expected_names() if not name.without and not name.exists()]
    if missing:
        raise refusal(missing)
