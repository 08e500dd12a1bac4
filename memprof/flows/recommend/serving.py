"""How inference is spread over several cards (`memprof recommend --gpus N --mode inference`): matrices shared by a rank
on each (tensor parallelism), or layers on each card of one process (`device_map`). Each way is run.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator

from memprof.catalog import Gpu
from memprof.errors import MemprofError, UsageError
from memprof.flows.cards import device_facts, virtual_card
from memprof.flows.recommend.over_cards import nccl_assumption
from memprof.flows.recommend.plans import Goal, Plan, base_spec, tiers
from memprof.flows.recommend.search import Question, Tried, choice_of, on_front
from memprof.flows.recommend.serving_scripts import serving_scripts
from memprof.flows.recommend.simulator import Simulator
from memprof.flows.recommend.snippet import loaded_model
from memprof.report.documents.recommendation import Alternative, Recommendation
from memprof.spec import TargetSpec
from memprof.workload.models import ModelSource, find_source
from memprof.workload.plan import DEVICE_MAP, check_plan, parse_plan

_LENGTH = 2048
MOST_CARDS = 64
"""Beyond so many it is not asked whether it fits."""
_WHOLE = frozenset({"half", "float32"})
"""Precisions of weights that are spread here: quantized ones are not."""


class Serving:
    """The ways to run a model over cards, each run once."""

    def __init__(self, spec: TargetSpec, question: Question, progress: Callable[[str], None]) -> None:
        gpu: Gpu = virtual_card(spec)
        self.runs = Simulator(gpu, progress, seeks_room=True)
        self.base = base_spec(Goal.INFER, spec.edit(gpus=1, batch_size=question.batch))
        self.source: ModelSource = find_source(spec)
        if self.source.task != "causal-lm":
            self.base = self.base.edit(new_tokens=None)  # it does not decode: its forward alone
        kinds = [tier for tier in tiers(Goal.INFER, gpu, question.precision, question.half) if tier.precision in _WHOLE]
        if not kinds:
            raise UsageError(
                "quantized weights are not spread over cards here", value=f"--quantize {question.precision}",
                hint="leave out --quantize, or --gpus",
            )  # fmt: skip
        self.kind: Plan = kinds[0]
        self.batch = question.batch

    def ways(self, gpus: int) -> Iterator[tuple[str, Tried]]:
        """Those that the model can be spread by over so many cards, run; by a name that `--parallel` takes."""
        for plan in (f"tp={gpus}", DEVICE_MAP) if gpus > 1 else ("",):
            spec = self.kind.spec(self.base, self.batch).edit(parallel=plan or None, gpus=gpus)
            name = f"{plan}: {self.kind.label()}" if plan else self.kind.label()
            try:
                if plan:
                    check_plan(parse_plan(plan, gpus), spec, self.source.task, self.source.config)
            except UsageError as error:
                self.runs.failures[name] = error.line
                continue
            outcome = self.runs.try_run(spec, f"{name} over {gpus}" if gpus > 1 else name)
            if outcome is not None:
                yield plan, Tried(self.kind, self.batch, 1, outcome)

    def has_room(self, tried: Tried) -> bool:
        """It fits without the allocator giving anything back on the way."""
        return tried.outcome.fits and tried.outcome.needed_bytes <= self.runs.gpu.total_bytes

    def rank(self, tried: Tried) -> tuple[bool, bool, float]:
        """The least first: what has room, then what fits only just; of these the quickest."""
        return not tried.outcome.fits, not self.has_room(tried), tried.outcome.seconds

    def fewest(self) -> Alternative | None:
        """The least number of cards, of powers of two, on which it fits."""
        gpus = 1
        while gpus <= MOST_CARDS:
            for plan, tried in sorted(self.ways(gpus), key=lambda way: self.rank(way[1])):
                if tried.outcome.fits:
                    how = f", {plan}" if plan else ""
                    name = f"{gpus} x {self.runs.gpu.name}{how}: {self.kind.label(self.batch)}"
                    return Alternative("the least number of these cards", name, tried.outcome.needed_bytes, False)
            gpus *= 2
        return None


def recommend_serving(spec: TargetSpec, question: Question, progress: Callable[[str], None]) -> Recommendation:
    """How to run `spec`'s model over `spec.gpus` cards, with what else was run, and code to paste.

    Raises:
        UsageError: quantized weights are asked for.
        MemprofError: the model cannot be found, or no way to spread it applies.
    """
    if spec.context_length is None:
        spec = spec.edit(context_length=min(_LENGTH, find_source(spec).max_positions or _LENGTH))
    search = Serving(spec, question, progress)
    ways = sorted(search.ways(spec.gpus), key=lambda way: search.rank(way[1]))
    if not ways:
        if search.runs.refusal is not None:
            raise search.runs.refusal
        raise MemprofError(
            "no way to spread it applies", value=spec.model, hint="; ".join(search.runs.failures.values())
        )
    points = [(tried.outcome.needed_bytes, tried.outcome.seconds) for _, tried in ways]
    rows = tuple(
        dataclasses.replace(
            choice_of(search.runs, tried, pareto=on_front(point, points)),
            name=f"{plan}: {search.kind.label()}",
            parallel=plan,
        )
        for (plan, tried), point in zip(ways, points, strict=True)
    )
    fitting = [(plan, tried) for plan, tried in ways if tried.outcome.fits]
    fewest = search.fewest()
    target = ways[0][1].outcome.target
    model = loaded_model(spec)
    texts = {} if model is None else serving_scripts(fitting, model)
    return Recommendation(
        device=device_facts(search.runs.gpu, search.base.host_memory_bytes),
        goal=Goal.INFER.value,
        model=target.model,
        num_parameters=target.num_parameters,
        context_length=target.context_length or 0,
        effective_batch=search.batch,
        gpus=spec.gpus,
        chosen=rows[0] if fitting else None,
        reason=_reason([plan for plan, _ in fitting]),
        choices=rows,
        max_positions=target.max_positions,
        alternatives=() if fewest is None else (fewest,),
        snippets={name: text for name, (text, _) in texts.items()},
        launch={name: line for name, (_, line) in texts.items()},
        runs=len(search.runs),
        not_applied=dict(search.runs.failures),
        card_note=search.runs.gpu.note,
        assumptions=(*_ASSUMPTIONS, nccl_assumption()),
    )


def _reason(fitting: list[str]) -> str:
    if not fitting:
        return "no way to spread it over these cards fits"
    at_work = "all cards are at work at once" if fitting[0] != DEVICE_MAP else "one card is at work after another"
    others = f"the quicker of {len(fitting)} that fit" if len(fitting) > 1 else "the only way that fits"
    return f"{others}: {at_work}; it gives up no precision"


_ASSUMPTIONS = (
    "Times are lower bounds at published rates: compute, then what is sent between cards, over NVLink where the board "
    "has it, else over the host's link. With device-map one card works after another, and what goes between them is "
    "not counted.",
    "A prompt and two tokens after it, with the model's own KV cache; a server's batching is not simulated.",
    "With tp each process makes the model in host memory first; whether the host has room for all of them is not "
    "judged.",
    "The least number of cards is looked for among powers of two.",
)
