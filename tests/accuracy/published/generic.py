"""Rows of sources that have no run of their own here: what the row's own columns say, run by the flow.

A row can be predicted if it names a model of the catalog (or `file.py:factory`), a sequence length, a batch size and a
metric that is allocated, active, reserved or NVML's. Everything else has a default or a column: see `spec_of`.
"""

from __future__ import annotations

import re

from memprof.device.catalog import find_gpu
from memprof.device.context import CONTEXT_BYTES
from memprof.errors import MemprofError
from memprof.flows import profile as flow
from memprof.spec import Mode, TargetSpec
from tests.accuracy.published.prediction import FORMAT, GPUS, RANKS, Prediction, not_predicted
from tests.accuracy.published.rows import Row
from tests.unit.allocator.replaying import replay_trace

_DTYPES = {"bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16", "float16": "float16", "fp32": "float32"}
_DTYPES["float32"] = "float32"
_OPTIMIZERS = {"": "adamw", "adamw": "adamw", "adam": "adam", "sgd": "sgd", "adafactor": "adafactor", "none": "none"}
_OPTIMIZERS |= {"adamw_8bit": "adamw-8bit", "adamw_bnb_8bit": "adamw-8bit", "paged_adamw_8bit": "paged-adamw-8bit"}
_METRICS = (("reserved", "reserved"), ("nvml", "device"), ("nvidia-smi", "device"), ("alloc", "allocated"))
_METRICS = (*_METRICS, ("active", "allocated"))


_STORED = {
    "gptq.*8": "gptq-int8", "gptq.*4": "gptq-int4", "awq": "awq-int4", "mxfp4": "mxfp4", "fp8|float8": "fp8",
}  # fmt: skip


class UnclearError(Exception):
    """The row does not say enough, or says what is not simulated; the text says which."""


def any_row(row: Row) -> Prediction:
    """The prediction by the row's columns."""
    try:
        metric = _metric(row)
        trace, _ = flow.profile(spec_of(row))
    except UnclearError as unclear:
        return not_predicted(str(unclear))
    except MemprofError as error:
        return not_predicted(f"{error.problem}: {error.value}" if error.value else error.problem)
    timeline = replay_trace(trace)
    if metric == "allocated":
        return Prediction(max(timeline.allocated))
    return Prediction(max(timeline.reserved) + (CONTEXT_BYTES if metric == "device" else 0))


def spec_of(row: Row) -> TargetSpec:
    """What a row describes; UnclearError says which column is missing, unknown, or names what is not simulated."""
    method = row.method.lower()
    quantize = _quantization(row)
    if row.parallel and not re.match(r"(1 gpu|1 node x 1|none)$", row.parallel.lower()):
        raise UnclearError(RANKS)
    if row.compile.lower() in ("on", "yes", "true"):
        raise UnclearError("torch.compile: what compiled code allocates is not simulated")
    inference = row.task.lower().startswith("infer")
    prompt, new_tokens = _lengths(row)
    return TargetSpec(
        model=row.model,
        context_length=prompt,
        batch_size=_count(row.batch, "batch"),
        dtype="bfloat16" if quantize else _one_of(_DTYPES, row.weights.lower(), "weights"),
        quantize=quantize,
        optimizer="none" if inference else _one_of(_OPTIMIZERS, row.optimizer.lower(), "optimizer"),
        adapter="lora" if method.startswith(("lora", "qlora")) else None,
        mode=Mode.INFERENCE if inference else Mode.TRAIN,
        new_tokens=new_tokens if inference else None,
        activation_checkpointing=row.ckpt.lower() in ("on", "yes", "true"),
        steps=1 if inference else 2,
        gpu=gpu(row.gpu),
    )


def gpu(name: str) -> str:
    """The catalog's key of a GPU; UnclearError if it has none."""
    try:
        return find_gpu(GPUS.get(name, name)).key
    except MemprofError:
        raise UnclearError(f"the GPU {name!r} is not in the catalog") from None


def _quantization(row: Row) -> str | None:
    """The format of the frozen weights; None: they are not quantized."""
    said = f"{row.method} {row.weights}".lower()
    stored = next((name for pattern, name in _STORED.items() if re.search(pattern, said)), None)
    if stored is not None:
        return stored
    other = re.search(r"gptq|int4|gguf|hqq", said)
    if other:
        raise UnclearError(FORMAT.format(other[0]))
    if re.search(r"nf4|fp4", said):
        return "fp4" if "fp4" in said else "nf4"
    if re.search(r"int8|8-?bit", said):
        return "int8"
    return "nf4" if re.search(r"qlora|4-?bit", said) else None


def _metric(row: Row) -> str:
    for word, metric in _METRICS:
        if word in row.metric.lower():
            return metric
    raise UnclearError(f"the metric {row.metric!r} is none of allocated, active, reserved and NVML's")


def _lengths(row: Row) -> tuple[int, int | None]:
    numbers = re.fullmatch(r"(?:prompt )?(\d+)(?: \+ (\d+))?", row.seq)
    if numbers is None:
        raise UnclearError(f"the sequence length {row.seq!r} is no number")
    return int(numbers[1]), int(numbers[2]) if numbers[2] else None


def _count(text: str, column: str) -> int:
    if not text.isdecimal():
        raise UnclearError(f"the {column} {text!r} is no number")
    return int(text)


def _one_of(known: dict[str, str], text: str, column: str) -> str | None:
    if not text and "" not in known:
        return None
    if text not in known:
        raise UnclearError(f"{column} {text!r} is not simulated; known are {', '.join(name for name in known if name)}")
    return known[text]
