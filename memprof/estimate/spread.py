"""Which ranks a plan over several cards has, if the model can be spread so."""

from __future__ import annotations

from memprof.errors import UsageError
from memprof.estimate.geometry import Subject
from memprof.estimate.methods import Plan
from memprof.estimate.ranks import ALONE, Rank, ranks_of
from memprof.spec import TargetSpec
from memprof.workload.plan import check_plan, parse_plan


def ranks_in(subject: Subject, plan: Plan, parallel: str, gpus: int) -> list[Rank]:
    """One rank of each kind that `parallel` has over `gpus` cards; an empty one is a card alone.

    Raises:
        UsageError: it is no plan, or the model cannot be spread so; the message has the nearest that can be.
    """
    if not parallel:
        return [ALONE]
    spread = parse_plan(parallel, gpus)
    if spread.layers > 1:
        raise UsageError(
            "the closed form has no layers over cards", value=f"--parallel {parallel}",
            hint="memprof profile --mode inference runs it",
        )  # fmt: skip
    fields = plan.spec_fields()
    asked = {name: fields[name] for name in ("mode", "adapter", "quantize") if name in fields}
    check_plan(
        spread,
        TargetSpec(model="-", parallel=parallel, gpus=gpus, **asked),  # type: ignore[arg-type]
        "causal-lm",
        subject.config,
    )
    if plan.chunked_loss and (spread.tensor > 1 or spread.stages > 1):
        raise UsageError(
            "a chunked loss needs a head that is whole, and none that a schedule calls", value=f"--parallel {parallel}",
            hint="leave out --chunked-loss, or give fsdp, cp or ulysses",
        )  # fmt: skip
    return ranks_of(spread)
