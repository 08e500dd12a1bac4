"""`memprof vocab`: the tokens of a corpus, counted as they stream by, and what a smaller vocabulary saves."""

from __future__ import annotations

import gc
import json
import sys
from typing import Annotated

import typer

from memprof.catalog import DEFAULT_GPU
from memprof.cli.card import check_one_card
from memprof.cli.progress import Progress
from memprof.errors import UsageError
from memprof.spec import AMP_DTYPES, DTYPES, OPTIMIZERS, TargetSpec
from memprof.units import parse_gib


def vocab(
    context: typer.Context,
    corpus: Annotated[
        list[str],
        typer.Argument(
            help="Files, folders or patterns: text, .jsonl or .parquet; also compressed (.gz, .bz2, .xz).",
            metavar="CORPUS...",
        ),
    ],
    tokenizer: Annotated[
        str,
        typer.Option(help="whitespace, bytes, a tokenizer.json, or a folder that has one.", metavar="NAME"),
    ] = "whitespace",
    column: Annotated[
        str | None,
        typer.Option(
            help="Of JSON Lines and Parquet; with it text files are JSON Lines too. [default: text]", metavar="NAME"
        ),
    ] = None,
    encoding: Annotated[str, typer.Option(help="Of the text, such as latin-1 or utf-16.")] = "utf-8",
    coverage: Annotated[
        str, typer.Option(help="Percentages of the text that caps are to cover.", metavar="PERCENTAGES")
    ] = "99,99.9",
    cap: Annotated[int | None, typer.Option(help="A cap of this many tokens as well.", metavar="TOKENS")] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Simulate what the caps save in training this model (see memprof profile).", metavar="MODEL"),
    ] = None,
    params: Annotated[
        str | None,
        typer.Option(help="Instead of --model: a size such as 1.2B, by arithmetic alone.", metavar="SIZE"),
    ] = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            help="The vocabulary before. [default: all words; with a tokenizer the model's]", metavar="TOKENS"
        ),
    ] = None,
    context_length: Annotated[
        int | None, typer.Option(help="Tokens per sequence. [default: 2048, or the model's limit]", metavar="TOKENS")
    ] = None,
    batch_size: Annotated[int, typer.Option(help="Sequences per micro-batch.")] = 1,
    dtype: Annotated[
        str | None, typer.Option(help=f"{', '.join(DTYPES)}. [default: the checkpoint's]", metavar="DTYPE")
    ] = None,
    amp: Annotated[
        str | None, typer.Option(help=f"Autocast to {' or '.join(AMP_DTYPES)}, with float32 weights.", metavar="DTYPE")
    ] = None,
    optimizer: Annotated[str, typer.Option(help=", ".join(OPTIMIZERS) + ".")] = "adamw",
    gpu: Annotated[str, typer.Option(help="The virtual card (`memprof gpus` lists them).")] = DEFAULT_GPU,
    gpu_vram: Annotated[
        str | None, typer.Option(help="Instead of --gpu: a capacity, in GiB or as 24GB.", metavar="GIB")
    ] = None,
    top: Annotated[int, typer.Option(help="Most frequent tokens to name.", min=0)] = 10,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Count the tokens of a corpus in bounded memory, and say what a smaller vocabulary would cover and save.

    The coverage of the most frequent tokens, the caps that cover 99% and 99.9%, ids that never occur, and with --model
    a simulated training step before and with each cap. Exit code 3: with --model, if no vocabulary of these fits.
    """
    from memprof.flows import vocabulary as flow

    if model is not None and params is not None:
        raise UsageError("give --model or --params, not both", hint="--model is simulated, --params only reckoned")
    if params is not None and amp is not None:
        raise UsageError("--amp is not in the arithmetic", value=amp, hint="name a model: --model has it simulated")
    check_one_card(context, gpu, gpu_vram)
    shares = flow.parse_shares(coverage)
    # Also where nothing is simulated: it checks the options, before the corpus is read.
    spec = TargetSpec(
        model=model if model is not None else "none",
        context_length=context_length,
        batch_size=batch_size,
        vocab_size=vocab_size,
        dtype=dtype,
        amp=amp,
        optimizer=optimizer,
        gpu=gpu,
        gpu_vram_bytes=None if gpu_vram is None else parse_gib(gpu_vram),
    )
    if model is not None:
        flow.check_model(spec)
    gc.disable()  # as in profile
    with Progress() as progress:
        counted = flow.read_corpus(corpus, tokenizer, encoding=encoding, column=column, show=top, progress=progress)
        caps = flow.caps_of(counted, shares, cap)
        if model is not None:
            savings = flow.simulate(spec, counted, caps, progress)
        else:
            savings = flow.reckon(
                params, counted, caps, vocab_size=vocab_size, context_length=context_length, batch_size=batch_size,
                dtype=dtype, optimizer=optimizer,
            )  # fmt: skip
    document = flow.report(corpus, counted, caps, savings)
    if as_json:
        json.dump(document.to_json(), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        from memprof.report.terminal.vocabulary import print_vocabulary

        print_vocabulary(document)
    tried = [memory.fits for memory in (savings.before, *savings.capped)]
    raise typer.Exit(3 if False in tried and True not in tried else 0)
