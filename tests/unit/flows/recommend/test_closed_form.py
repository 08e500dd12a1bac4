"""What the closed form says of a plan leads a search to the runs that decide."""

from __future__ import annotations

import pytest

from memprof.device.catalog import find_gpu
from memprof.flows.profile import profile
from memprof.flows.recommend.closed_form import estimate_bytes, estimate_limit
from memprof.flows.recommend.largest_models import _build_spec, _estimate_start, list_candidate_models, list_tasks
from memprof.flows.recommend.plans import Goal, Plan, make_base_spec
from memprof.flows.recommend.simulator import Simulator
from memprof.spec import TargetSpec

SPEC = TargetSpec(model="pythia-70m", context_length=512)


@pytest.mark.parametrize(
    ("available", "high", "expected"),
    [
        (6000, 9000, 4096),
        (6120, 9000, 5120),  # to the byte
        (6119, 9000, 4096),
        (3500, 9000, 3072),  # the first beyond what fits is to be looked at, also if it should not fit
        (10_000, 9000, 9000),
        (9999, 9000, 8192),
        (3000, 2500, 2500),
    ],
)
def test_where_to_look(available, high, expected):
    assert estimate_limit(lambda number: 1000 + number, available, 2048, high, 1024) == expected


def test_what_it_does_not_know_is_left_to_the_search():
    assert estimate_limit(lambda number: None, 1, 1, 2, 1) is None
    assert estimate_bytes(Plan(Goal.FULL, "amp", "bfloat16", "adamw"), SPEC.edit(model="vit-base")) is None


@pytest.mark.parametrize(
    "plan",
    [
        Plan(Goal.INFER, "half", "bfloat16"),
        Plan(Goal.LORA, "half", "bfloat16", "adamw").minimize_memory(),
        Plan(Goal.FULL, "amp", "bfloat16", "adamw").minimize_memory(),
        Plan(Goal.FULL, "half", "bfloat16", "adamw"),
    ],
    ids=lambda plan: plan.format_label(),
)
def test_it_is_near_what_is_run(plan):
    spec = make_base_spec(plan.goal, SPEC)
    needed, document = estimate_bytes(plan, spec), profile(plan.make_spec(spec, 1), with_details=False)[1]
    allocated = document.peak.allocated_bytes + document.device.context_bytes
    assert needed == pytest.approx(allocated, rel=0.1)


def test_a_search_begins_with_what_should_fit():
    runs = Simulator(find_gpu("rtx-4090"), lambda doing: None)
    for task in list_tasks(runs.gpu):
        ways = [
            (entry, _build_spec(SPEC.edit(context_length=2048), task, entry, 2048)) for entry in list_candidate_models()
        ]
        place = _estimate_start(runs, ways, task)
        needed = [estimate_bytes(task.plan, spec) for _, spec in ways]
        assert needed[place] is None or needed[place] <= runs.gpu.total_bytes
        assert needed[place + 1] is None or needed[place + 1] > runs.gpu.total_bytes
