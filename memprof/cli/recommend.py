"""`memprof recommend`: what fits a card, or the configuration to use for a model."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from memprof.catalog import DEFAULT_GPU, find_gpu
from memprof.cli.progress import Progress
from memprof.errors import UsageError, unknown_name
from memprof.spec import DEFAULT_LORA_RANK, TargetSpec
from memprof.units import parse_gib

if TYPE_CHECKING:
    from memprof.report.documents.recommendation import Recommendation

_GOALS = ("full", "lora", "qlora")
_PRECISIONS = ("half", "amp", "float32", "int8", "nf4")
_SNIPPETS = ("pytorch", "transformers")


def recommend(
    model: Annotated[
        str | None,
        typer.Option(
            help="A catalog name (gpt2), a Hugging Face id, a folder or config.json, or file.py:factory.",
            metavar="MODEL",
        ),
    ] = None,
    model_size: Annotated[
        str | None, typer.Option(help="Instead of --model: a size such as 4B or 1.2B.", metavar="SIZE")
    ] = None,
    train: Annotated[
        str | None, typer.Option(help=f"The goal is to train: {', '.join(_GOALS)}.", metavar="WHAT")
    ] = None,
    infer: Annotated[bool, typer.Option("--infer", help="The goal is to generate.")] = False,
    context_length: Annotated[
        int | None, typer.Option(help="Tokens per sequence. [default: 2048, or the model's limit]", metavar="TOKENS")
    ] = None,
    effective_batch: Annotated[
        int | None,
        typer.Option(
            help="Sequences in an optimizer step; of --infer, sequences at a time. [default: 8; 1]", metavar="COUNT"
        ),
    ] = None,
    batch_size: Annotated[
        int | None, typer.Option(help="This micro-batch alone. [default: searched]", metavar="COUNT")
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(
            help=f"This alone: {', '.join(_PRECISIONS)}. [default: what gives up least and fits]", metavar="NAME"
        ),
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(help=f"Of adapters. [default: {DEFAULT_LORA_RANK}]", metavar="RANK")
    ] = None,
    lora_targets: Annotated[
        str | None,
        typer.Option(help="Modules to adapt, such as q_proj,v_proj, or all-linear.", metavar="NAMES"),
    ] = None,
    lengths: Annotated[
        Path | None,
        typer.Option(
            help="The data set's lengths: one a line, or a column of a .jsonl or .parquet file. Foretells the step at "
            "which it runs out of memory.",
            metavar="FILE",
        ),
    ] = None,
    lengths_column: Annotated[
        str | None, typer.Option(help="Which column has the lengths, or the tokens.", metavar="NAME")
    ] = None,
    gpu: Annotated[
        str | None, typer.Option(help="A card of the catalog. [default: the one that is present]", metavar="GPU")
    ] = None,
    gpu_vram: Annotated[
        str | None, typer.Option(help="Instead of --gpu: a capacity, in GiB or as 24GB.", metavar="GIB")
    ] = None,
    snippet: Annotated[
        str | None,
        typer.Option(help=f"Print this script alone: {' or '.join(_SNIPPETS)}.", metavar="NAME"),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    explain: Annotated[bool, typer.Option("--explain", help="List all that was run, and what was assumed.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """What fits a card; with a model and a goal, the configuration to use, found by simulated runs.

    Without a model: the largest models of the catalog that fit for inference, QLoRA, LoRA and full training. With one:
    the quickest configuration that fits, what else was run, the largest batch and context, and the code to paste. Exit
    code 0: something fits; 3: nothing does.
    """
    for name, value, choices in (
        ("--train", train, _GOALS),
        ("--precision", precision, _PRECISIONS),
        ("--snippet", snippet, _SNIPPETS),
    ):
        if value is not None and value not in choices:
            raise unknown_name(name, value, choices)
    for name, count in (("--effective-batch", effective_batch), ("--batch-size", batch_size)):
        if count is not None and count < 1:
            raise UsageError(f"{name} must be at least 1", value=count, hint="give a positive whole number")
    if model is not None and model_size is not None:
        raise UsageError("give --model or --model-size, not both", value=f"{model}, {model_size}", hint="leave one out")
    if train is not None and infer:
        raise UsageError(
            "give --train or --infer, not both", value=f"--train {train} --infer", hint="ask for each by itself"
        )
    wanted = model or model_size
    goal = "infer" if infer else train
    _check_use(wanted, goal, effective_batch, batch_size, lengths, lengths_column, snippet)
    card = _card(gpu, gpu_vram)
    spec = TargetSpec(
        model=wanted or "-",
        model_is_size=model_size is not None,
        context_length=context_length,
        **card,  # type: ignore[arg-type]
    )
    if goal in ("lora", "qlora"):
        spec = spec.edit(adapter="lora", lora_rank=lora_rank, lora_targets=lora_targets)
    elif lora_rank is not None or lora_targets is not None:
        raise UsageError("--lora-rank and --lora-targets are for adapters", hint="add --train lora or qlora")
    # As in `memprof profile`: what the libraries make lives for good.
    gc.disable()
    with Progress() as progress:
        answer = _answer(spec, goal, progress, effective_batch, precision, batch_size, lengths, lengths_column)
    _print(answer, snippet, as_json=as_json, explain=explain)
    raise typer.Exit(0 if answer.found else 3)


def _check_use(
    model: str | None,
    goal: str | None,
    effective_batch: int | None,
    batch_size: int | None,
    lengths: Path | None,
    column: str | None,
    snippet: str | None,
) -> None:
    if model is None:
        given: dict[str, object] = {
            "--train or --infer": goal,
            "--effective-batch": effective_batch,
            "--batch-size": batch_size,
        }
        given |= {"--lengths": lengths, "--snippet": snippet}
        for name, value in given.items():
            if value is not None:
                raise UsageError(f"{name} needs a model", value=value, hint="add --model NAME or --model-size 4B")
    elif goal is None:
        raise UsageError("what is the model for?", value=model, hint=f"add --train {'|'.join(_GOALS)}, or --infer")
    if column is not None and lengths is None:
        raise UsageError("--lengths-column needs --lengths", value=column, hint="add --lengths FILE")
    if lengths is not None and goal == "infer":
        raise UsageError("--lengths is for training", value=lengths, hint="add --train full, lora or qlora")
    if effective_batch is not None and batch_size is not None and effective_batch % batch_size:
        raise UsageError(
            "--batch-size must divide --effective-batch",
            value=f"{effective_batch} in micro-batches of {batch_size}",
            hint="leave out --batch-size, and it is searched",
        )


def _card(gpu: str | None, gpu_vram: str | None) -> dict[str, object]:
    """The card that is asked for, else the one that is here."""
    if gpu is not None and gpu_vram is not None:
        raise UsageError("give --gpu or --gpu-vram, not both", value=f"{gpu}, {gpu_vram}", hint="leave one out")
    if gpu is not None:
        return {"gpu": find_gpu(gpu).key}
    if gpu_vram is not None:
        return {"gpu": DEFAULT_GPU, "gpu_vram_bytes": parse_gib(gpu_vram)}
    from memprof.device.nvml import read_cards

    reading = read_cards()
    if not reading.cards or reading.cards[0].total_bytes is None:
        raise UsageError(
            "which card?",
            value="; ".join(reading.notes) or "none is present",
            hint="name one: --gpu rtx-4090 (`memprof gpus` lists them), or --gpu-vram 8",
        )
    card = reading.cards[0]
    assert card.total_bytes is not None
    try:
        return {"gpu": find_gpu(card.name).key}
    except UsageError:
        return {"gpu": DEFAULT_GPU, "gpu_vram_bytes": card.total_bytes - (card.reserved_bytes or 0)}


def _answer(
    spec: TargetSpec,
    goal: str | None,
    progress: Progress,
    effective_batch: int | None,
    precision: str | None,
    batch_size: int | None,
    file: Path | None,
    column: str | None,
) -> Recommendation:
    if goal is None:
        from memprof.flows.recommend.largest import recommend_models

        return recommend_models(spec, progress, spec.context_length)
    from memprof.flows.recommend.for_data import recommend_for_data
    from memprof.flows.recommend.plans import Goal
    from memprof.flows.recommend.search import recommend as search

    options = {"effective_batch": effective_batch, "precision": precision, "micro_batch": batch_size}
    if file is not None:
        return recommend_for_data(spec, Goal(goal), progress, file, column, **options)  # type: ignore[arg-type]
    return search(spec, Goal(goal), progress, **options)[0]  # type: ignore[arg-type]


def _print(answer: Recommendation, snippet: str | None, *, as_json: bool, explain: bool) -> None:
    if snippet is not None and answer.found:
        if snippet not in answer.snippets:
            raise UsageError(
                "there is no such script for this run",
                value=snippet,
                hint="there is " + (" and ".join(answer.snippets) or "none for a model of your own"),
            )
        sys.stdout.write(answer.snippets[snippet])
        return
    if as_json:
        json.dump(answer.to_json(), sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    from memprof.report.terminal.recommendation import print_recommendation

    print_recommendation(answer, explain=explain)
