"""`memprof recommend`: what fits a card, or the configuration to use for a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import typer

from memprof.catalog import find_gpu
from memprof.cli.options import OUTPUT, again, spec_of
from memprof.cli.output import Explained, print_json
from memprof.cli.progress import Progress, long_work
from memprof.cli.streams import say
from memprof.errors import UsageError
from memprof.spec import TargetSpec, option

if TYPE_CHECKING:
    from memprof.report.documents.recommendation import Recommendation

_GOALS = ("full", "lora", "qlora")


@dataclass(frozen=True, kw_only=True)
class Request(Explained):
    """What is asked: a model and a goal, or neither; a card, or the one that is here."""

    model: str | None = again("model", default=None)
    model_is_size: bool = again("model_is_size")
    trust_remote_code: bool = again("trust_remote_code")
    train: str | None = option(None, "Goal", "The goal is to train: {choices}.", metavar="WHAT", choices=_GOALS)
    infer: bool = option(False, "Goal", "The goal is to generate.")
    precision: str | None = option(
        None, "Goal", "This alone: {choices}.", metavar="NAME",
        choices=("half", "amp", "float32", "int8", "nf4"), unset="what gives up least and fits",
    )  # fmt: skip
    context_length: int | None = again("context_length")
    effective_batch: int | None = option(
        None, "Batch", "Sequences in an optimizer step; of --infer, sequences at a time.", metavar="COUNT",
        is_count=True, unset="8; 1",
    )  # fmt: skip
    batch_size: int | None = again("batch_size", default=None, help="This micro-batch alone.", unset="searched")
    lora_rank: int | None = again("lora_rank", help="Of adapters.")
    lora_targets: str | None = again("lora_targets")
    lengths: str | None = option(
        None, "Data", "The data set's lengths: one a line, or a column of a .jsonl or .parquet file; "
        "lognormal:MEAN,SIGMA or alpaca. Foretells the step at which it runs out of memory.", metavar="FILE",
    )  # fmt: skip
    lengths_column: str | None = option(None, "Data", "Which column has the lengths, or the tokens.", metavar="NAME")
    batches: int | None = option(
        None, "Data", "Run what was found over so many batches of --lengths: whether all fit, and what they reserve.",
        metavar="COUNT", is_count=True,
    )  # fmt: skip
    gpu: str | None = again("gpu", default=None, help="A card of the catalog.", unset="the one that is present")
    gpu_vram_bytes: int | None = again("gpu_vram_bytes")
    snippet: str | None = option(
        None, OUTPUT, "Print this script alone: {choices}.", metavar="NAME", choices=("pytorch", "transformers")
    )

    @property
    def goal(self) -> str | None:
        """What the model is for; None: it is not said."""
        return "infer" if self.infer else self.train

    def check(self) -> None:
        """Whether it is one question.

        Raises:
            UsageError: options exclude each other, or one is missing.
        """
        if self.train is not None and self.infer:
            raise UsageError(
                "give --train or --infer, not both",
                value=f"--train {self.train} --infer",
                hint="ask for each by itself",
            )
        if self.model is None:
            for name, value in (
                ("--train or --infer", self.goal),
                ("--effective-batch", self.effective_batch),
                ("--batch-size", self.batch_size),
                ("--lengths", self.lengths),
                ("--snippet", self.snippet),
            ):
                if value is not None:
                    raise UsageError(f"{name} needs a model", value=value, hint="add --model NAME or --model-size 4B")
        elif self.goal is None:
            raise UsageError(
                "what is the model for?", value=self.model, hint=f"add --train {'|'.join(_GOALS)}, or --infer"
            )
        if self.lengths_column is not None and self.lengths is None:
            raise UsageError("--lengths-column needs --lengths", value=self.lengths_column, hint="add --lengths FILE")
        if self.batches is not None and self.lengths is None:
            raise UsageError("--batches needs --lengths", value=self.batches, hint="add --lengths FILE")
        if self.lengths is not None and self.infer:
            raise UsageError("--lengths is for training", value=self.lengths, hint="add --train full, lora or qlora")
        if self.effective_batch is not None and self.batch_size and self.effective_batch % self.batch_size:
            raise UsageError(
                "--batch-size must divide --effective-batch",
                value=f"{self.effective_batch} in micro-batches of {self.batch_size}",
                hint="leave out --batch-size, and it is searched",
            )
        if self.train not in ("lora", "qlora") and (self.lora_rank is not None or self.lora_targets is not None):
            raise UsageError("--lora-rank and --lora-targets are for adapters", hint="add --train lora or qlora")

    def spec(self) -> TargetSpec:
        """Model and card; the rest is searched."""
        spec = spec_of(
            self,
            model=self.model or "-",
            lengths=None,  # a file for the odds; of `memprof profile` they are the batches themselves
            batch_size=1,
            gpu=None if self.gpu is None else find_gpu(self.gpu).key,
            adapter="lora" if self.train in ("lora", "qlora") else None,
        )
        return _on_present_card(spec) if self.gpu is None and self.gpu_vram_bytes is None else spec


def recommend(request: Request) -> None:
    """What fits a card; with a model and a goal, the configuration to use, found by simulated runs.

    Without a model: the largest models of the catalog that fit for inference, QLoRA, LoRA and full training. With one:
    the quickest configuration that fits, what else was run, the largest batch and context, and the code to paste. Exit
    code 0: something fits; 3: nothing does.
    """
    request.check()
    spec = request.spec()
    with long_work() as progress:
        answer = _answer(spec, request, progress)
    _print(answer, request)
    raise typer.Exit(0 if answer.found else 3)


def _on_present_card(spec: TargetSpec) -> TargetSpec:
    """`spec` on the first card that is here."""
    from memprof.device.nvml import read_cards

    reading = read_cards()
    card = next(iter(reading.cards), None)
    if card is None or card.usable_bytes is None:
        raise UsageError(
            "which card?",
            value="; ".join(reading.notes) or "none is present",
            hint="name one: --gpu rtx-4090 (`memprof gpus` lists them), or --gpu-vram 8",
        )
    try:
        return spec.edit(gpu=find_gpu(card.name).key)
    except UsageError:
        return spec.edit(gpu_vram_bytes=card.usable_bytes)


def _answer(spec: TargetSpec, request: Request, progress: Progress) -> Recommendation:
    if request.goal is None:
        from memprof.flows.recommend.largest import recommend_models

        return recommend_models(spec, progress)
    from memprof.flows.recommend.for_data import recommend_for_data
    from memprof.flows.recommend.plans import Goal
    from memprof.flows.recommend.search import Question
    from memprof.flows.recommend.search import recommend as search

    question = Question(Goal(request.goal), request.effective_batch, request.precision, request.batch_size)
    if request.lengths is not None:
        return recommend_for_data(spec, question, progress, request.lengths, request.lengths_column, request.batches)
    return search(spec, question, progress)[0]


def _print(answer: Recommendation, request: Request) -> None:
    if request.snippet is not None and answer.found:
        if request.snippet not in answer.snippets:
            raise UsageError(
                "there is no such script for this run",
                value=request.snippet,
                hint="there is " + (" and ".join(answer.snippets) or "none for a model of your own"),
            )
        say(answer.snippets[request.snippet], nl=False)
        return
    if request.as_json:
        print_json(answer)
        return
    from memprof.report.terminal.recommendation import print_recommendation

    print_recommendation(answer, explain=request.explain)
