"""`memprof vocab`: token counts of a corpus, and the memory that a smaller vocabulary saves."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from memprof.cli.exits import ExitCode
from memprof.cli.options import build_spec, reuse_option
from memprof.cli.output import OutputOptions, print_result
from memprof.cli.progress import show_progress
from memprof.errors import UsageError
from memprof.spec import option

EXAMPLES = """
memprof vocab corpus/
memprof vocab 'data/*.jsonl.gz' --tokenizer tokenizer.json --model gpt2
"""


@dataclass(frozen=True, kw_only=True)
class VocabOptions(OutputOptions):
    """Options of `memprof vocab`: the corpus, the limits of the vocabulary, and the model."""

    tokenizer: str = option(
        "whitespace", "Corpus", "whitespace, bytes, a tokenizer.json, or a folder that has one.", metavar="NAME"
    )
    column: str | None = option(
        None, "Corpus", "Of JSON Lines and Parquet; with it text files are JSON Lines too.", metavar="NAME",
        unset="text",
    )  # fmt: skip
    encoding: str = option("utf-8", "Corpus", "Of the text, such as latin-1 or utf-16.")
    coverage: str = option(
        "99,99.9", "Vocabulary", "Percentages of the text that caps are to cover.", metavar="PERCENTAGES"
    )
    cap: int | None = option(None, "Vocabulary", "A cap of this many tokens as well.", metavar="TOKENS")
    trust_remote_code: bool = reuse_option("trust_remote_code")
    vocab_size: int | None = reuse_option(
        "vocab_size", note="It is the one before.", unset="all words; with a tokenizer the model's"
    )
    model: str | None = reuse_option("model", default=None, note="What the caps save in training it is simulated.")
    params: str | None = reuse_option("params")
    context_length: int | None = reuse_option("context_length")
    batch_size: int = reuse_option("batch_size")
    dtype: str | None = reuse_option("dtype")
    amp: str | None = reuse_option("amp")
    optimizer: str = reuse_option("optimizer")
    gpu: str = reuse_option("gpu")
    gpu_vram_bytes: int | None = reuse_option("gpu_vram_bytes")
    top: int = reuse_option("top")


def vocab(
    request: VocabOptions,
    corpus: Annotated[
        list[str],
        typer.Argument(
            help="Files, folders or patterns: text, .jsonl or .parquet; also compressed (.gz, .bz2, .xz).",
            metavar="CORPUS...",
        ),
    ],
) -> None:
    """Count the tokens of a corpus in bounded memory, and say what a smaller vocabulary would cover and save.

    The coverage of the most frequent tokens, the caps that cover 99% and 99.9%, ids that never occur, and with --model
    a simulated training step before and with each cap. Exit code 3: with --model, if no vocabulary of these fits.
    """
    from memprof.flows.vocabulary import savings as flow
    from memprof.version import __version__

    model, params = request.model, request.params
    if model is not None and params is not None:
        raise UsageError(
            "give --model or --params, not both", hint="--model is simulated, --params only estimated analytically"
        )
    if params is not None and request.amp is not None:
        raise UsageError(
            "--amp is not in the arithmetic", value=request.amp, hint="name a model: --model has it simulated"
        )
    coverages = flow.parse_shares(request.coverage)
    # Also built without a simulation, to check the options before the corpus is read.
    spec = build_spec(request, model=model or "none")
    if model is not None:
        flow.check_model(spec)
    with show_progress(quiet=request.quiet) as progress:
        counts = flow.read_corpus(
            corpus,
            request.tokenizer,
            encoding=request.encoding,
            column=request.column,
            show=request.top,
            progress=progress,
        )
        caps = flow.compute_caps(counts, coverages, request.cap)
        if model is not None:
            savings = flow.simulate(spec, counts, caps, progress)
        else:
            savings = flow.estimate_savings(params, counts, caps, spec)
    document = flow.build_vocabulary(tuple(corpus), counts, caps, savings, __version__)
    print_result(document, request, "vocabulary")
    verdicts = [memory.fits for memory in (savings.before, *savings.capped)]
    raise typer.Exit(ExitCode.DOES_NOT_FIT if False in verdicts and True not in verdicts else ExitCode.DONE)
