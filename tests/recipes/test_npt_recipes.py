"""The recipes of case studies 1 and 4 run from a checkout, and what they say of the reports is computed and true."""

from __future__ import annotations

import re

import pytest

from tests.processes import ROOT, python


@pytest.fixture(scope="module")
def weight_delta(run):
    return run("1-npt-weight-delta")


@pytest.mark.nightly  # in every run: test_parts.py
class TestWeightDelta:
    def test_the_page_shows_it(self, weight_delta, check_page):
        check_page(1, weight_delta)

    def test_dense_is_reported_with_its_true_bytes(self, weight_delta):
        assert re.search(r"^dense +448\.00 GiB .* out of memory in layer 0$", weight_delta, re.MULTILINE)
        assert re.search(r"Finding: A 4096 x 14336 weight delta for each of 2048\s+tokens: 448.00 GiB", weight_delta)
        assert "model.layers.*.mlp.gate_proj.npt" in weight_delta
        assert "low-rank-npt" in weight_delta

    def test_448_gib_are_of_another_d_ffn(self, weight_delta):
        found = weight_delta.claim("4 x 512 tokens, 4096 x 11008")
        assert 4 * 512 * 4096 * 11008 * 4 == 344 * 2**30 and 4 * 512 * 4096 * 14336 * 4 == 448 * 2**30
        assert "DOES NOT HOLD" in found and "344.00 GiB in float32" in found and "448.00 GiB is d_ffn = 14336" in found

    def test_one_token_is_180_megabytes(self, weight_delta):
        found = weight_delta.claim("delta of one token")
        assert 4096 * 11008 * 4 == 180_355_072 == 172 * 2**20
        assert found.startswith("* delta of one token: ~180 MB: HOLDS 180.4 MB = 172.00 MiB")

    def test_a_loop_saves_nothing_in_training(self, weight_delta):
        found = weight_delta.claim("new approach")
        kept, recomputed = map(float, re.findall(r"([\d.]+) GiB", found))
        assert kept > 448 and recomputed < 2.5

    def test_low_rank_cuts_the_component_more_than_400_times(self, weight_delta):
        found = weight_delta.claim("reduction")
        per_token, low_rank = (int(number.replace(",", "")) for number in re.findall(r"\(([\d,]+)x\)", found))
        assert per_token > 400 and low_rank > 4000

    def test_the_report_s_six_rows(self, weight_delta):
        table = weight_delta.partition("The report's table of memory")[2].partition("configurations")[0]
        rows = re.findall(r"^(\S.*?)  +[~>].*?([\d,.]+) GiB  (fits|out of memory in .*? in use)", table, re.MULTILINE)
        used = {name: float(gib.replace(",", "")) for name, gib, _ in rows}
        assert list(used) == [
            "Original", "Basic Optimization", "+ CPU Offload", "+ FP16", "+ Fewer Layers", "Small Model",
        ]  # fmt: skip
        assert [verdict == "fits" for *_, verdict in rows] == [False, False, True, True, True, True]
        assert "with 78.45 GiB in use" in rows[1][2]  # the report: ~79 GB, and dies
        for name, figure in (("+ FP16", 40), ("+ Fewer Layers", 35), ("Small Model", 2)):
            assert abs(used[name] - figure) < 0.15 * figure
        assert used["+ CPU Offload"] < 78 / 2

    def test_other_claims(self, weight_delta):
        assert "AT BATCH 1 128.00 KiB at batch 4, 32.00 KiB at batch 1" in weight_delta.claim("modulation")
        assert "HOLDS the same in float64 to 12 digits" in weight_delta.claim("h W + ((h A) * m) B")


@pytest.fixture(scope="module")
def high_num_ranks(run):
    return run("4", "--no-clock")


# The times that recipe 4 prints, of a fifth of its component: all of it takes half a minute.
TIMES = """
import sys
sys.path.insert(0, "recipes/4-npt-high-num-ranks")
import audit, run
audit.NUM_RANKS = 24
run.show_times(audit.component("merged"))
"""


@pytest.mark.nightly  # in every run: test_parts.py
class TestHighNumRanks:
    def test_the_page_shows_it(self, high_num_ranks, check_page):
        check_page(4, high_num_ranks)

    def test_each_number_of_updates_has_a_row(self, high_num_ranks):
        rows = re.findall(
            r"^(32|64|128) +([\d.]+) MiB +([\d.]+) GiB +([\d.]+) GiB +([\d.]+) GiB$", high_num_ranks, re.M
        )
        assert [(int(count), float(rest)) for count, rest, *_ in rows] == [(32, 176), (64, 352), (128, 704)]
        peaks = [[float(gib) for gib in row[2:]] for row in rows]
        assert all(merged < min(others) for *others, merged in peaks)
        columns = list(zip(*peaks, strict=True))
        assert all(sorted(column) == list(column) for column in columns)

    def test_claims(self, high_num_ranks):
        output = high_num_ranks
        assert (4096 + 4096 + 14336) * 64 * 128 * 4 == 704 * 2**20
        memory = output.claim("memory of the component")
        assert "HOLDS, IN MIB, AT REST 184,549,376 parameters, 704.00 MiB" in memory
        unchanged = output.claim("memory unchanged by batching")
        assert "DOES NOT HOLD" in unchanged
        stacked = float(re.search(r"([\d.]+) GiB stacked", unchanged)[1])
        # Vectors u and v of 128 components and 256 tokens, and a copy of every parameter.
        assert stacked >= (2 * 128 * 128 * (4096 + 14336) * 4 + 704 * 2**20) / 2**30 - 0.01
        assert "DOES NOT HOLD" in output.claim("orthogonal initialisation")
        assert "AND THE LAYERS EQUAL" in output.claim("a seed for each component")

    def test_times(self):
        """The order of the times alone: by how much is tests/benchmarks/npt.py's to say."""
        done = python("-c", TIMES, folder=ROOT)
        assert done.exit_code == 0, done.stderr
        times = re.findall(r"^\w+, (\w+) +([\d.]+) s$", done.stdout, re.MULTILINE)
        seconds = {name: float(value) for name, value in times}
        assert set(seconds) == {"orthogonal", "fast", "sequential", "batched", "merged"}
        assert seconds["fast"] < seconds["orthogonal"] / 5
        assert seconds["merged"] < seconds["sequential"]
