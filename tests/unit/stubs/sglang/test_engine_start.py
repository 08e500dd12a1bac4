"""What memprof changes of SGLang's start, on modules with the names that it changes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.patching import PatchSet
from memprof.stubs.sglang import extension
from memprof.stubs.sglang.engine import EngineStart
from memprof.virtual import VirtualGpu


class Context:
    """The part of an InstallContext that a start uses."""

    gpu = SimpleNamespace(total_bytes=24 << 30, key="rtx-4090")

    def __init__(self) -> None:
        self.assumed: list[str] = []
        self.budgets: list[Any] = []
        self.assume, self.on_engine_start = self.assumed.append, self.budgets.append


class Engine:
    @classmethod
    def _launch_scheduler_processes(cls, server_args, port_args, run_scheduler):
        raise AssertionError("it starts processes")


@pytest.fixture
def started(monkeypatch):
    """Yield a context, and a function that launches a scheduler whose constructor is given."""
    context = Context()
    start: Any = EngineStart(context)  # type: ignore[arg-type]
    monkeypatch.setitem(__import__("sys").modules, "sglang", SimpleNamespace(__version__="0.5.13"))
    with PatchSet() as patches:

        def launch(initialize) -> None:
            class Scheduler:
                __init__ = initialize

            scheduler = SimpleNamespace(Scheduler=Scheduler, configure_scheduler_process=None)
            engine = SimpleNamespace(Engine=Engine, assert_pkg_version=lambda *args: None)
            patches.apply_all(start._patch_scheduler(scheduler))
            patches.apply_all(start._patch_launch(engine))

            def run_scheduler(server_args, port_args, gpu_id, tp_rank, dp_rank, pipe_writer, shown_rank=None):
                assert (gpu_id, tp_rank, dp_rank, pipe_writer, shown_rank) == (0, 0, None, None, None)
                try:
                    scheduler.Scheduler(server_args)
                except Exception as error:
                    raise AssertionError("SGLang would send its parent process a signal") from error

            arguments = SimpleNamespace(model_path="m", tp_size=1, kv_cache_dtype="auto", chunked_prefill_size=2048)
            Engine._launch_scheduler_processes(arguments, None, run_scheduler)

        yield context, launch


def test_a_scheduler_that_is_ready_ends_the_run(started):
    context, launch = started
    with pytest.raises(SystemExit):
        launch(lambda self, server_args: None)
    (budget,) = context.budgets
    assert budget.starts and (budget.engine, budget.release, budget.model) == ("sglang", "0.5.13", "m")


@pytest.mark.parametrize(("message", "is_refusal"), [("Not enough memory. Please try", True), ("a typo", False)])
def test_an_error_of_the_scheduler_is_the_programs(started, message, is_refusal):
    context, launch = started

    def fail(self, server_args):
        raise RuntimeError(message)

    with pytest.raises(RuntimeError, match=message):
        launch(fail)
    assert [budget.refusal for budget in context.budgets] == [message] * is_refusal


def test_kernels_that_would_be_compiled_write_into_their_arguments():
    assumed: list[str] = []
    with VirtualGpu(find_gpu("rtx-4090")) as gpu:
        kernels = extension._load_kernels(assumed.append, "norm", cuda_files=["norm.cuh"])
        rows = torch.zeros(1024, 8, device="cuda")
        before = gpu.recorder.storages.live_bytes
        assert kernels.normalize(rows, 1e-6) is None
        assert gpu.recorder.storages.live_bytes == before
    assert len(assumed) == 1
