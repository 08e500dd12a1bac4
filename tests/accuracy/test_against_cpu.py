"""Ground truth without a GPU: the virtual GPU allocates and frees what a real training step on the CPU does.

Two steps run on the virtual GPU, and really on the CPU with no mode active: the same bytes come in the same order, and
each free releases the same block. Eager attention, no dropout and float32 make the CPU run the operators that CUDA
runs. What its kernels take beside their outputs and CUDA's do not is named in cpu_temporaries.py, operator by operator;
nothing else is left out. Of the memory that no tensor shows, copies that both devices' kernels make are compared too.
"""

from __future__ import annotations

import importlib.metadata
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.accuracy.cpu_events import Change, Program
from tests.accuracy.cpu_models import LLAMA, MODELS, QWEN3, Batch, Builder, tokens
from tests.accuracy.cpu_temporaries import Comparison, compared
from tests.lanes import by_day

ROOT = Path(__file__).resolve().parents[2]
Training = Callable[[nn.Module, Batch], Callable[[], None]]  # Prepares a model and returns what is to be recorded.


def program(build: Builder, batch: Callable[[], Batch], training: Training) -> Program:
    def make(device: str) -> Callable[[], None]:
        with torch.device(device):
            model = build().train()
        return training(model, {name: value.to(device) for name, value in batch().items()})

    return make


def adamw(parameters: Iterable[nn.Parameter], **settings: Any) -> torch.optim.Optimizer:
    """As CUDA chooses it (torch.optim, _default_to_fused_or_foreach); on the CPU it would be one tensor at a time."""
    return torch.optim.AdamW(parameters, lr=1e-3, **{"foreach": True, **settings})


# -- ways to train -----------------------------------------------------------------------------------------------------


def plain(
    model: nn.Module,
    batch: Batch,
    *,
    micro_batches: int = 1,
    set_to_none: bool = True,
    clip: bool = False,
    evaluate: bool = False,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = adamw,
) -> Callable[[], None]:
    """Two steps: the first makes the optimizer's state, the second is like all that follow."""
    chosen = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])

    def steps() -> None:
        for _ in range(2):
            for _ in range(micro_batches):
                output = model(**batch)
                loss = output["loss"] if micro_batches == 1 else output["loss"] / micro_batches
                loss.backward()
                del output, loss
            if clip:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            chosen.step()
            chosen.zero_grad(set_to_none=set_to_none)
            if evaluate:
                model.eval()
                with torch.no_grad():
                    model(**batch)
                model.train()

    return steps


def accumulated(model: nn.Module, batch: Batch) -> Callable[[], None]:
    return plain(model, batch, micro_batches=2)


def gradients_kept(model: nn.Module, batch: Batch) -> Callable[[], None]:
    return plain(model, batch, set_to_none=False)


def clipped(model: nn.Module, batch: Batch) -> Callable[[], None]:
    return plain(model, batch, clip=True)


def evaluated(model: nn.Module, batch: Batch) -> Callable[[], None]:
    return plain(model, batch, evaluate=True)


def partly_frozen(model: nn.Module, batch: Batch) -> Callable[[], None]:
    """Embedding and first layer frozen: the backward ends at the second."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed" not in name and "layers.0." not in name)
    return plain(model, batch)


def bottom_trained(model: nn.Module, batch: Batch) -> Callable[[], None]:
    """Only the first layer's attention is trained: the backward runs through frozen weights."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.0.self_attn" in name)
    return plain(model, batch)


def checkpointed(model: Any, batch: Batch) -> Callable[[], None]:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return plain(model, batch)


def checkpointed_reentrant(model: Any, batch: Batch) -> Callable[[], None]:
    model.gradient_checkpointing_enable({"use_reentrant": True})
    return plain(model, batch)


def adamw_one_by_one(model: nn.Module, batch: Batch) -> Callable[[], None]:
    return plain(model, batch, optimizer=lambda parameters: adamw(parameters, foreach=False))


def adamw_amsgrad(model: nn.Module, batch: Batch) -> Callable[[], None]:
    return plain(model, batch, optimizer=lambda parameters: adamw(parameters, amsgrad=True))


def sgd(model: nn.Module, batch: Batch) -> Callable[[], None]:
    return plain(
        model, batch, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=1e-3, momentum=0.9, foreach=True)
    )


WAYS: dict[str, tuple[Builder, Training]] = {
    "gradient accumulation": (LLAMA, accumulated),
    "zero_grad(set_to_none=False)": (LLAMA, gradients_kept),
    "clip_grad_norm_": (LLAMA, clipped),
    "evaluation between steps": (LLAMA, evaluated),
    "bottom frozen": (LLAMA, partly_frozen),
    "all but one attention frozen": (LLAMA, bottom_trained),
    "tied weights, accumulated": (QWEN3, accumulated),
    "checkpointing": (LLAMA, checkpointed),
    "checkpointing, reentrant": (LLAMA, checkpointed_reentrant),
    "AdamW, one tensor at a time": (LLAMA, adamw_one_by_one),
    "AdamW, AMSGrad": (LLAMA, adamw_amsgrad),
    "SGD with momentum": (LLAMA, sgd),
}


# -- the comparison ----------------------------------------------------------------------------------------------------


def compare_model(name: str) -> Comparison:
    model = MODELS[name]
    return compared(program(model.build, model.batch, plain))


def compare_way(name: str) -> Comparison:
    build, training = WAYS[name]
    return compared(program(build, tokens, training))


@pytest.mark.parametrize("name", by_day(MODELS, *[*MODELS][::6]))
def test_families(name: str) -> None:
    comparison = compare_model(name)
    check(comparison)
    check_documented(row(name, MODELS[name].family, comparison))


@pytest.mark.parametrize("name", by_day(WAYS, *[*WAYS][::6]))
def test_ways_to_train(name: str) -> None:
    comparison = compare_way(name)
    check(comparison)
    check_documented(row(*way_of(name), comparison))


def way_of(name: str) -> tuple[str, str]:
    """The model that is trained this way, and the way."""
    return next(model for model in MODELS if MODELS[model].build is WAYS[name][0]), name


def row(model: str, what: str, comparison: Comparison) -> str:
    """One row of the table in docs/accuracy-tables.md, which docs/cpu_table.py writes."""
    frees = sum(change.free for change in comparison.virtual)
    left_out = [f"{count} `{op.removeprefix('aten::')}`" for op, count in sorted(comparison.left_out.items())]
    equal = "yes" if [c[:3] for c in comparison.virtual] == [c[:3] for c in comparison.cpu] else "no"
    cells = (model, what, f"{len(comparison.virtual) - frees:,}", f"{frees:,}", equal, ", ".join(left_out) or "none")
    return f"| {' | '.join(cells)} |"


def check_documented(wanted: str) -> None:
    """The page is of the pinned releases; with others, models run other operators."""
    pinned = dict(line.split("==") for line in _lines("constraints.txt") if "==" in line and not line.startswith("#"))
    if all(importlib.metadata.version(name).split("+")[0] == pinned[name] for name in ("torch", "transformers")):
        assert wanted in _lines("docs/accuracy-tables.md"), f"not in the page (python docs/cpu_table.py): {wanted}"


def _lines(name: str) -> list[str]:
    return (ROOT / name).read_text(encoding="utf-8").splitlines()


def check(comparison: Comparison) -> None:
    ours, theirs = comparison.virtual, comparison.cpu
    assert sum(not change.free for change in ours) > 50, "nothing ran"
    for position, (first, second) in enumerate(zip(ours, theirs, strict=False)):
        assert first[:3] == second[:3], f"change {position}: {_told(first)} here, {_told(second)} on the CPU"
    assert len(ours) == len(theirs)


def _told(change: Change) -> str:
    calls = "/".join(call.name for call in change.calls) or change.op
    return f"{'free' if change.free else 'allocation'} of block {change.block}, {change.num_bytes} bytes, in {calls}"


# -- the comparison itself ---------------------------------------------------------------------------------------------


def _changed(comparison: Comparison, edit: Callable[[list[Change]], None]) -> Comparison:
    cpu = list(comparison.cpu)
    edit(cpu)
    return comparison._replace(cpu=cpu)


def test_a_difference_is_seen() -> None:
    comparison = compare_model("perceptron")
    check(comparison)
    edits: list[Callable[[list[Change]], None]] = [
        lambda cpu: cpu.pop(),
        lambda cpu: cpu.insert(7, cpu[7]._replace(num_bytes=cpu[7].num_bytes + 4)),
        lambda cpu: cpu.__setitem__(9, cpu[9]._replace(num_bytes=1 << 20)),
        lambda cpu: cpu.__setitem__(slice(20, 22), cpu[21:19:-1]),
    ]
    for edit in edits:
        with pytest.raises(AssertionError):
            check(_changed(comparison, edit))


def test_what_is_left_out_is_named() -> None:
    left_out: Counter[str] = compare_model("convolutions").left_out
    assert left_out["aten::_convolution"] and left_out["aten::native_batch_norm"]
    assert not compare_model("llama").left_out
