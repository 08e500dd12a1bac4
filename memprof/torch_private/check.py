"""Check which private names the installed torch lacks, and whether memprof runs without them."""

from __future__ import annotations

import importlib
import os
import pkgutil

from memprof.torch_private.cuda import initialized
from memprof.torch_private.names import PRIVATE_NAMES, PrivateName, make_missing_error

for _file in pkgutil.iter_modules([os.path.dirname(__file__)]):  # importing a file registers its names
    if _file.name not in ("__main__", "check"):
        importlib.import_module(f"{__package__}.{_file.name}")


def list_expected_names() -> list[PrivateName]:
    """Return the registered names that a build like the installed torch (with or without CUDA, distributed) has."""
    import torch

    missing_builds = set()
    if torch.version.cuda is None:
        missing_builds.add("CUDA")
    if not initialized.get(False):
        missing_builds.add("CUDA, once initialized")
    if not torch.distributed.is_available():
        missing_builds.add("distributed")
    return [name for name in PRIVATE_NAMES if name.build not in missing_builds]


def check_required_names() -> None:
    """Raise MemprofError if torch lacks a name without a fallback; modules of other names are not imported."""
    missing = [name for name in list_expected_names() if not name.fallback and not name.exists()]
    if missing:
        raise make_missing_error(missing)
