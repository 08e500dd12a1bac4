"""What a search keeps of a run is what the report says, however it was told."""

import dataclasses

import pytest

from memprof.flows.cards import device_facts, virtual_card
from memprof.flows.profile import capture_trace
from memprof.flows.recommend.outcome import HOST_MEMORY, from_report, outcome_of
from memprof.spec import TargetSpec

MIB = 1 << 20


def both(trace, spec, **asked):
    """In short, and as the report says it, of the same requests on the card of `spec`."""
    device = dataclasses.replace(device_facts(virtual_card(spec)), host_memory_bytes=spec.host_memory_bytes)
    trace = dataclasses.replace(trace, facts=dataclasses.replace(trace.facts, device=device))
    short = outcome_of(trace, spec, 1, gpu=virtual_card(spec), **asked)
    return dataclasses.replace(short, step=None), from_report(trace, spec, None, device.usable_bytes)


@pytest.fixture(scope="module")
def made():
    spec = TargetSpec(model="pythia-70m", context_length=256, gpu_vram_bytes=8 << 30)
    return spec, capture_trace(spec)


def test_in_short_it_is_the_same(made):
    spec, trace = made
    kinds, fits = set(), True
    vram = both(trace, spec)[1].needed_bytes + MIB
    while fits:  # down to where it does not
        vram -= MIB
        one = spec.edit(gpu_vram_bytes=vram)
        short, report = both(trace, one)
        assert short == report
        assert both(trace, one, says_where=False)[0] == dataclasses.replace(report, dies_in="")
        fits = report.fits
        kinds.add((fits, report.spec.alloc_conf))
    assert kinds == {(True, None), (True, "expandable_segments:True"), (False, None)}


def test_the_host_is_judged(made):
    spec, trace = made
    short, report = both(trace, spec.edit(host_memory_bytes=MIB))
    assert short == report and not short.fits and short.dies_in == HOST_MEMORY
