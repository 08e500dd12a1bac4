"""The losses: as the report had it, as it mended it, and memprof's fix; run on a virtual GPU and for real."""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from specs import BEFORE, CHUNK, SMALL, SMALL_CHUNK, SMALL_TOKENS
from torch import nn
from torch.nn.functional import cross_entropy
from torch.profiler import ProfilerActivity, profile
from transformers import AutoConfig, AutoModelForCausalLM

import memprof
from memprof.api import ProfiledGpu
from memprof.workload.catalog import find_model

Loss = Callable[[nn.Module, torch.Tensor], torch.Tensor]
"""From a model and token ids to the loss."""


def full(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The report's loss before: all logits, shifted by one token."""
    logits = model(input_ids=ids).logits
    shifted = logits[..., :-1, :].contiguous()
    return cross_entropy(shifted.view(-1, shifted.shape[-1]), ids[..., 1:].reshape(-1))


def loop(model: nn.Module, ids: torch.Tensor, chunk: int = CHUNK) -> torch.Tensor:
    """The report's loss after: a loop over chunks of tokens."""
    hidden = model.model(input_ids=ids).last_hidden_state[:, :-1]
    total = torch.zeros((), device=ids.device)
    for start in range(0, hidden.shape[1], chunk):
        logits = model.lm_head(hidden[:, start : start + chunk])
        labels = ids[:, start + 1 : start + 1 + logits.shape[1]]
        total = total + cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (hidden.shape[0] * hidden.shape[1])


def own(model: nn.Module, ids: torch.Tensor) -> torch.Tensor:
    """The model's own loss: what the fix chunked-loss computes in chunks, in the backward again."""
    return model(input_ids=ids, labels=ids).loss


# -- on the virtual GPU -----------------------------------------------------------------------------------------------


def build(dtype: torch.dtype, **changes: object) -> nn.Module:
    """The model of `BEFORE`, with some of its sizes changed, ready for training."""
    settings = find_model(BEFORE.model).load_config() | changes
    settings.pop("layer_types", None)  # of as many layers as the catalog's model has
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(settings.pop("model_type"), **settings), dtype=dtype)
    model.config.use_cache = False
    return model.train()


def on_gpu(loss: Loss, tokens: int, *, steps: int = 0, layers: int | None = None, **fix: object) -> ProfiledGpu:
    """Forward and backward on the report's GPU, which is virtual; its report and trace say what happened.

    Args:
        loss: which one.
        tokens: of the one sequence.
        steps: with AdamW, so many steps; 0: one forward and backward without an optimizer.
        layers: of the model, if not all.
        fix: options of chunked-loss, which is switched on if there are any.
    """
    with memprof.virtual_gpu(BEFORE.gpu, alloc_conf=BEFORE.alloc_conf) as gpu:
        with torch.device("cuda"):
            model = build(torch.bfloat16, **({} if layers is None else {"num_hidden_layers": layers}))
            ids = torch.zeros(1, tokens, dtype=torch.int64)
        memprof.apply(model, ["activation-checkpointing", *(["chunked-loss"] if fix else [])], **fix)
        optimizer = torch.optim.AdamW(model.parameters()) if steps else None
        for _ in range(max(steps, 1)):
            loss(model, ids).backward()
            if optimizer is not None:
                optimizer.step()
                optimizer.zero_grad()
    return gpu


# -- for real ----------------------------------------------------------------------------------------------------------


class Measured(NamedTuple):
    """One loss, really run on this CPU with a small model in float32, forward and backward."""

    num_bytes: int
    """The most that it allocates at one moment, gradients among it."""
    simulated_bytes: int
    """The same on a virtual GPU, without cuBLAS's workspaces, which a CPU has not."""
    seconds: float
    deviation: float
    """The largest of loss and gradients from those of the full logits in float64, relative to the largest of each."""


def measured() -> dict[str, Measured]:
    """Full logits, the report's loop and the fix, by name."""
    torch.manual_seed(0)
    reference = build(torch.float64, **SMALL)
    ids = torch.randint(0, SMALL["vocab_size"], (1, SMALL_TOKENS))
    chunked = partial(loop, chunk=SMALL_CHUNK)
    wanted = _numbers(reference, full, ids)
    found = {}
    for name, loss in (("full logits", full), ("loop of the report", chunked), ("chunked-loss", own)):

        def small(dtype: torch.dtype = torch.float32, fix: bool = name == "chunked-loss") -> nn.Module:
            model = copy.deepcopy(reference).to(dtype)
            if fix:
                memprof.apply(model, "chunked-loss", chunk_size=SMALL_CHUNK)
            return model

        model = small()
        begin = time.perf_counter()
        numbers = _numbers(model, loss, ids)
        seconds = time.perf_counter() - begin
        deviation = max(
            float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(numbers, wanted, strict=True)
        )
        model.zero_grad()
        with _quiet(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            loss(model, ids).backward()
        found[name] = Measured(_most(recorded), _simulated(small, loss), seconds, deviation)
    return found


def _numbers(model: nn.Module, loss: Loss, ids: torch.Tensor) -> list[torch.Tensor]:
    result = loss(model, ids)
    result.backward()
    return [result.detach(), *(p.grad.clone() for p in model.parameters())]


def _most(recorded: profile) -> int:
    now = most = 0
    for event in recorded.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def _simulated(small: Callable[[], nn.Module], loss: Loss) -> int:
    with memprof.virtual_gpu(BEFORE.gpu, alloc_conf=BEFORE.alloc_conf) as gpu:
        model = small().to("cuda")
        ids = torch.zeros(1, SMALL_TOKENS, dtype=torch.int64, device="cuda")
        before = gpu.allocated_bytes
        loss(model, ids).backward()
    peak = gpu.report().peak
    return peak.allocated_bytes - before - peak.categories["library workspace"]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The profiler's library writes a line on stderr when it starts and stops, whatever its log level."""
    kept = os.dup(2)
    with open(os.devnull, "wb") as nothing:
        os.dup2(nothing.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
