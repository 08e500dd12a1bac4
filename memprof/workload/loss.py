"""Loss of a training step: the scalar on which `backward()` is called.

A model of transformers computes its loss inside `forward` if the batch has labels; `compute_loss` returns that loss.
For other models `compute_loss` computes a loss from the outputs. The last pipeline stage outputs logits;
`make_logits_loss` returns the loss function that transformers' `forward` would apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from memprof.errors import UsageError
from memprof.workload.models import ModelSource

INPUTS_HINT = "give the model a method memprof_inputs(batch_size, context_length) that returns forward's arguments"


def compute_loss(
    outputs: Any, batch: dict[str, Any], source: ModelSource, assume: Callable[[str], None]
) -> torch.Tensor:
    """Return the loss in the model's `outputs`, or else a loss computed from them, on which `assume` gets a note.
    Raises UsageError if no output requires a gradient."""
    loss = getattr(outputs, "loss", None)
    if loss is None and isinstance(outputs, dict):
        loss = outputs.get("loss")
    if isinstance(loss, torch.Tensor):
        return loss
    tensors = _collect_tensors(outputs)
    scalar = next((t for t in tensors if t.dim() == 0 and t.requires_grad), None)
    if scalar is not None:
        return scalar
    output = next((t for t in tensors if t.is_floating_point() and t.requires_grad), None)
    if output is None:
        raise UsageError(
            "the model returns nothing that can be trained", value=type(outputs).__name__, hint=INPUTS_HINT
        )
    ids = next((v for v in batch.values() if isinstance(v, torch.Tensor) and v.dtype == torch.int64), None)
    has_targets = source.task != "other"
    if has_targets and ids is not None and output.dim() == ids.dim() + 1 and output.shape[:-1] == ids.shape:
        assume("Loss: cross_entropy over the output's last dimension (the model returns no loss).")
        return nn.functional.cross_entropy(output.flatten(0, -2), ids.flatten())
    assume("Loss: the mean of the output (the model returns no loss).")
    return output.mean()


def make_logits_loss(model: Any) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Return the function of (logits, labels) by which a transformers language model computes its loss in `forward`."""

    def loss(logits: torch.Tensor, labels: torch.Tensor) -> Any:
        return model.loss_function(logits=logits, labels=labels, vocab_size=model.config.vocab_size)

    return loss


def _collect_tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _collect_tensors(item)]
    return []
