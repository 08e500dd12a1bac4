"""Text generation of transformers where it depends on scores, which are unknown here.

Beam search ends as soon as no open beam can beat a finished one. With unknown scores the answer would be no
(values/policy.py), after the first token; here the search goes on to the maximum length, which takes the most memory.
The tokens that end or pad a text are noted, so that the policy chooses none of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch

from memprof.patching import Extension, Patch
from memprof.torch_private.dispatch import disable_current_modes
from memprof.virtual.install_context import InstallContext

_PREPARES = "_prepare_special_tokens"
_NAME = "_beam_search_has_unfinished_sequences"
_STOPPED = "next_token_hits_stopping_criteria"


class Generation(Extension):
    """The `generate()` method of transformers."""

    imports = ("transformers.generation.utils",)

    def make_module_patches(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of the methods that compare scores, and that prepare the end and padding tokens."""
        mixin, values = module.GenerationMixin, context.values
        prepare = getattr(mixin, _PREPARES, None)
        if prepare is not None:

            @functools.wraps(prepare)
            def prepare_and_note_ends(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
                for ends in (generation_config.eos_token_id, generation_config.pad_token_id):
                    several = ends if isinstance(ends, (list, tuple)) else [] if ends is None else [int(ends)]
                    values.policy.end_tokens.update(several)
                return prepare(self, generation_config, *args, **kwargs)

            yield mixin, _PREPARES, prepare_and_note_ends
        original = getattr(mixin, _NAME, None)
        if original is None or _STOPPED not in inspect.signature(original).parameters:  # releases differ
            return
        signature = inspect.signature(original)

        def known_value(tensor: Any) -> Any:
            with torch.DisableTorchFunction(), disable_current_modes():
                return tensor if not isinstance(tensor, torch.Tensor) else values.store.get(tensor.detach())

        def has_unfinished(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)  # runs for its allocations
            if known_value(result) is not None:
                return result
            context.assume("Beam search goes on to the longest text that it may make: scores are not known.")
            stopped = known_value(signature.bind(*args, **kwargs).arguments[_STOPPED])
            return stopped is None or not bool(stopped.all())

        static = isinstance(inspect.getattr_static(mixin, _NAME), staticmethod)
        yield mixin, _NAME, staticmethod(has_unfinished) if static else has_unfinished
