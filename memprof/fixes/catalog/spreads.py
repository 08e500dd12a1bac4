"""Fixes that change how a run uses several GPUs, for `--fix` and `--ladder` where `--gpus` is above 1.
These fixes edit the parallel plan (`--parallel`) and do not change the model, so FIXES does not include them."""

from __future__ import annotations

from typing import Final

from memprof.fixes.catalog.fix import WEIGHTS, Fix, Numerics
from memprof.fixes.catalog.table import FIXES
from memprof.spec import TargetSpec

BASE_PLAN: Final = "ddp"  # the plan that these fixes edit: a replica on each GPU, with different sequences
_RANKS_OPTION: Final = {"ranks": "GPUs that share it; as many as can if not given"}
_SEQUENCE_CONFLICT: Final = "GPUs that share a sequence share one way"


def _has_kind(spec: TargetSpec, *kinds: str) -> bool:
    planned_kinds = (part.partition("=")[0].partition(":")[0] for part in (spec.parallel or "").lower().split(","))
    return not {*kinds}.isdisjoint(planned_kinds)


_ENTRIES: Final = (
    Fix(
        name="fsdp", order=1, ladder_order=5, saves=WEIGHTS, numerics=Numerics.EXACT,
        changes="each GPU keeps a shard of parameters, gradients and optimizer state (fully_shard)",
        cost="parameters are gathered in forward and backward, and gradients sent to their shards",
        edit="memprof.fixes.spread_edits:shard_replicas", detect=lambda spec: _has_kind(spec, "fsdp", "hsdp"),
    ),
    Fix(
        name="ulysses", order=2, ladder_order=102, saves=("activations", "logits and loss", "inputs"),
        numerics=Numerics.EXACT, changes="GPUs share each sequence, and in attention its heads",
        cost="queries, keys, values and what attention gives go round between GPUs in each layer",
        options=_RANKS_OPTION, main_option="ranks", conflicts={"ring-attention": _SEQUENCE_CONFLICT},
        edit="memprof.fixes.spread_edits:share_replicas", detect=lambda spec: _has_kind(spec, "ulysses"),
    ),
    Fix(
        name="ring-attention", order=3, ladder_order=103, saves=("activations", "logits and loss", "inputs"),
        numerics=Numerics.EXACT, changes="GPUs share each sequence; keys and values go round (context_parallel)",
        cost="keys and values go round a ring of GPUs in each layer, forward and backward",
        options=_RANKS_OPTION, main_option="ranks", conflicts={"ulysses": _SEQUENCE_CONFLICT},
        edit="memprof.fixes.spread_edits:share_replicas", detect=lambda spec: _has_kind(spec, "cp"),
    ),
    Fix(
        name="tensor-parallel", order=4, ladder_order=105, saves=(*WEIGHTS, "activations", "KV cache"),
        numerics=Numerics.EXACT, changes="GPUs share each matrix, by transformers' plan (parallelize_module)",
        cost="hidden states are summed between GPUs twice in each layer, forward and backward",
        options=_RANKS_OPTION, main_option="ranks", edit="memprof.fixes.spread_edits:share_replicas",
        detect=lambda spec: _has_kind(spec, "tp"),
    ),
)  # fmt: skip

PARALLEL_FIXES: Final = {entry.name: entry for entry in _ENTRIES}
ALL_FIXES: Final = {**PARALLEL_FIXES, **FIXES}  # all fixes that a ladder over several GPUs may try
