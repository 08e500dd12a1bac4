"""Proposes expandable segments, which a replay of the allocator with that setting tries."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from memprof.findings.evidence import ends_in_building
from memprof.findings.finding import Context
from memprof.findings.suggestions import Proposal, proposes


@proposes(10, fix="expandable-segments")
def propose(context: Context) -> Iterator[Proposal]:
    """Yield the change for a run of the caching allocator without expandable segments, unless a model was still being
    built: more tensors than the refused one are to come."""
    run = context.ledger.run
    if ends_in_building(context.ledger.trace):
        return
    if run.rounds and run.has_expandable_segments and not run.config.expandable_segments:
        config = dataclasses.replace(run.config, expandable_segments=True)
        yield Proposal(run.trace, config=config)
