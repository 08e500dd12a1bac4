"""A suggested patch as text: its changes, what they change, and what is no part of it."""

from __future__ import annotations

import dataclasses

from memprof.report.documents.patch import PatchedNeed, SuggestedPatch
from memprof.report.terminal.console import to_text
from memprof.report.terminal.patch import render_patch

FULL = PatchedNeed(fits=False, allocated_bytes=3 << 30, reserved_bytes=4 << 30, required_bytes=5 << 30, oom_step=7)
FITS = PatchedNeed(fits=True, allocated_bytes=1 << 30, reserved_bytes=2 << 30, required_bytes=3 << 30, oom_step=None)
PATCH = SuggestedPatch("--- a/x\n", ("x.py:1: `del y` after its last use",), FULL, FITS, ("x.py:2: why",))


def test_a_patch():
    assert to_text(render_patch(PATCH)) == (
        "Suggested patch (not applied)\n"
        "  x.py:1: `del y` after its last use\n"
        "  peak 3.00 GiB -> 1.00 GiB allocated, 4.00 GiB -> 2.00 GiB reserved; runs out of memory in step 7 -> fits\n"
        "  left out: x.py:2: why\n\n"
    )


def test_verdicts():
    steps = {need.oom_step: need for need in (FULL, dataclasses.replace(FULL, oom_step=9))}
    texts = [
        to_text(render_patch(dataclasses.replace(PATCH, before=before, after=after)))
        for before, after in ((steps[7], steps[9]), (FITS, FITS), (dataclasses.replace(FULL, oom_step=None), FITS))
    ]
    assert "; runs out of memory in step 7 -> runs out of memory in step 9\n" in texts[0].replace("\n  of", " of")
    assert "; fits\n" in texts[1]
    assert "; does not fit -> fits\n" in texts[2]
    pages = dataclasses.replace(FITS, pages=True)
    assert "; fits, but pages -> fits\n" in to_text(render_patch(dataclasses.replace(PATCH, before=pages)), width=200)
    places = [dataclasses.replace(FULL, oom_stage=stage) for stage in ("logits", "backward")]
    text = to_text(render_patch(dataclasses.replace(PATCH, before=places[0], after=places[1])), width=200)
    assert "; runs out of memory in logits of step 7 -> runs out of memory in backward of step 7\n" in text


def test_no_patch():
    assert to_text(render_patch(dataclasses.replace(PATCH, after=None))) == "No patch\n  x.py:2: why\n"
    nothing = dataclasses.replace(PATCH, after=None, tried=())
    assert to_text(render_patch(nothing)) == "No patch\n  no finding names one place to change\n"
