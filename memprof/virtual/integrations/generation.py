"""Text generation in the package transformers, where it depends on scores, which are unknown here.

Beam search ends as soon as no open beam can beat a finished one. With unknown scores it would end after the first
token (values/policy.py); here the search goes on to the maximum length, which takes the most memory. The tokens that
end or pad a sequence are recorded, so that the policy never generates them.
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

_PREPARE_METHOD = "_prepare_special_tokens"
_UNFINISHED_METHOD = "_beam_search_has_unfinished_sequences"
_STOP_PARAMETER = "next_token_hits_stopping_criteria"


class Generation(Extension):
    """Patches of the `generate()` method of transformers."""

    imports = ("transformers.generation.utils",)

    def make_module_patches(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield patches of the methods that compare scores, and that prepare the end and padding tokens."""
        mixin, values = module.GenerationMixin, context.values
        prepare = getattr(mixin, _PREPARE_METHOD, None)
        if prepare is not None:

            @functools.wraps(prepare)
            def prepare_and_record_tokens(self: Any, generation_config: Any, *args: Any, **kwargs: Any) -> Any:
                for ids in (generation_config.eos_token_id, generation_config.pad_token_id):
                    token_ids = ids if isinstance(ids, (list, tuple)) else [] if ids is None else [int(ids)]
                    values.policy.end_tokens.update(token_ids)
                return prepare(self, generation_config, *args, **kwargs)

            yield mixin, _PREPARE_METHOD, prepare_and_record_tokens
        original = getattr(mixin, _UNFINISHED_METHOD, None)
        if original is None or _STOP_PARAMETER not in inspect.signature(original).parameters:  # releases differ
            return
        signature = inspect.signature(original)

        def get_known_value(tensor: Any) -> Any:
            with torch.DisableTorchFunction(), disable_current_modes():
                return tensor if not isinstance(tensor, torch.Tensor) else values.store.get(tensor.detach())

        def has_unfinished(*args: Any, **kwargs: Any) -> Any:
            result = original(*args, **kwargs)  # runs for its allocations
            if get_known_value(result) is not None:
                return result
            context.assume("Beam search goes on to the longest text that it may make: scores are not known.")
            stop_flags = get_known_value(signature.bind(*args, **kwargs).arguments[_STOP_PARAMETER])
            return stop_flags is None or not bool(stop_flags.all())

        is_static = isinstance(inspect.getattr_static(mixin, _UNFINISHED_METHOD), staticmethod)
        yield mixin, _UNFINISHED_METHOD, staticmethod(has_unfinished) if is_static else has_unfinished
