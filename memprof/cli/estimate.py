"""`memprof estimate`: what a model takes, in closed form and at once."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from memprof.errors import UsageError
from memprof.spec import DEFAULT_LORA_RANK


def estimate(
    params: Annotated[str | None, typer.Option(help="A number of parameters, such as 1.2B.", metavar="COUNT")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Instead of --params: a catalog name (gpt2), a folder or a config.json.", metavar="MODEL"),
    ] = None,
    model_size: Annotated[
        str | None, typer.Option(help="Instead of --params: the model known by a size such as 4B.", metavar="SIZE")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(help="The column to look at: float32, float16, bfloat16, int8 or int4. [default: bfloat16]"),
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(help="Tokens per sequence. [default: 2048, or the model's limit]", metavar="TOKENS")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per micro-batch, and per card.")] = 1,
    lora_rank: Annotated[int, typer.Option(help="Of LoRA and QLoRA.", metavar="RANK")] = DEFAULT_LORA_RANK,
    gpus: Annotated[int, typer.Option(help="Cards to spread training over: DDP, ZeRO stages and FSDP.")] = 1,
    gpu: Annotated[
        str | None, typer.Option(help="Judge by this card instead of the whole catalog.", metavar="NAME")
    ] = None,
    gpu_vram: Annotated[
        str | None, typer.Option(help="Instead of --gpu: a capacity, in GiB or as 24GB.", metavar="GIB")
    ] = None,
    exact: Annotated[
        bool, typer.Option("--exact", help="Run the same on the virtual GPU as well, and show both, term by term.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Show formulas, constants with their sources, and assumptions.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the answer as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Say at once what a model takes: weights, inference, LoRA, full training, in every dtype.

    A closed form, tested against the virtual GPU: each figure has the band that it was off by.
    """
    from memprof.catalog import custom_gpu, find_gpu, list_gpus
    from memprof.estimate.geometry import from_model, from_params, from_size
    from memprof.estimate.table import build_estimate
    from memprof.report.documents.estimate import text, to_json
    from memprof.units import parse_gib

    if sum(given is not None for given in (params, model, model_size)) != 1:
        raise UsageError(
            "give one of --params, --model and --model-size",
            hint="for instance: memprof estimate --params 1.2B --dtype float16",
        )
    if params is not None:
        subject = from_params(params)
    else:
        subject = from_model(model) if model is not None else from_size(str(model_size))
    answer = build_estimate(
        subject,
        dtype=dtype,
        context_length=context_length,
        batch_size=batch_size,
        lora_rank=lora_rank,
        gpus=gpus,
    )
    if gpu is not None and gpu_vram is not None:
        raise UsageError("give --gpu or --gpu-vram, not both", value=f"--gpu {gpu} --gpu-vram {gpu_vram}")
    if gpu is None and gpu_vram is None:
        looked_at = list_gpus()
    else:
        looked_at = (find_gpu(gpu) if gpu is not None else custom_gpu(parse_gib(str(gpu_vram))),)
    simulated = _simulate(answer) if exact else None
    if as_json:
        typer.echo(json.dumps(to_json(answer, looked_at, simulated, explain=explain), indent=1))
        return
    for line in text(answer, looked_at, simulated, explain=explain):
        typer.echo(line)


def _simulate(answer):  # type: ignore[no-untyped-def]
    """Every method in the dtype of the question, on the virtual GPU."""
    import gc

    from memprof.cli.progress import Progress
    from memprof.estimate.methods import METHODS, Plan
    from memprof.flows.estimate import simulate

    gc.disable()
    found = {}
    with Progress() as progress:
        for method in METHODS:
            if method.kind != "weights" and method.applies(answer.dtype):
                plan = Plan(method, answer.dtype, answer.lora_rank)
                found[method.key] = simulate(
                    answer.subject,
                    plan,
                    answer.batch_size,
                    answer.context_length,
                    lambda doing, method=method: progress(f"{method.key}: {doing}"),  # type: ignore[misc]
                )
    return found
