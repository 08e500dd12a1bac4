"""Proposes scaled_dot_product_attention where a model computes its attention scores itself."""

from __future__ import annotations

from collections.abc import Iterator

from memprof.findings.attention_scores import PRODUCTS, find_score_storages
from memprof.findings.evidence import file_and_line
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes
from memprof.ledger.what_if import resize


@proposes(20, fix="sdpa-attention", findings=("attention-scores",))
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change for scores that are products of queries and keys, and not those of SDPA's own math path."""
    trace = context.ledger.trace
    scores = [index for index, label in find_score_storages(context).items() if label == "scores"]
    ops = {trace.op(trace.storages[index]) for index in scores}
    if not ops & PRODUCTS or "aten._safe_softmax" in ops:
        return
    changed = resize(trace, dict.fromkeys(scores, 0))
    line = trace.source_line(trace.storages[scores[0]])
    if line is not None and "/transformers/" not in line.replace("\\", "/"):  # the fix switches models of transformers
        yield Proposal(changed, f"scaled_dot_product_attention instead of the scores of {file_and_line(line)}")
    else:
        yield Proposal(changed)
