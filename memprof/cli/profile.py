"""`memprof profile`: run one real training step on a virtual GPU and say where the memory goes."""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from memprof.catalog import DEFAULT_GPU
from memprof.cli.card import check_one_card
from memprof.cli.progress import Progress
from memprof.errors import RunFailedError, UsageError
from memprof.spec import (
    ADAPTERS,
    AMP_DTYPES,
    ATTENTIONS,
    DEFAULT_LORA_RANK,
    DTYPES,
    NPT_COMBINES,
    NPT_INITS,
    NPT_MODES,
    OPTIMIZER_IMPLS,
    OPTIMIZERS,
    QUANTIZATIONS,
    SDPA_BACKENDS,
    ZERO_GRADS,
    Mode,
    TargetSpec,
)
from memprof.trace.files import check_place
from memprof.units import parse_gib


def profile(
    context: typer.Context,
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
    context_length: Annotated[
        int | None, typer.Option(help="Tokens per sequence. [default: 2048, or the model's limit]", metavar="TOKENS")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per micro-batch.")] = 1,
    vocab_size: Annotated[int | None, typer.Option(help="Replace the model's vocabulary.")] = None,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)}. [default: the checkpoint's]", metavar="DTYPE")
    ] = None,
    amp: Annotated[
        str | None, typer.Option(help=f"Autocast to {' or '.join(AMP_DTYPES)}, with float32 weights.", metavar="DTYPE")
    ] = None,
    quantize: Annotated[
        str | None,
        typer.Option(help=f"Quantize the linear layers with bitsandbytes: {', '.join(QUANTIZATIONS)}.", metavar="NAME"),
    ] = None,
    no_double_quant: Annotated[
        bool, typer.Option("--no-double-quant", help="With 4-bit weights: leave their scales in float32.")
    ] = False,
    optimizer: Annotated[str, typer.Option(help=", ".join(OPTIMIZERS) + ".")] = "adamw",
    zero_grad: Annotated[
        str,
        typer.Option(help=f"What zero_grad leaves of the gradients: {' or '.join(ZERO_GRADS)} (set_to_none=False)."),
    ] = "none",
    adapter: Annotated[
        str | None,
        typer.Option(help=f"Train an adapter of PEFT on the frozen model: {', '.join(ADAPTERS)}.", metavar="NAME"),
    ] = None,
    lora_rank: Annotated[
        int | None, typer.Option(help=f"With --adapter lora. [default: {DEFAULT_LORA_RANK}]", metavar="RANK")
    ] = None,
    lora_targets: Annotated[
        str | None,
        typer.Option(
            help="Modules to adapt, such as q_proj,v_proj, or all-linear. [default: PEFT's for the architecture]",
            metavar="NAMES",
        ),
    ] = None,
    lora_dropout: Annotated[float, typer.Option(help="With --adapter lora.")] = 0.0,
    npt: Annotated[
        str | None,
        typer.Option(
            help=f"Train NPT components, a weight delta for each token, on the frozen model: {', '.join(NPT_MODES)}.",
            metavar="MODE",
        ),
    ] = None,
    npt_rank: Annotated[int | None, typer.Option(help="With --npt. [default: 16]", metavar="RANK")] = None,
    npt_layers: Annotated[
        str | None, typer.Option(help="Layers with a component, such as 0,4-7 or -1. [default: all]", metavar="LAYERS")
    ] = None,
    npt_num_ranks: Annotated[
        int | None, typer.Option(help="Make each delta a sum of this many rank-1 updates.", metavar="COUNT")
    ] = None,
    npt_combine: Annotated[
        str | None,
        typer.Option(help=f"How they are summed: {', '.join(NPT_COMBINES)}. [default: merged]", metavar="NAME"),
    ] = None,
    npt_chunk: Annotated[
        int | None, typer.Option(help="With --npt chunked: tokens at a time. [default: 16]", metavar="TOKENS")
    ] = None,
    npt_init: Annotated[
        str | None,
        typer.Option(
            help=f"{' or '.join(NPT_INITS)}. [default: orthogonal; fast with --npt-num-ranks]", metavar="NAME"
        ),
    ] = None,
    freeze: Annotated[
        str | None,
        typer.Option(help="Parameters not to train, such as 'model.embed*,*.bias'.", metavar="PATTERNS"),
    ] = None,
    evaluate: Annotated[
        bool, typer.Option("--evaluate", help="A forward without gradients after each optimizer step.")
    ] = False,
    mode: Annotated[Mode, typer.Option(help="Train, or run the forward alone.")] = Mode.TRAIN,
    new_tokens: Annotated[
        int | None, typer.Option(help="In inference: generate this many tokens after the prompt.", metavar="TOKENS")
    ] = None,
    attention: Annotated[
        str | None, typer.Option(help=f"{', '.join(ATTENTIONS)}. [default: the model's]", metavar="NAME")
    ] = None,
    sdpa_backend: Annotated[
        str | None,
        typer.Option(
            help=f"Force an attention kernel: {', '.join(SDPA_BACKENDS)}. [default: CUDA's choice]", metavar="NAME"
        ),
    ] = None,
    optimizer_impl: Annotated[
        str | None, typer.Option(help=f"{', '.join(OPTIMIZER_IMPLS)}. [default: torch's choice]", metavar="NAME")
    ] = None,
    no_workspaces: Annotated[
        bool, typer.Option("--no-workspaces", help="Count tensors alone, not what kernels and libraries take beside.")
    ] = False,
    activation_checkpointing: Annotated[
        bool, typer.Option("--activation-checkpointing", help="Recompute each layer's activations in the backward.")
    ] = False,
    gradient_accumulation: Annotated[int, typer.Option(help="Micro-batches per optimizer step.")] = 1,
    dataset_batches: Annotated[
        int | None,
        typer.Option(
            help="Hold so many batches in host memory, made before training. [default: none, they are streamed]",
            metavar="COUNT",
        ),
    ] = None,
    steps: Annotated[int, typer.Option(help="Optimizer steps to run.")] = 2,
    alloc_conf: Annotated[
        str | None,
        typer.Option(
            help="The caching allocator's, such as expandable_segments:True. [default: the environment's]",
            metavar="SETTINGS",
        ),
    ] = None,
    fix: Annotated[
        str | None,
        typer.Option(
            help="Run with these remedies, such as chunked-loss,activation-checkpointing or chunked-loss=2048; auto: "
            "the cheapest set that fits. [docs/remedies.md lists them]",
            metavar="NAMES",
        ),
    ] = None,
    ladder: Annotated[
        bool, typer.Option("--ladder", help="Remedies one after another: what each saves, costs, and what is next.")
    ] = False,
    device: Annotated[
        str,
        typer.Option(
            help="virtual: simulate; cuda or cpu: measure there; auto: cuda if there is one and the run fits it, "
            "else virtual.",
        ),
    ] = "auto",
    detail: Annotated[
        bool, typer.Option("--detail", help="Measured: the line of every allocation as well, which makes steps longer.")
    ] = False,
    gpu: Annotated[str, typer.Option(help="The virtual card (`memprof gpus` lists them).")] = DEFAULT_GPU,
    gpu_vram: Annotated[
        str | None, typer.Option(help="Instead of --gpu: a capacity, in GiB or as 24GB.", metavar="GIB")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    save: Annotated[
        Path | None, typer.Option(help="Keep the capture in a file, for `memprof show`.", metavar="FILE")
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="List what was assumed.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Run one real training step on a virtual GPU and say, stage by stage, where the memory goes.

    The model's own code, autograd and the optimizer run for real, on tensors without data. Exit code 0: it fits;
    3: it does not.
    """
    if (model is None) == (model_size is None):
        raise UsageError(
            "give --model or --model-size" if model is None else "give --model or --model-size, not both",
            hint="for instance: memprof profile --model-size 4B --context-length 4096",
        )
    check_one_card(context, gpu, gpu_vram)
    if ladder and is_search(fix):
        raise UsageError(
            "give --fix auto or --ladder, not both", value=f"--fix {fix}", hint="--fix auto shows a ladder of its own"
        )
    spec = TargetSpec(
        model=model if model is not None else str(model_size),
        model_is_size=model is None,
        context_length=context_length,
        batch_size=batch_size,
        vocab_size=vocab_size,
        dtype=dtype,
        amp=amp,
        quantize=quantize,
        double_quant=not no_double_quant,
        optimizer=optimizer,
        zero_grad=zero_grad,
        adapter=adapter,
        lora_rank=lora_rank,
        lora_targets=lora_targets,
        lora_dropout=lora_dropout,
        npt=npt,
        npt_rank=npt_rank,
        npt_layers=npt_layers,
        npt_num_ranks=npt_num_ranks,
        npt_combine=npt_combine,
        npt_chunk=npt_chunk,
        npt_init=npt_init,
        freeze=freeze,
        evaluate=evaluate,
        mode=mode,
        new_tokens=new_tokens,
        attention=attention,
        sdpa_backend=sdpa_backend,
        optimizer_impl=optimizer_impl,
        workspaces=not no_workspaces,
        activation_checkpointing=activation_checkpointing,
        gradient_accumulation=gradient_accumulation,
        dataset_batches=dataset_batches,
        steps=steps,
        alloc_conf=alloc_conf,
        device="virtual" if device == "auto" else device,
        detail=detail,
        gpu=gpu,
        gpu_vram_bytes=None if gpu_vram is None else parse_gib(gpu_vram),
    )
    if save is not None:
        check_place(save, option="--save")
    # A card that was named is to be simulated.
    resolves = device == "auto" and gpu_vram is None and gpu == DEFAULT_GPU
    # Importing torch and transformers makes millions of objects that live for good; looking for garbage among them
    # costs a fifth of the time that the whole command takes.
    gc.disable()
    failed: RunFailedError | None = None
    with Progress() as progress:
        try:
            trace, document = _run(spec, fix, ladder, resolves, progress)
        except RunFailedError as error:
            if error.document is None:
                raise
            failed, trace, document = error, error.trace, error.document
    # The report first: it must not be lost when the file cannot be written.
    print_document(document, as_json=as_json, explain=explain)
    if save is not None:
        from memprof.trace.io import save_trace

        save_trace(trace, save)
        typer.echo(f"Saved: memprof show {save}", err=True)
    if failed is not None:
        raise failed
    raise typer.Exit(exit_code(document))


def _run(spec: TargetSpec, fix: str | None, ladder: bool, resolves: bool, progress: Progress):  # type: ignore[no-untyped-def]
    """The trace and the report that the options ask for."""
    from memprof.flows import profile as pipeline

    if resolves:
        spec = pipeline.resolve_device(spec, progress)
    if fix is None and not ladder:
        return pipeline.profile(spec, progress)
    from memprof.flows.ladder import climb as ladders
    from memprof.flows.ladder import search as ladder_search
    from memprof.remedies.fixes import parse_fixes

    if fix is None:
        return ladders.climb(ladders.SpecRuns(spec, progress))
    if is_search(fix):
        return ladder_search.search(ladders.SpecRuns(spec, progress))
    return ladders.apply_fixes(spec, parse_fixes(fix), progress, each=ladder)


def is_search(fix: str | None) -> bool:
    """Whether `--fix` asks for a search, not for remedies by name."""
    return fix is not None and fix.strip() == "auto"


def print_document(document, *, as_json: bool, explain: bool) -> None:  # type: ignore[no-untyped-def]
    """The report on stdout, as JSON or for people."""
    if as_json:
        json.dump(document.to_json(), sys.stdout, indent=1)
        sys.stdout.write("\n")
        return
    from memprof.report.terminal.report import print_report

    print_report(document, explain=explain)


def exit_code(document) -> int:  # type: ignore[no-untyped-def]
    """1: the run did not come to its end, or a real one dies of an error; 3: it does not fit; 0: none of these."""
    if document.failure is not None:
        return 1
    if not document.verdict.fits:
        return 3
    return 1 if any(finding.severity.value == "error" for finding in document.findings) else 0
