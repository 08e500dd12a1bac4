"""Proposes scaled_dot_product_attention where a model computes its attention scores itself."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.findings.attention_scores import PRODUCTS, find_call_that_returns_scores, find_score_storages
from memprof.findings.evidence import file_and_line, param_names
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize
from memprof.trace.events import NONE, Storage, Trace

_PROJECTIONS = ("in_proj_weight", "q_proj_weight")  # of nn.MultiheadAttention: one weight for all, or one for each


@proposes(20, fix="sdpa-attention", cures=("attention-scores",))
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change for scores that are products of queries and keys, and not those of SDPA's own math path."""
    trace = context.ledger.trace
    scores = [index for index, label in find_score_storages(context).items() if label == "scores"]
    ops = {trace.op(trace.storages[index]) for index in scores}
    if not ops & PRODUCTS or "aten._safe_softmax" in ops:
        return
    changed = resize(trace, dict.fromkeys(scores, 0))
    line = trace.source_line(trace.storages[scores[0]])
    if all(_is_of_torch_module(trace, trace.storages[index]) for index in scores):
        how = (
            f"pass need_weights=False to nn.MultiheadAttention at {file_and_line(line)}, if the weights that it returns"
        )
        yield Proposal(changed, f"{how} are not used: it then calls scaled_dot_product_attention", source=line)
    elif (call := find_call_that_returns_scores(context)) is not None:
        is_of_library = line is not None and "/transformers/" in line.replace("\\", "/")
        setting = "attentions (output_attentions=False)" if is_of_library else "attention weights"
        source = trace.source_at(call.source)
        how = f"return no {setting} at {file_and_line(source)}, and use scaled_dot_product_attention"
        yield Proposal(changed, f"{how}; a hook can keep the weights of one layer", source=source)
    elif line is not None and "/transformers/" not in line.replace("\\", "/"):
        # The fix switches models of transformers alone.
        yield Proposal(
            changed, f"use scaled_dot_product_attention instead of the scores at {file_and_line(line)}", source=line
        )
    else:
        yield Proposal(changed)


def _is_of_torch_module(trace: Trace, storage: Storage) -> bool:
    """Return whether torch's own nn.MultiheadAttention made `storage`; its parameters tell it from others."""
    if storage.module == NONE or trace.modules[storage.module].class_name != "MultiheadAttention":
        return False
    path, names = trace.modules[storage.module].path, set(param_names(trace).values())
    return any(f"{path}.{name}".lstrip(".") in names for name in _PROJECTIONS)
