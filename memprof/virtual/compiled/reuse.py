"""What Inductor made of a graph serves the next run too, where the graph is the same: for as long as a search lasts.

A ladder runs one model again and again, and its layers are the graphs of the run before. Torch has a key for what
Inductor makes of a graph, and writes it down by that (FxGraphCache, torch/_inductor/codecache.py): the graph, what it
is given, every setting that there is. Here that lies in a folder of the search alone, under a longer key: with the
card, and with where each node comes from, for so does each buffer. The code is loaded anew in each run, and holds on
to its card.
"""

from __future__ import annotations

import contextlib
import hashlib
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

import torch

from memprof.virtual.compiled.origins import Origins, origins_of

_ORIGINS = "_memprof_origins"
_folder: str | None = None


@contextlib.contextmanager
def shared() -> Iterator[None]:
    """Inside, also in processes that are forked there, code is kept from one run to the next."""
    global _folder
    if _folder is not None:
        yield
        return
    with tempfile.TemporaryDirectory(prefix="memprof-graphs-", ignore_cleanup_errors=True) as folder:
        _folder = folder
        try:
            yield
        finally:
            _folder = None


def folder() -> str | None:
    """Where it is kept; None where nothing is."""
    return _folder


def settings() -> dict[str, Any]:
    """Settings of Inductor while it compiles."""
    return {"fx_graph_cache": _folder is not None and _replaced() is not None}


def _replaced() -> tuple[Any, ...] | None:
    """What is replaced of torch's cache; None in a release that has it not."""
    from torch._inductor import codecache, output_code

    cache = getattr(codecache, "FxGraphCache", None)
    if not (hasattr(cache, "_get_tmp_dir") and hasattr(getattr(codecache, "CacheBase", None), "get_system")):
        return None
    try:
        load = output_code.CompiledFxGraph.after_deserialization
        return codecache.compiled_fx_graph_hash, codecache.FxGraphCache._save_graph, load
    except AttributeError:
        return None


def patches(card: str, origins: Origins, took: Callable[[float], None]) -> Iterator[tuple[Any, str, Any]]:
    """The patches (owner, name, replacement) of torch's cache; none where nothing is kept.

    Args:
        card: all that Inductor may ask of it.
        origins: of buffers in generated files.
        took: told how many seconds it took when it was compiled.
    """
    replaced = None if _folder is None else _replaced()
    if replaced is None:
        return
    from torch._inductor import codecache, output_code

    where, cache, compiled = _folder, codecache.FxGraphCache, output_code.CompiledFxGraph
    hash_of, save, load = replaced

    def longer_hash(graph: Any, *args: Any, **kwargs: Any) -> tuple[str, list[str]]:
        key, lines = hash_of(graph, *args, **kwargs)
        return key + hashlib.sha256(repr((card, origins_of(graph))).encode()).hexdigest(), lines

    def save_graph(key: str, graph: Any, *args: Any, **kwargs: Any) -> None:
        setattr(graph, _ORIGINS, origins.of_code(graph.cache_key))
        save(key, graph, *args, **kwargs)

    def after_deserialization(graph: Any, *args: Any, **kwargs: Any) -> str:
        file: str = load(graph, *args, **kwargs)
        origins.know(file, getattr(graph, _ORIGINS))
        took((graph._time_taken_ns or 0) / 1e9)
        return file

    yield codecache, "compiled_fx_graph_hash", longer_hash
    yield codecache.CacheBase, "get_system", staticmethod(lambda: {"hash": card})
    # Of all of torch's files, which takes 0.2 seconds: here one torch writes and reads.
    yield codecache, "torch_key", lambda: torch.__version__.encode()
    yield cache, "_get_tmp_dir", staticmethod(lambda: where)
    yield cache, "_save_graph", staticmethod(save_graph)
    yield compiled, "after_deserialization", after_deserialization
