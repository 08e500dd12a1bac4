"""Check which private names the installed torch lacks, and whether memprof runs without them."""

from __future__ import annotations

import importlib
import os
import pkgutil

from memprof.torch_private.names import PRIVATE_NAMES, PrivateName, refusal

for _file in pkgutil.iter_modules([os.path.dirname(__file__)]):  # importing a file registers its names
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
    """Raise MemprofError if torch lacks a name that memprof needs; torch's modules of other names are not imported."""
    missing = [name for name in expected_names() if not name.without and not name.exists()]
    if missing:
        raise refusal(missing)
