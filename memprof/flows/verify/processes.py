"""Worker processes for the tasks of `memprof verify`, forked from a process that has imported everything."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from memprof.fixes.catalog import Fix
from memprof.flows.verify.kernels import COMPILER_MODULES, compile_kernels_together, precompile_header
from memprof.flows.verify.specimens import Specimen
from memprof.torch_private import inductor
from memprof.workload.pool import run_all_or_raise
from memprof.workload.quantization import import_quietly

_T = TypeVar("_T")


@contextlib.contextmanager
def use_one_thread() -> Iterator[None]:
    """Context manager: use one thread of torch, so that rounding does not depend on the number of cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


@contextlib.contextmanager
def compile_in_workers(fixes: Sequence[Fix], *, is_parallel: bool) -> Iterator[None]:
    """Context manager: if `is_parallel`, compile in this process's forks instead of in Inductor's worker processes."""
    if not is_parallel or not any(fix.compiles for fix in fixes):
        yield
        return
    with inductor.config.get().patch(compile_threads=1), compile_kernels_together():
        precompile_header()
        yield


def import_dependencies(fixes: Sequence[Fix], specimens: Sequence[Specimen]) -> None:
    """Import modules that all workers need, before this process is forked.

    Must run before a virtual GPU exists: bitsandbytes looks for a GPU at import, and with a GPU loads the library
    without CPU kernels, which measurements on the CPU need.
    """
    for specimen in specimens:
        specimen.build()
    modules = ["memprof.virtual"]
    modules += [package.partition(" ")[0] for fix in fixes for package in fix.packages]
    if any(fix.compiles for fix in fixes):
        modules += COMPILER_MODULES
    for module in dict.fromkeys(modules):
        with contextlib.suppress(ImportError):  # the fix itself raises UsageError
            import_quietly(module)
    # Each measurement collects garbage: objects of the libraries, which are never freed, are scanned only once.
    gc.collect()
    gc.freeze()


def run_tasks(tasks: Sequence[Callable[[], _T]], progress: Callable[[str], None], *, is_parallel: bool) -> list[_T]:
    """Run `tasks`, if `is_parallel` as many at a time as there are cores; return their results in order."""
    if not is_parallel:
        return [task() for task in tasks]
    return run_all_or_raise(tasks, progress)
