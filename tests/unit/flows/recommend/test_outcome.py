"""What a search keeps of a run: where it fits, with which settings, and what it is judged by."""

import dataclasses

import pytest

from memprof.flows.gpus import find_spec_gpu, make_device_facts
from memprof.flows.profile import capture_trace
from memprof.flows.recommend.outcome import HOST_MEMORY, evaluate_run
from memprof.spec import TargetSpec
from memprof.units import MIB


def outcome(trace, spec):
    device = dataclasses.replace(make_device_facts(find_spec_gpu(spec)), host_memory_bytes=spec.host_memory_bytes)
    trace = dataclasses.replace(trace, facts=dataclasses.replace(trace.facts, device=device))
    return evaluate_run(trace, spec, 1, gpu=find_spec_gpu(spec))


@pytest.fixture(scope="module")
def made():
    spec = TargetSpec(model="pythia-70m", context_length=256, gpu_vram_bytes=8 << 30)
    return spec, capture_trace(spec)


def test_segments_are_tried_before_it_does_not_fit(made):
    spec, trace = made
    kinds, fits = set(), True
    vram = outcome(trace, spec).needed_bytes + MIB
    while fits:  # down to where it does not
        vram -= MIB
        found = outcome(trace, spec.edit(gpu_vram_bytes=vram))
        fits = found.fits
        kinds.add((fits, found.spec.alloc_conf))
    assert kinds == {(True, None), (True, "expandable_segments:True"), (False, None)}


def test_the_host_is_judged(made):
    found = outcome(made[1], made[0].edit(host_memory_bytes=MIB))
    assert not found.fits and found.oom_stage == HOST_MEMORY
