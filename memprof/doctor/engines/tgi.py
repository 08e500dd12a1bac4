"""Text Generation Inference: errors of its warm-up, and torch's errors in its shards.

Messages: server/text_generation_server/models/flash_causal_lm.py and backends/v3/src/lib.rs of the last release, and
flash_causal_lm.py of 0.9 (with both --max-batch options). Options: launcher/src/main.rs.
"""

from __future__ import annotations

from collections.abc import Iterator

from memprof.doctor.diagnosis import Advice, Cause, EngineFigures
from memprof.doctor.engines.engine import (
    LIST_PROCESSES,
    Engine,
    EngineError,
    Stage,
    find_integer,
    round_fraction_down,
)
from memprof.doctor.signature import make_signature
from memprof.units import format_bytes

_FEW_TOKENS = 1024  # Activations of so few tokens are small beside weights: the default is 4,096 or more (main.rs).


def read_figures(message: str, log: str) -> EngineFigures:
    """Return the figures in `message`, completed by the size of the KV cache that TGI printed in `log` before."""
    total_tokens = find_integer(r"max_total_tokens=(\d+)", message) or find_integer(
        r"handle (\d+) total tokens", message
    )
    num_blocks, block_tokens = (
        find_integer(pattern, log) for pattern in (r"KV-cache blocks: (\d+)", r"KV-cache blocks: \d+, size: (\d+)")
    )
    return EngineFigures(
        length=total_tokens,
        fitting_length=num_blocks * block_tokens if num_blocks and block_tokens else None,
        batch=find_integer(r"(?:handle|with) (\d+) prefill tokens", message),
    )


def list_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice with TGI's options, what helps most first."""
    figures = error.figures
    if error.cause is Cause.KV_CACHE and figures.length is not None:
        yield from _list_length_advice(error, figures.length)
        yield from _list_weights_advice(error)
    elif error.stage is Stage.LOAD or (figures.batch is not None and figures.batch <= _FEW_TOKENS):
        yield from _list_weights_advice(error)
        yield LIST_PROCESSES
    else:
        if error.stage is Stage.SERVE:
            yield from _list_fraction_advice(error)
        yield from _list_batch_advice(error)
        yield from _list_weights_advice(error)


def _list_length_advice(error: EngineError, length: int) -> Iterator[Advice]:
    """Yield advice if the KV cache holds fewer tokens than one sequence, or one batch, of `length` has."""
    fitting_length = error.figures.fitting_length
    if fitting_length is not None and fitting_length < length:
        what = "the tokens that the cache holds, by TGI's own account"
        yield Advice(what, _make_command(error, f"--max-total-tokens {fitting_length}"))
    else:
        what = "half of the tokens of a sequence, or of a batch of them"
        option = "--max-batch-total-tokens" if error.figures.batch is not None else "--max-total-tokens"
        yield Advice(what, _make_command(error, f"{option} {length // 2}"))
    what = "a KV cache of one byte a value (costs: less precise keys and values)"
    yield Advice(what, _make_command(error, "--kv-cache-dtype fp8_e5m2"))


def _list_batch_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice to compute fewer prompt tokens together."""
    option = r"max[_-]batch[_-]prefill[_-]tokens[`'\"]?[ =:]+(?:to )?(?:Some\()?(\d+)"
    batch = error.figures.batch or find_integer(option, error.log)
    if batch is not None and batch > 1:
        yield Advice(
            f"the warm-up computes {batch:,} prompt tokens together: half of them (an input must be no longer)",
            _make_command(error, f"--max-batch-prefill-tokens {batch // 2}"),
        )


def _list_weights_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice that makes the weights of one GPU smaller."""
    num_shards = find_integer(r"num[_-]shard['\"]?[ =:]+(?:Some\()?(\d+)", error.log) or 1
    if not error.is_quantized:
        what = "weights of one byte a parameter, if they have two now"
        yield Advice(what, _make_command(error, "--quantize eetq"))
    spread = "each of two GPUs has half of the weights and of the cache"
    if num_shards > 1:
        spread = f"spread the model over {2 * num_shards} GPUs instead of {num_shards}"
    yield Advice(spread, _make_command(error, f"--num-shard {2 * num_shards}"))


def _list_fraction_advice(error: EngineError) -> Iterator[Advice]:
    """Yield advice to leave memory beside the KV cache, if a request runs out of it."""
    shortfall, total = error.shortfall, error.sizes.total
    if shortfall and total is not None:
        target = round_fraction_down(1 - shortfall / total.num_bytes)
        yield Advice(
            f"leave {format_bytes(shortfall)} of the GPU beside the KV cache, which otherwise takes all",
            _make_command(error, f"--cuda-memory-fraction {target}"),
        )


def _make_command(error: EngineError, options: str) -> str:
    return f"text-generation-launcher --model-id {error.model} {options}"


TGI = Engine(
    name="TGI",
    list_advice=list_advice,
    read_figures=read_figures,
    paths=r"[/\\]text_generation_server[/\\]",
    log_marks=r"text[-_]generation[-_](?:launcher|router|server)",
    functions={
        Stage.LOAD: ("get_model", "get_model_with_lora_adapters", "serve_inner"),
        Stage.WARM_UP: ("warmup", "Warmup"),
        Stage.SERVE: ("Prefill", "Decode", "prefill", "decode"),
    },
    signatures=(
        make_signature(
            "tgi-prefill", "Not enough memory to handle",
            r"Not enough memory to handle \d+ prefill tokens", source="TGI", cause=Cause.ENGINE_BATCH, priority=0,
        ),
        make_signature(
            "tgi-total", "Not enough memory to handle",
            r"Not enough memory to handle (?:\d+ total tokens|`max_total_tokens=\d+`)", source="TGI",
            cause=Cause.KV_CACHE, priority=0,
        ),
    ),
)  # fmt: skip
