import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.catalog import custom_gpu, find_gpu, list_gpus
from memprof.errors import UsageError
from memprof.estimate.geometry import from_model, from_params
from memprof.estimate.methods import COLUMNS, METHODS
from memprof.estimate.table import CLOSE, ENOUGH_RUNS, FITS, NO, Band, band_of, build_estimate, parse_dtype
from memprof.units import GIB


def test_the_guides_weights():
    weights = {
        column: build_estimate(from_params("1.2B")).cells["weights", column].allocated_bytes for column in COLUMNS
    }
    assert weights["float32"] == 4_800_000_000
    assert weights["float16"] == weights["bfloat16"] == 2_400_000_000
    assert f"{weights['float16'] / GIB:.2f}" == "2.24"
    # The guide says 1.2 GB: the embedding is not quantized.
    assert 1_200_000_000 < weights["int8"] < 1_600_000_000
    assert 600_000_000 < weights["int4"] < weights["int8"]


def test_what_depends_on_the_shape_is_marked():
    answer = build_estimate(from_params("1.2B"))
    marked = {key for key, cell in answer.cells.items() if cell.derived}
    assert set(answer.cells) - marked == {("weights", name) for name in ("float32", "float16", "bfloat16")}
    assert not any(cell.derived for cell in build_estimate(from_model("gpt2")).cells.values())


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["gpt2", "pythia-1b", "llama-3.2-1b", "qwen3-4b", "gemma-2-2b", "phi-2"]),
    st.integers(1, 4),
    st.integers(1, 1023),
)
def test_more_tokens_take_no_less(model, batch_size, context_length):
    subject = from_model(model)
    small = build_estimate(subject, batch_size=batch_size, context_length=context_length)
    for larger in (
        build_estimate(subject, batch_size=batch_size + 1, context_length=context_length),
        build_estimate(subject, batch_size=batch_size, context_length=context_length + 1),
    ):
        assert small.cells.keys() == larger.cells.keys()
        for key, cell in small.cells.items():
            assert cell.allocated_bytes <= larger.cells[key].allocated_bytes, key


@pytest.mark.parametrize("model", ["gpt2", "llama-3.1-8b", "gemma-2-9b", "opt-6.7b"])
def test_order_of_the_methods(model):
    cells = build_estimate(from_model(model)).cells
    size = {key: cell.allocated_bytes for key, cell in cells.items()}
    for column in COLUMNS:
        assert size["weights", column] < size["inference", column] < size["lora", column]
    for method in METHODS:
        if method.checkpointing:
            plain = method.key.removesuffix("-checkpointing")
            for column in COLUMNS:
                if (method.key, column) in size:
                    assert size[method.key, column] <= size[plain, column]
    assert size["adamw-8bit", "bfloat16"] <= size["full", "bfloat16"] < size["full", "float32"]
    assert size["full", "bfloat16"] == size["full", "float16"]


def test_terms_sum_to_the_peak():
    for cell in build_estimate(from_model("qwen3-4b")).cells.values():
        assert sum(cell.peak.terms.values()) == cell.allocated_bytes
        assert all(size >= 0 for size in cell.peak.terms.values())
        assert cell.allocated_bytes == max(moment.num_bytes for moment in cell.moments)


def test_a_verdict_is_close_within_the_band():
    cell = dataclasses.replace(
        build_estimate(from_model("llama-3.2-1b")).cells["inference", "bfloat16"], band=Band(-0.1, 0.2, 1)
    )
    need = cell.device_bytes
    for share, verdict in ((0.89, NO), (0.91, CLOSE), (1.19, CLOSE), (1.21, FITS)):
        assert cell.on(custom_gpu(round(need * share))) == verdict


def test_hopper_has_larger_workspaces():
    cell = build_estimate(from_model("gpt2")).cells["full", "bfloat16"]
    h100 = find_gpu("h100-80gb")
    extra = 2 * (32 << 20) - 2 * (8320 << 10)
    just = dataclasses.replace(h100, total_bytes=int((cell.device_bytes + extra) * (1 + cell.band.high)) + 1)
    assert cell.on(just) == FITS
    assert cell.on(dataclasses.replace(just, total_bytes=just.total_bytes - 2)) != FITS


def test_bands_are_measured_or_the_widest():
    bands = {method.key: band_of(method.key) for method in METHODS if method.kind != "weights"}
    measured = {key: band for key, band in bands.items() if band.runs >= ENOUGH_RUNS}
    assert len(measured) >= 5
    for band in bands.values():
        assert band.low <= 0 < band.high
    for key in bands.keys() - measured.keys():
        assert bands[key].high >= max(band.high for band in measured.values())
        assert bands[key].low <= min(band.low for band in measured.values())


def test_spreading_takes_less_of_each_card():
    answer = build_estimate(from_model("llama-3.1-8b"), gpus=8)
    full = [cell.allocated_bytes for cell in answer.sharded if cell.method.key == "full-checkpointing"]
    assert full == sorted(full, reverse=True)
    alone = answer.cells["full-checkpointing", "bfloat16"].allocated_bytes
    assert full[0] > alone > full[1] > alone / 8
    assert not build_estimate(from_model("llama-3.1-8b")).sharded


def test_models_that_are_not_known_have_their_weights():
    answer = build_estimate(from_model("mixtral-8x7b"))
    assert {method for method, _ in answer.cells} == {"weights"}
    assert answer.cells["weights", "bfloat16"].allocated_bytes == 2 * from_model("mixtral-8x7b").num_parameters


def test_all_cards_have_a_verdict():
    cell = build_estimate(from_model("llama-3.1-70b")).cells["full", "bfloat16"]
    assert {cell.on(gpu) for gpu in list_gpus()} == {NO}


@pytest.mark.parametrize(("given_name", "column"), [("fp16", "float16"), ("BF16", "bfloat16"), ("nf4", "int4")])
def test_other_names_of_dtypes(given_name, column):
    assert parse_dtype(given_name) == column


@pytest.mark.parametrize(
    "wrong", [{"context_length": 0}, {"batch_size": 0}, {"gpus": 0}, {"lora_rank": -1}, {"dtype": "float17"}]
)
def test_wrong_values_are_refused(wrong):
    with pytest.raises(UsageError):
        build_estimate(from_model("gpt2"), **wrong)


def test_positions_that_a_model_lacks_are_refused():
    with pytest.raises(UsageError, match="positions for 1,024"):
        build_estimate(from_model("gpt2"), context_length=1025)
    assert build_estimate(from_model("gpt2")).context_length == 1024
