"""What every test shares: its lane, nothing may leak from one, where shared data lies, how cores are divided.

Several workers on one machine share its cores. torch in each of them, and in each process that a test starts, would
take all cores for itself, and two processes that both do so wait for each other.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.lanes import LANE, examples

_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "0"))
if _workers:
    # Before torch is imported, which reads it once; the processes that tests start inherit it.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // _workers)))

# A test is answered by what it runs, in its own process, and leaves nothing behind; the workers share the cores.
os.environ.update({"MEMPROF_CACHE": "off", "MEMPROF_PROCESSES": "1"})
# A worker of pytest has the terminal's, or those of a job; with three of these typer writes colors into files.
for _name in (
    "COLUMNS",
    "FORCE_COLOR",
    "GITHUB_ACTIONS",
    "GITHUB_STEP_SUMMARY",
    "NO_COLOR",
    "PY_COLORS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
):
    os.environ.pop(_name, None)

_TESTS = Path(__file__).resolve().parent
_SHARED = _TESTS.parents[1] / "shared"
_NO_SHARED = "no shared data"

# `--lane check` is what lies here, tests of new files too; `make test` runs everything but the nightly.
_CHECK = ("unit", "golden", "cli/test_errors.py", "cli/test_estimate.py")
# ... but for these, and for single tests with the marker `slow`.
_NOT_IN_CHECK = (
    "golden/test_totals.py",
    "golden/test_widths.py",
    "unit/findings/test_compiled_keeps.py",
    "unit/findings/test_evaluation.py",
    "unit/findings/test_leaks.py",
    "unit/findings/test_parallel.py",
    "unit/findings/test_proposals.py",
    "unit/findings/test_steady_states.py",
    "unit/findings/test_waiting_models.py",
    "unit/fixes",
    "unit/flows/cache",
    "unit/flows/ladder",
    "unit/flows/recommend",
    "unit/flows/sweep",
    "unit/flows/test_plans.py",
    "unit/integrations",
    "unit/ledger/test_batches.py",
    "unit/measured",
    "unit/monitor/test_probe.py",
    "unit/script/test_ranks.py",
    "unit/snapshots/test_export.py",
    "unit/snapshots/test_shared_snapshots.py",
    "unit/stubs/test_bitsandbytes.py",
    "unit/stubs/test_hub_kernels.py",
    "unit/stubs/test_in_graph.py",
    "unit/test_api_functions.py",
    "unit/test_pytest_plugin.py",
    "unit/trace/test_damaged.py",
    "unit/trace/test_pickled_events.py",
    "unit/virtual/compiled",
    "unit/virtual/distributed",
    "unit/virtual/integrations",
    "unit/virtual/interchange",
    "unit/virtual/kernels/test_linear_algebra.py",
    "unit/virtual/kernels/test_recurrent.py",
    "unit/virtual/kernels/test_sparse.py",
    "unit/virtual/kernels/test_value_dependent.py",
    "unit/virtual/test_autocast.py",
    "unit/virtual/test_autocast_models.py",
    "unit/virtual/test_caught_errors.py",
    "unit/virtual/test_host_kinds.py",
    "unit/virtual/test_idioms.py",
    "unit/virtual/test_last_uses.py",
    "unit/virtual/test_limits_of_values.py",
    "unit/virtual/test_refusals.py",
    "unit/virtual/test_restoration.py",
    "unit/virtual/test_values.py",
    "unit/watch",
    "unit/workload",
)
_CHECK_SECONDS = 3.0  # What a test of `--lane check` may take of a processor; the summary names those that take more.

# Begin with these, slowest first: what begins last leaves the other workers without work until it ends.
_SLOWEST = (
    "docs/test_docs.py",
    "cli/test_verify.py",
    "cli/test_shown_commands.py",
    "cli/test_run",
    "recipes/",
    "golden/test_totals.py",
    "programs/",
    "patches/",
    "planted/",
    "reports/",
    "cli/test_printed_commands.py",
    "cli/test_profile.py",
    "unit/virtual/compiled/",
    "unit/virtual/distributed/",
    "cli/test_monitor.py",
    "gpu/",
    "accuracy/",
    "scripts/",
    "cli/",
    "unit/workload/",
    "unit/fixes/",
)


def pytest_addoption(parser: pytest.Parser) -> None:
    lanes = "check: what takes a minute; test: all but what is marked nightly; nightly: that too"
    parser.addoption("--lane", choices=("check", "test", "nightly"), default="test", help=lanes)


def pytest_configure(config: pytest.Config) -> None:
    """Before test modules are imported."""
    os.environ[LANE] = config.getoption("--lane")
    settings.register_profile("lane", max_examples=examples(settings.default.max_examples))
    settings.load_profile("lane")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In `--lane check` the other lane's files are not even imported."""
    if config.getoption("--lane") != "check" or collection_path.is_dir():
        return None

    def among(places: tuple[str, ...]) -> bool:
        return any(collection_path.is_relative_to(_TESTS / place) for place in places)

    return True if among(_NOT_IN_CHECK) or not among(_CHECK) else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Slow modules first; workers take modules in this order (`--no-loadscope-reorder`)."""
    left_out = {"check": ("slow", "nightly"), "test": ("nightly",)}.get(config.getoption("--lane"), ())
    found = {item for item in items if any(item.get_closest_marker(name) for name in left_out)}
    config.hook.pytest_deselected(items=list(found))
    items[:] = [item for item in items if item not in found]
    items.sort(key=lambda item: next((i for i, part in enumerate(_SLOWEST) if f"tests/{part}" in item.nodeid), 99))


_since = 0.0


def _processor_seconds() -> float:
    """Of this process and the processes that it has waited for."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Every report says what its phase took of the processor."""
    global _since
    report = yield
    now = _processor_seconds()
    report.processor_seconds = now - _since
    _since = now
    return report


def pytest_runtest_logstart() -> None:
    """What came before is not this test's."""
    global _since
    _since = _processor_seconds()


def pytest_report_header() -> str | None:
    """Absent shared data is said at once."""
    return None if _SHARED.is_dir() else f"!!! {_NO_SHARED}: {_SHARED} is not there, and what needs it does not run"


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """What did not run without shared data; what is too slow for its lane."""
    reports = [report for found in terminalreporter.stats.values() for report in found]
    if not _SHARED.is_dir():
        skipped = [report for report in terminalreporter.getreports("skipped") if _NO_SHARED in str(report.longrepr)]
        terminalreporter.write_sep(
            "!", f"{_NO_SHARED}: {_SHARED} is not there, and {len(skipped)} tests did not run", red=True, bold=True
        )
    if config.getoption("--lane") == "check":
        for report in reports:
            seconds = getattr(report, "processor_seconds", 0.0)
            if seconds > _CHECK_SECONDS:
                terminalreporter.write_line(
                    f"TOO SLOW for make check: {report.nodeid} ({report.when}) took {seconds:.1f} s of a processor: "
                    "mark it slow, or name its file in tests/conftest.py",
                    yellow=True,
                )


def _leaks() -> list[str]:
    """What a virtual GPU that was not left would still hold; no torch, no leak."""
    torch = sys.modules.get("torch")
    if torch is None or not hasattr(torch, "utils"):
        return []
    leaks = []
    if torch._C._len_torch_function_stack():
        leaks.append("a torch function mode is active")
    if torch.utils._python_dispatch._len_torch_dispatch_stack():
        leaks.append("a torch dispatch mode is active")
    gpu = sys.modules.get("memprof.virtual.gpu")
    if gpu is not None and gpu._active is not None:
        leaks.append("a virtual GPU is active")
    return leaks


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """No test leaves a virtual GPU, a torch mode or a launcher's variable behind."""
    assert not _leaks(), "leaked from an earlier test"
    before = _launched()
    yield
    assert not _leaks()
    assert _launched() == before


def _launched() -> dict[str, str]:
    """What a launcher tells its processes: every program that a later test starts would take itself for one of many."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return {name: os.environ[name] for name in names if name in os.environ}


_num_modules = 0


@pytest.fixture(autouse=True)
def libraries_are_no_garbage() -> None:
    """The collector leaves alone what libraries made when they were imported: millions of objects that live for good.

    Looking through them took two thirds of a second, in tests that collect garbage most of their time.
    """
    global _num_modules
    if len(sys.modules) > _num_modules:
        gc.collect()
        gc.freeze()
        _num_modules = len(sys.modules)


@pytest.fixture(scope="module")
def small_heap() -> None:
    """What earlier tests left is not looked through either, where memprof searches for what keeps memory."""
    gc.collect()
    gc.freeze()


@pytest.fixture(scope="session")
def shared_dir() -> Path:
    """The folder of published measurements beside the checkout; it is not part of the repository."""
    if not _SHARED.is_dir():
        pytest.skip(f"{_NO_SHARED}: {_SHARED} is not there")
    return _SHARED
