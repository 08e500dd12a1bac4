"""Several runs at once: how many may be, and what they need imported once for all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

from memprof.errors import MemprofError
from memprof.flows.profile import profile
from memprof.spec import TargetSpec


def at_once(spec: TargetSpec) -> int:
    """Return how many runs like `spec` may be made at once, each in a worker.

    One after the other are made runs of code that is the user's own: it may write, and count on what a run before left.
    """
    from memprof.workload.pool import number_of_workers  # needs torch

    _, colon, factory = spec.model.rpartition(":")
    is_own_code = spec.trust_remote_code or bool(colon and factory.isidentifier())
    return number_of_workers() if spec.device == "virtual" and not is_own_code and not spec.compile else 1


def warm(spec: TargetSpec, progress: Callable[[str], None]) -> None:
    """Import what runs like `spec` need, once for all workers that are forked from this process, by a small run."""
    progress("importing torch and the model's code")
    small = spec.edit(
        model="pythia-70m", model_is_size=False, context_length=8, batch_size=1, steps=1, vocab_size=None, lengths=None,
        parallel=spec.parallel and "fsdp", rank=None, fixes=(),
    )  # fmt: skip
    with contextlib.suppress(MemprofError):  # whatever it is, the runs themselves will say it
        profile(small, explained=False)
