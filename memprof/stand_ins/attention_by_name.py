"""Packages that a program chooses by an argument of a library: attention of transformers, by its name."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

from memprof.patching.patch_set import Patch

_ATTENTION = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""`attn_implementation`, or `config._attn_implementation` -> the package of its kernels."""
_ASK_WHEN_IMPORTED = ("gpt_neo", "bark", "gptj", "falcon")
"""Models that import transformers' `_flash_attention_forward` only if, when they are imported, a package is there."""


def patches(module: Any, choose: Callable[[str], None]) -> Iterator[Patch]:
    """Replace what chooses attention in `module`, transformers.modeling_utils; `choose` is told the package."""
    method = "_check_and_adjust_attn_implementation"
    original = getattr(module.PreTrainedModel, method, None)
    if original is None:
        return

    @functools.wraps(original)
    def check(model: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        name = attn_implementation.removeprefix("paged|") if isinstance(attn_implementation, str) else None
        if name in _ATTENTION:
            choose(_ATTENTION[name])
            _late_imports()
        return original(model, attn_implementation, *args, **kwargs)

    yield module.PreTrainedModel, method, check


def _late_imports() -> None:
    utilities = sys.modules.get("transformers.modeling_flash_attention_utils")
    for name in _ASK_WHEN_IMPORTED:
        module = sys.modules.get(f"transformers.models.{name}.modeling_{name}")
        if module is not None and not hasattr(module, "_flash_attention_forward"):
            module._flash_attention_forward = utilities._flash_attention_forward  # type: ignore[attr-defined, union-attr]
