"""Which private names the installed torch lacks, and whether memprof runs without them."""

from __future__ import annotations

from memprof.torch_private import (  # noqa: F401, importing them lists their names
    autograd,
    cuda,
    dispatch,
    distributed,
    dynamo,
    inductor,
    kernels,
    loaders,
    pytree,
    tensors,
)
from memprof.torch_private.names import PRIVATE_NAMES, PrivateName, refusal


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

    Raises:
        MemprofError: it does.
    """
    missing = [name for name in expected_names() if not name.without and not name.exists()]
    if missing:
        raise refusal(missing)
