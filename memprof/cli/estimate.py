"""`memprof estimate`: what a model takes, in closed form and at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from memprof.cli.options import OUTPUT, again
from memprof.cli.output import Explained, print_json
from memprof.cli.progress import long_work
from memprof.cli.streams import say
from memprof.errors import UsageError
from memprof.spec import DEFAULT_LORA_RANK, OPTIMIZERS, option

if TYPE_CHECKING:
    from memprof.estimate.table import Estimate, Simulated


CLOSED_FORM_OPTIMIZERS = tuple(name for name in OPTIMIZERS if name != "adafactor")


@dataclass(frozen=True, kw_only=True)
class Request(Explained):
    """What is asked: a model by one of three descriptions, how it is used, and the cards to judge by."""

    params: str | None = option(None, "Model", "A number of parameters, such as 1.2B.", metavar="COUNT")
    model: str | None = again(
        "model", default=None, help="Instead of --params: a catalog name (gpt2), a folder or a config.json."
    )
    model_size: str | None = option(
        None, "Model", "Instead of --params: the model known by a size such as 4B.", metavar="SIZE"
    )
    dtype: str | None = option(
        None, "Precision", "The column to look at: float32, float16, bfloat16, int8, int4; or, for inference, a stored "
        "checkpoint's fp8, gptq-int8, gptq-int4 or awq-int4.", unset="bfloat16",
    )  # fmt: skip
    context_length: int | None = again("context_length")
    batch_size: int = again("batch_size", help="Sequences per micro-batch, and per card.")
    lengths: str | None = again("lengths")
    empties_cache: bool = option(
        False, "Memory", "With --lengths: torch.cuda.empty_cache() is called in the loop, or segments are expandable."
    )
    new_tokens: int | None = again("new_tokens", unset="1: the prompt alone")
    lora_rank: int = again("lora_rank", default=DEFAULT_LORA_RANK, help="Of LoRA and QLoRA.")
    lora_targets: str | None = again("lora_targets")
    optimizer: str = again("optimizer", help="{choices}.", choices=CLOSED_FORM_OPTIMIZERS)
    optimizer_impl: str | None = again("optimizer_impl", choices=("foreach", "fused"))
    gpu: str | None = again("gpu", default=None, help="Judge by this card alone.", unset="the whole catalog")
    gpu_vram_bytes: int | None = again("gpu_vram_bytes")
    gpus: int = option(1, "Card", "Cards to spread training over: DDP, ZeRO stages and FSDP.", is_count=True)
    exact: bool = option(False, OUTPUT, "Run the same on the virtual GPU as well, and show both, term by term.")


def estimate(request: Request) -> None:
    """Say at once what a model takes: weights, inference, LoRA, full training, in every dtype.

    A closed form; each figure has the band that published ones were off by.
    """
    from memprof.catalog import custom_gpu, find_gpu, list_gpus
    from memprof.estimate.geometry import from_model, from_params, from_size
    from memprof.estimate.table import build_estimate
    from memprof.report.documents.estimate import estimate_document
    from memprof.report.terminal.estimate import render_text

    if sum(given is not None for given in (request.params, request.model, request.model_size)) != 1:
        raise UsageError(
            "give one of --params, --model and --model-size",
            hint="for instance: memprof estimate --params 1.2B --dtype float16",
        )
    if request.params is not None:
        subject = from_params(request.params)
    else:
        subject = from_model(request.model) if request.model is not None else from_size(str(request.model_size))
    answer = build_estimate(
        subject,
        dtype=request.dtype,
        context_length=request.context_length,
        batch_size=request.batch_size,
        lora_rank=request.lora_rank,
        lora_targets=request.lora_targets,
        optimizer=request.optimizer,
        fused=request.optimizer_impl == "fused",
        new_tokens=request.new_tokens,
        lengths=request.lengths,
        empties_cache=request.empties_cache,
        gpus=request.gpus,
    )
    cards = list_gpus() if request.gpu is None else (find_gpu(request.gpu),)
    if request.gpu_vram_bytes is not None:
        cards = (custom_gpu(request.gpu_vram_bytes),)
    simulated = _simulate(answer) if request.exact else None
    if request.as_json:
        print_json(estimate_document(answer, cards, simulated, explain=request.explain).to_json())
        return
    say(render_text(answer, cards, simulated, explain=request.explain), nl=False)


def _simulate(answer: Estimate) -> dict[str, Simulated]:
    """Every method in the dtype of the question, on the virtual GPU."""
    from memprof.flows.estimate import simulate

    found = {}
    with long_work() as progress:
        for plan in answer.plans():
            key = plan.method.key

            def say(doing: str, key: str = key) -> None:
                progress(f"{key}: {doing}")

            found[key] = simulate(
                answer.subject, plan, answer.batch_size, answer.context_length, say, lengths=answer.lengths
            )
    return found
