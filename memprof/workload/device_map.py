"""A model's layers over several cards of one process, as transformers' `device_map="auto"` has it: by accelerate."""

from __future__ import annotations

from typing import Any

from memprof.errors import UsageError
from memprof.workload import quantization


def over_cards(model: Any) -> None:
    """Put `model`, which is in host memory, on the cards, as many layers on each as balances them.

    Raises:
        UsageError: accelerate is not installed, or the cards do not hold all layers.
    """
    quantization.require("accelerate")
    import accelerate
    from accelerate.utils import get_balanced_memory

    whole = sorted(getattr(model, "_no_split_modules", None) or [])
    memory = get_balanced_memory(model, no_split_module_classes=whole)
    found = accelerate.infer_auto_device_map(model, max_memory=memory, no_split_module_classes=whole)
    beside = sorted(name for name, device in found.items() if device in ("cpu", "disk"))
    if beside:
        raise UsageError(
            "the cards do not hold all layers: the rest would be in host memory",
            value=f"{len(beside)} of {len(found)} parts, {beside[0]} among them",
            hint="more cards, or larger ones",
        )
    accelerate.dispatch_model(model, found)
