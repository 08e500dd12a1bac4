"""What AOTAutograd made of a graph serves the next run too, where the graph is the same: reuse.py has it of Inductor.

Before Inductor is asked, AOTAutograd traces forward and backward of what Dynamo has found, and parts them. Torch has a
key for that as well (AOTAutogradCache, torch/_functorch/_aot_autograd/autograd_cache.py): the graph, what it is given,
the settings that there are. Here it is longer: with the card, with where each node comes from, and with what C++
chooses by that the key has not. What was said of the run while it traced is said again.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from memprof.virtual.compiled import reuse
from memprof.virtual.compiled.origins import origins_of
from memprof.virtual.compiled.saved import Kept

_SAID = "_memprof_said"
_SECONDS = "_memprof_seconds"
_CHOICES = (
    "_get_flash_sdp_enabled", "_get_mem_efficient_sdp_enabled", "_get_math_sdp_enabled", "_get_cudnn_sdp_enabled",
    "_get_overrideable_sdp_enabled", "_get_sdp_priority_order", "_get_math_sdp_allow_fp16_bf16_reduction",
    "_get_cudnn_enabled", "_get_cudnn_benchmark", "_get_cudnn_deterministic",
)  # fmt: skip
"""Settings of the program by which functions above all operators choose, in a graph as well (kernels/)."""


class Traced:
    """What AOTAutograd makes in one run.

    Args:
        assume: told what the run rests on.
        keeps_more: told of each graph that keeps more than eager code would.
        took: told how many seconds compiling took.
    """

    def __init__(
        self,
        assume: Callable[[str], None],
        keeps_more: Callable[[list[Kept], int], None],
        took: Callable[[float], None],
    ) -> None:
        self._tell: dict[str, Callable[..., None]] = {"assume": assume, "keeps_more": keeps_more}
        self._took = took
        self._said: list[tuple[str, tuple[Any, ...]]] = []
        self._loaded_seconds = 0.0

    def assume(self, sentence: str) -> None:
        """The run rests on this."""
        self._say("assume", sentence)

    def keeps_more(self, kept: list[Kept], more_bytes: int) -> None:
        """As `Telling.keeps_more`."""
        self._say("keeps_more", kept, more_bytes)

    def loaded(self, seconds: float) -> None:
        """Code of another run, which took Inductor so long, was loaded."""
        self._loaded_seconds += seconds
        self._took(seconds)

    def _say(self, what: str, *values: Any) -> None:
        self._said.append((what, values))
        self._tell[what](*values)

    def patches(self, card: str) -> Iterator[tuple[Any, str, Any]]:
        """The patches (owner, name, replacement) of torch's cache; none where nothing is kept.

        Args:
            card: all that may be asked of it.
        """
        replaced = None if reuse.folder() is None else _replaced()
        if replaced is None:
            return
        from torch._functorch._aot_autograd import autograd_cache

        folder, cache = reuse.folder(), autograd_cache.AOTAutogradCache
        key_of, make, result, wrap = replaced

        def longer_key(module: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[str, list[str]]:
            self._said, self._loaded_seconds, self._began = [], 0.0, time.perf_counter()
            if any(map(is_traceable_wrapper_subclass, inputs)):
                raise autograd_cache.BypassAOTAutogradCache("a tensor of others, whose key may leave something out")
            key, lines = key_of(module, inputs, *args, **kwargs)
            chosen = [getattr(torch._C, name)() for name in _CHOICES if hasattr(torch._C, name)]
            beside = card, torch.get_default_dtype(), chosen, origins_of(getattr(module, "gm", module))
            return key + hashlib.sha256(repr(beside).encode()).hexdigest(), lines

        def make_entry(*args: Any, **kwargs: Any) -> Any:
            entry = make(*args, **kwargs)
            by_inductor = sum(getattr(code, "_time_taken_ns", 0) or 0 for code in args) / 1e9 - self._loaded_seconds
            setattr(entry, _SAID, self._said)
            setattr(entry, _SECONDS, max(0.0, time.perf_counter() - self._began - by_inductor))
            return entry

        def save(key: str, entry: Any, *args: Any, **kwargs: Any) -> None:
            # As torch does, which warns where something cannot be written down.
            with contextlib.suppress(Exception), torch.utils._python_dispatch._disable_current_modes():
                entry.pre_save()
                cache._write_to_local_cache(key, pickle.dumps(entry))

        def wrap_post_compile(entry: Any, *args: Any, **kwargs: Any) -> Any:
            function = wrap(entry, *args, **kwargs)
            for what, values in getattr(entry, _SAID):
                self._say(what, *values)
            self._took(getattr(entry, _SECONDS))
            return function

        yield autograd_cache, "autograd_cache_key", longer_key
        yield cache, "_get_tmp_dir", staticmethod(lambda: f"{folder}/traced")
        yield cache, "make_entry", staticmethod(make_entry)
        yield cache, "save", staticmethod(save)
        yield result, "wrap_post_compile", wrap_post_compile


def _replaced() -> tuple[Any, ...] | None:
    """What is replaced of torch's cache; None in a release that has it not."""
    try:
        from torch._functorch._aot_autograd import aot_autograd_result, autograd_cache

        cache, result = autograd_cache.AOTAutogradCache, aot_autograd_result.GenericAOTAutogradResult
        cache.save, cache._get_tmp_dir, cache._write_to_local_cache  # noqa: B018, whether they are there
        return autograd_cache.autograd_cache_key, cache.make_entry, result, result.wrap_post_compile
    except (ImportError, AttributeError):
        return None


@contextlib.contextmanager
def used() -> Iterator[None]:
    """Inside, results are kept for the next run, and taken from the one before.

    Not around what makes something of Inductor's results that is not written down with them.
    """
    import torch._functorch.config as functorch

    if reuse.folder() is None or not reuse.settings()["fx_graph_cache"] or _replaced() is None:
        yield
        return
    with functorch.patch(enable_autograd_cache=True):
        yield
