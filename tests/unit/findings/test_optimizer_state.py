"""State of the optimizer in float32, and what its step makes beside."""

from __future__ import annotations

import pytest

from memprof.findings import Severity
from memprof.findings.suggestions import list_fix_names
from memprof.trace.events import PhaseKind, Role
from memprof.units import MIB
from tests.unit.findings.language_models import of, training
from tests.unit.traces import TraceBuilder


class TestOptimizer:
    @staticmethod
    def stepped(dtype: str, state: str) -> TraceBuilder:
        b = training(16, 1000, dtype=dtype, layers=4)
        b.phase(PhaseKind.OPTIMIZER_STEP)
        for name in ("exp_avg", "exp_avg_sq"):
            b.new(2048, 512, dtype=state, op="aten.zeros_like", owner=(Role.OPTIMIZER_STATE, name))
        b.new(1, op="aten.zeros", owner=(Role.OPTIMIZER_STATE, "step"))
        return b

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_silent_on_state_like_the_parameters(self, dtype: str) -> None:
        assert not of(self.stepped(dtype, dtype).context(), "float32-optimizer-state")

    def test_temporaries_may_be_fused_away(self) -> None:
        b = self.stepped("bfloat16", "bfloat16")
        b.free(*[b.new(2048, 16 * 512, dtype="bfloat16", op="aten._foreach_sqrt") for _ in range(4)])
        (finding,) = of(b.context(), "optimizer-step-temporaries")
        assert finding.fixes[0] == "fused-optimizer" and list_fix_names(finding.suggestions) == finding.fixes

    @pytest.mark.parametrize(("fewer_mib", "decides"), [(0, False), (2, True), (128, True), (150, False)])
    def test_temporaries_are_the_cause_if_the_run_fits_without(self, fewer_mib: int, decides: bool) -> None:
        """128 MiB of them, on a GPU with less than the run needs."""
        b = self.stepped("bfloat16", "bfloat16")
        for _ in range(4):
            b.new(2048, 16 * 512, dtype="bfloat16", op="aten._foreach_sqrt")
        needed_bytes = b.context().ledger.run.required_reserved_bytes
        (finding,) = of(b.context(needed_bytes - fewer_mib * MIB), "optimizer-step-temporaries")
        assert finding.is_decisive == decides
        assert (finding.severity is Severity.NOTE) == (fewer_mib == 0)

    @pytest.mark.parametrize(("num_steps", "decides"), [(1, True), (2, False)])
    def test_in_a_later_step_something_else_has_grown_if_memory_runs_out(self, num_steps: int, decides: bool) -> None:
        b = training(16, 1000, dtype="bfloat16", layers=4)
        for step in range(1, num_steps + 1):
            b.phase(PhaseKind.OPTIMIZER_STEP, step)
        for _ in range(4):
            b.new(2048, 16 * 512, dtype="bfloat16", op="aten._foreach_sqrt")
        b.trace.ended_out_of_memory = True
        needed_bytes = b.context().ledger.run.required_reserved_bytes
        (finding,) = of(b.context(needed_bytes - 2 * MIB), "optimizer-step-temporaries")
        assert finding.is_decisive == decides

    @pytest.mark.parametrize("op", ["aten.zeros_like", "aten.sqrt"])
    def test_state_that_the_step_is_about_to_make_is_no_temporary(self, op: str) -> None:
        b = TraceBuilder()
        b.parameter("weight", 8192, 8192)
        b.phase(PhaseKind.OPTIMIZER_STEP)
        b.new(8192, 8192, op=op)
        assert bool(of(b.context(), "optimizer-step-temporaries")) == (op == "aten.sqrt")

    def test_each_state_is_judged_by_its_own_parameter(self) -> None:
        b = training(16, 1000, dtype="bfloat16", layers=4)
        b.parameter("router.weight", 2048, 256)
        b.phase(PhaseKind.OPTIMIZER_STEP)
        b.new(2048, 256, op="aten.zeros_like", owner=(Role.OPTIMIZER_STATE, "exp_avg"))
        assert not of(b.context(), "float32-optimizer-state")

    def test_silent_when_the_peak_is_elsewhere(self) -> None:
        b = self.stepped("bfloat16", "bfloat16")
        b.free(b.new(2048, 512, op="aten._foreach_sqrt"))
        b.phase(PhaseKind.FORWARD, 2)
        b.new(65536, 512)
        assert not of(b.context(), "optimizer-step-temporaries")
