"""Searches on a machine whose GPU and CPU share memory: they aim at what stays in memory, not at what can be had."""

import torch

import memprof
from memprof.device.catalog import find_gpu
from memprof.flows.gpus import make_device_facts
from memprof.flows.limit import _search_largest
from memprof.flows.recommend.outcome import PAGING
from memprof.report.matching.comparison_build import build_comparison
from memprof.report.matching.runs import convert_report
from memprof.report.matching.tolerance import Tolerance
from memprof.report.terminal.comparison import render
from memprof.report.terminal.console import to_text

GIB = 1 << 30


def run_gib(number):
    with memprof.virtual_gpu("m1-8gb") as gpu:
        kept = [torch.zeros(GIB // 4, device="mps") for _ in range(number)]
    del kept
    return gpu.trace, gpu.report()


def test_the_largest_batch_does_not_page():
    """Metal recommends 5.33 of 8 GiB; allocations fail above 9.07."""
    _, report = _search_largest(run_gib, find_gpu("m1-8gb"), "batch-size", lambda number, fits: "", start=1, high=16)
    assert (report.limit.largest, report.limit.first_too_large) == (5, 6)
    stages = {run.number: run.oom_stage for run in report.limit.runs}
    assert (stages[5], stages[6]) == ("", PAGING)
    assert "6 needs 6.00 GiB and pages" in " ".join(str(report).split())


def test_the_screen_of_a_run_that_pages_says_where():
    lines = [" ".join(line.split()) for line in str(run_gib(6)[1]).splitlines()]
    assert any(line.startswith("Fits, but pages: needs 6.00 GiB") for line in lines)
    assert any("<- peak" in line and line.endswith("pages") for line in lines)


def test_a_comparison_says_that_a_run_pages():
    runs = [convert_report(run_gib(number)[1], f"{number}.json", "memprof report") for number in (5, 6)]
    text = to_text(render(build_comparison(*runs, Tolerance())), width=200)
    assert "A: 5.json, simulated on a virtual Apple M1 (8 GB), fits\n" in text
    assert "B: 6.json, simulated on a virtual Apple M1 (8 GB), fits, but pages\n" in text


def test_a_run_would_page_up_to_the_limit_of_the_allocator():
    mac = make_device_facts(find_gpu("m1-8gb"))
    assert [mac.would_page(size * GIB) for size in (8, 9, 10)] == [True, True, False]
    assert mac.resident_bytes == mac.total_bytes
    spark = make_device_facts(find_gpu("gb10"))
    assert spark.resident_bytes == spark.usable_bytes == spark.total_bytes - spark.context_bytes
    assert not make_device_facts(find_gpu("h100")).would_page(GIB)
