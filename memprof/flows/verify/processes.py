"""Processes that share the cores for a bench's works: forked from one that has all they need."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from memprof.errors import MemprofError
from memprof.fixes.catalog import Fix
from memprof.flows.verify.kernels import COMPILER_MODULES, compile_kernels_together, precompile_header
from memprof.flows.verify.specimens import Specimen
from memprof.torch_private import inductor
from memprof.workload.pool import run_all
from memprof.workload.quantization import import_quietly

_Answer = TypeVar("_Answer")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Use one thread of torch inside: with more, sums are rounded otherwise on a machine that has more of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def compiled_here(chosen: Sequence[Fix], *, several: bool) -> Iterator[None]:
    """Have each of `several` processes compile itself: Inductor's own workers would import torch once for each."""
    if not several or not any(fix.compiles for fix in chosen):
        yield
        return
    with inductor.config.get().patch(compile_threads=1), compile_kernels_together():
        precompile_header()
        yield


def prepare(chosen: Sequence[Fix], specimens: Sequence[Specimen]) -> None:
    """Import what all processes need, before they are forked from this one.

    And before a virtual GPU is there: bitsandbytes looks for one when it is imported, and then takes the library for
    it, so that what is measured on the CPU would have none of its kernels for that.
    """
    for specimen in specimens:
        specimen.build()
    wanted = ["memprof.virtual"]
    wanted += [package.partition(" ")[0] for fix in chosen for package in fix.packages]
    if any(fix.compiles for fix in chosen):
        wanted += COMPILER_MODULES
    for module in dict.fromkeys(wanted):
        with contextlib.suppress(ImportError):  # the fix itself says so
            import_quietly(module)
    # Measuring collects garbage each time: the libraries' own objects, which live for good, are looked through once.
    gc.collect()
    gc.freeze()


def all_of(works: Sequence[Callable[[], _Answer]], progress: Callable[[str], None], *, several: bool) -> list[_Answer]:
    """Return what each of `works` gives, or raise what one raises: if `several`, as many at once as there are cores.

    A model that the user names may be large, and its code may do what it likes: of those there is one at a time.
    """
    if not several:
        return [work() for work in works]
    answers = []
    for answer in run_all(works, progress):
        if isinstance(answer, MemprofError):
            raise answer
        answers.append(answer)
    return answers
