"""Pytest plugin: tests that run on a virtual GPU, and fail if the run would not fit the GPU.

    @pytest.mark.memprof(gpu="rtx-4090", limit="20GiB")
    def test_training_step():
        train(steps=2)  # "cuda" is the virtual GPU, here and in the test's own fixtures

The virtual GPU exists for the test and its function-scoped fixtures; fixtures of a wider scope are set up without it.
`limit` is device memory, as nvidia-smi shows it: reserved memory and the CUDA context. The test fails if the run would
be out of memory on a GPU with that capacity. Cached memory does not count, since the allocator releases it before an
allocation fails. Without `limit`, the GPU's capacity is the limit. docs/dry-run-in-ci.md has more.

The plugin imports memprof and torch only for tests with a virtual GPU, so that other suites are not slowed down.
"""

from __future__ import annotations

import inspect
from collections.abc import Generator
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest

if TYPE_CHECKING:
    from memprof.api import ProfiledGpu

MARKER = "memprof"
DEFAULT_GPU = "h100-80gb"


class _GpuLimit(NamedTuple):
    """Virtual GPU of a test, and the memory limit of the test's marker."""

    gpu: ProfiledGpu
    limit_bytes: int | None


_GPU_KEY = pytest.StashKey[_GpuLimit]()


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker `memprof`, for `--markers` and `--strict-markers`."""
    config.addinivalue_line(
        "markers",
        f"{MARKER}(gpu={DEFAULT_GPU!r}, *, gpus=1, rank=None, world_size=None, vram=None, limit=None, "
        "alloc_conf=None): run the test on a virtual GPU, on several, or as one rank of several; it fails if "
        "it would not fit a GPU, or not fit `limit` of it",
    )


@pytest.fixture
def virtual_gpu(request: pytest.FixtureRequest) -> Generator[ProfiledGpu, None, None]:
    """Yield the virtual GPU of the test, chosen by its `memprof` marker; an H100 without a marker.
    Without a marker the test does not fail if it needs too much memory; it may check `report()` itself."""
    marker = request.node.get_closest_marker(MARKER)
    gpu_limit = _parse_marker(*(marker.args, marker.kwargs) if marker else ((), {}))
    with gpu_limit.gpu:
        request.node.stash[_GPU_KEY] = gpu_limit
        yield gpu_limit.gpu
    del request.node.stash[_GPU_KEY]  # with its trace: a suite may have many


@pytest.fixture(autouse=True)
def _memprof_marker(request: pytest.FixtureRequest) -> None:
    """Set up the `virtual_gpu` fixture for tests with the `memprof` marker."""
    if request.node.get_closest_marker(MARKER) is not None:
        request.getfixturevalue("virtual_gpu")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """Fail a test that has passed if its memory exceeds the limit; a failed test keeps its error."""
    result = yield
    gpu_limit = item.stash.get(_GPU_KEY, None)
    if gpu_limit is not None and item.get_closest_marker(MARKER) is not None:
        problem = _describe_problem(gpu_limit)
        if problem is not None:
            pytest.fail(problem, pytrace=False)
    return result


def _describe_problem(gpu_limit: _GpuLimit) -> str | None:
    from memprof.ledger.ledger import EmptyTraceError
    from memprof.report.terminal.summary import format_summary

    try:
        document = gpu_limit.gpu.report(limit_bytes=gpu_limit.limit_bytes)
    except EmptyTraceError as error:
        return f"memprof: the test has the marker, and used no memory of the GPU: {error.hint}"
    return None if document.fits_in_memory else f"memprof: {format_summary(document)}"


def _parse_marker(arguments: tuple[Any, ...], keywords: dict[str, Any]) -> _GpuLimit:
    from memprof.errors import UsageError

    signature = inspect.signature(_make_gpu)
    try:
        signature.bind(*arguments, **keywords)
    except TypeError as error:
        names, example = ", ".join(signature.parameters), '@pytest.mark.memprof(gpu="rtx-4090", limit="20GiB")'
        problem = f"{error}\n  hint:  it takes {names}, as in {example}"
    else:
        try:
            return _make_gpu(*arguments, **keywords)
        except UsageError as error:
            problem = str(error)
    # Not where it was caught: pytest would show both.
    pytest.fail(f"usage error of the marker memprof: {problem}", pytrace=False)


def _make_gpu(
    gpu: str = DEFAULT_GPU,
    *,
    gpus: int = 1,
    rank: int | None = None,
    world_size: int | None = None,
    vram: str | float | None = None,
    limit: str | float | None = None,
    alloc_conf: str | None = None,
) -> _GpuLimit:
    from memprof.api import virtual_gpus
    from memprof.errors import UsageError
    from memprof.units import parse_gib

    if not isinstance(gpu, str):
        raise UsageError("gpu is not the name of a GPU", value=repr(gpu), hint="`memprof gpus` lists them")
    for key, value in (("gpus", gpus), ("rank", rank), ("world_size", world_size)):
        if type(value) is not int and (value is not None or key == "gpus"):
            raise UsageError(f"{key} is not a whole number", value=repr(value), hint=f"give one, as in {key}=8")
    profiled_gpu = virtual_gpus(gpus, gpu, vram=vram, alloc_conf=alloc_conf, rank=rank, world_size=world_size)
    limit_bytes = None if limit is None else parse_gib(limit)
    profiled_gpu.check_limit(limit_bytes)
    return _GpuLimit(profiled_gpu, limit_bytes)
