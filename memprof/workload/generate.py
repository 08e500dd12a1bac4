"""Generation: a prompt, then one token after another with the model's own KV cache or state.

Decode steps differ only in the length of the cache, and memory grows with that length. So only the first and the last
steps are run, and the cache is extended by the length of the steps in between. A state (Mamba's, RWKV's) has a fixed
size.
"""

from __future__ import annotations

import inspect
from typing import Any

from torch import nn

from memprof.errors import UsageError
from memprof.trace.events import Owner, PhaseKind, Role
from memprof.workload.device import Device

EDGE_STEPS = 3  # decode steps run before and after skipped steps
_STATES = ("cache_params", "state")
# Names of caches and states in models' outputs and arguments; transformers' `generate` uses the same names.
_CACHES = ("past_key_values", *_STATES)


def generate(
    device: Device, model: Any, base: nn.Module, batch: dict[str, Any], new_tokens: int, at: tuple[int, int]
) -> None:
    """Run a prompt and `new_tokens` greedy tokens, as `model.generate` calls the model.

    `base` is the model itself, `model` the same or an adapter's wrapper; `at` is (step, micro-batch), from 1. Raises
    UsageError if the model has no KV cache to decode with.
    """
    arguments: dict[str, Any] = {"use_cache": True}
    parameters = inspect.signature(base.forward).parameters
    if "use_cache" not in parameters:
        raise UsageError("--new-tokens needs a model that decodes", value=type(base).__name__)
    if "logits_to_keep" in parameters:
        # generate() requests only the last position's logits.
        arguments["logits_to_keep"] = 1
    name = next((name for name in _CACHES if name in parameters), _CACHES[0])
    with device.phase(PhaseKind.FORWARD, *at):
        outputs = model(**batch, **arguments)
        token = outputs.logits[:, -1:].argmax(-1)
        cache = getattr(outputs, name, None)
        del outputs
    if cache is None:
        raise UsageError("--new-tokens needs a model with a KV cache", value=type(base).__name__)
    with device.phase(PhaseKind.DECODE, *at):
        # The prompt's forward has produced the first token.
        done, since_jump = 1, 0
        while done < new_tokens:
            outputs = model(input_ids=token, **{name: cache}, **arguments)
            token = outputs.logits[:, -1:].argmax(-1)
            cache = getattr(outputs, name)
            del outputs
            done, since_jump = done + 1, since_jump + 1
            jump = _count_similar_steps(cache, new_tokens - done)
            if since_jump < 2 * EDGE_STEPS or jump <= 0:
                continue
            if name in _STATES:
                device.assume("Decode steps that are alike were not all run: what the model keeps has one size.")
            elif _extend_cache(device, cache, jump):
                device.assume("Decode steps that differ in the length of the KV cache alone were not all run.")
            else:
                continue
            done, since_jump = done + jump, 0


def _count_similar_steps(cache: Any, remaining: int) -> int:
    """Return the number of steps from here that differ only in the cache's length: up to the last steps, or a full
    window."""
    layers = getattr(cache, "layers", None) or ()
    until_full = [
        layer.sliding_window - layer.cumulative_length
        for layer in layers
        if getattr(layer, "sliding_window", None) is not None and hasattr(layer, "cumulative_length")
    ]
    return min([remaining, *(steps for steps in until_full if steps > -EDGE_STEPS)]) - EDGE_STEPS


def _extend_cache(device: Device, cache: Any, length: int) -> bool:
    """Extend `cache` by `length` tokens; return False for a kind of cache with unknown growth."""
    layers = getattr(cache, "layers", None)
    if not layers or any(type(layer).__name__ not in ("DynamicLayer", "DynamicSlidingWindowLayer") for layer in layers):
        return False
    for index, layer in enumerate(layers):
        window = getattr(layer, "sliding_window", None)
        if window is not None:
            layer.cumulative_length += length
        for name in ("keys", "values"):
            old = getattr(layer, name)
            batch, heads, now, size = old.shape
            longer = now + length
            # A full window is a view of a tensor with one more token, the step's own.
            new = old.new_empty(batch, heads, longer if window is None else min(longer, window), size)
            device.set_owner(new, Owner(Role.KV_CACHE, f"layer {index} {name}"))
            setattr(layer, name, new if window is None else new[:, :, -window + 1 :])
            del old, new
    return True
