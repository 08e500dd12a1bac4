import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from memprof.device.catalog import custom_gpu, find_gpu, list_gpus
from memprof.device.context import CONTEXT_BYTES
from memprof.errors import UsageError
from memprof.estimate.geometry import build_from_model, build_from_params
from memprof.estimate.methods import METHODS, WEIGHT_DTYPES
from memprof.estimate.options import EstimateOptions
from memprof.estimate.table import (
    ALLOCATED,
    BORDERLINE,
    DEVICE_USED,
    FITS,
    MEMORY_KINDS,
    NO,
    build_estimate,
    find_column,
    read_band,
)
from memprof.units import GIB
from tests.lanes import examples


def test_the_guides_weights():
    weights = {
        column: build_estimate(build_from_params("1.2B")).cells["weights", column].allocated_bytes
        for column in WEIGHT_DTYPES
    }
    assert weights["float32"] == 4_800_000_000
    assert weights["float16"] == weights["bfloat16"] == 2_400_000_000
    assert f"{weights['float16'] / GIB:.2f}" == "2.24"
    # The guide says 1.2 GB: the embedding is not quantized.
    assert 1_200_000_000 < weights["int8"] < 1_600_000_000
    assert 600_000_000 < weights["int4"] < weights["int8"]


def test_what_depends_on_the_shape_is_marked():
    answer = build_estimate(build_from_params("1.2B"))
    marked = {key for key, cell in answer.cells.items() if cell.is_derived}
    assert set(answer.cells) - marked == {("weights", name) for name in ("float32", "float16", "bfloat16")}
    assert not any(cell.is_derived for cell in build_estimate(build_from_model("gpt2")).cells.values())


@settings(max_examples=examples(40), deadline=None)
@given(
    st.sampled_from(["gpt2", "pythia-1b", "llama-3.2-1b", "qwen3-4b", "gemma-2-2b", "phi-2"]),
    st.integers(1, 4),
    st.integers(1, 1023),
)
def test_more_tokens_take_no_less(model, batch_size, context_length):
    subject = build_from_model(model)
    small = build_estimate(subject, EstimateOptions(batch_size=batch_size, context_length=context_length))
    for larger in (
        build_estimate(subject, EstimateOptions(batch_size=batch_size + 1, context_length=context_length)),
        build_estimate(subject, EstimateOptions(batch_size=batch_size, context_length=context_length + 1)),
    ):
        assert small.cells.keys() == larger.cells.keys()
        for key, cell in small.cells.items():
            assert cell.allocated_bytes <= larger.cells[key].allocated_bytes, key


@pytest.mark.parametrize("model", ["gpt2", "llama-3.1-8b", "gemma-2-9b", "opt-6.7b"])
def test_order_of_the_methods(model):
    cells = build_estimate(build_from_model(model)).cells
    size = {key: cell.allocated_bytes for key, cell in cells.items()}
    for column in WEIGHT_DTYPES:
        assert size["weights", column] < size["inference", column] < size["lora", column]
    for method in METHODS:
        if method.checkpointing:
            plain = method.key.removesuffix("-checkpointing")
            for column in WEIGHT_DTYPES:
                if (method.key, column) in size:
                    assert size[method.key, column] <= size[plain, column]
    assert size["adamw-8bit", "bfloat16"] <= size["full", "bfloat16"] < size["full", "float32"]
    assert size["full", "bfloat16"] == size["full", "float16"]


def test_terms_sum_to_the_peak():
    for cell in build_estimate(build_from_model("qwen3-4b")).cells.values():
        assert sum(cell.peak.terms.values()) == cell.allocated_bytes
        assert all(size >= 0 for size in cell.peak.terms.values())
        assert cell.allocated_bytes == max(moment.num_bytes for moment in cell.moments)


def test_a_verdict_is_borderline_within_the_band():
    cell = build_estimate(build_from_model("llama-3.2-1b")).cells["inference", "bfloat16"]
    _, low, high = cell.compute_ranges()[DEVICE_USED]
    for size, verdict in ((low - 1, NO), (low, BORDERLINE), (high - 1, BORDERLINE), (high, FITS)):
        assert cell.judge_fit(custom_gpu(size)) == verdict


def test_hopper_has_larger_workspaces():
    cell = build_estimate(build_from_model("gpt2")).cells["full", "bfloat16"]
    h100 = find_gpu("h100-80gb")
    extra = 2 * (32 << 20) - 2 * (8320 << 10)
    assert cell.compute_ranges(h100)[ALLOCATED][0] == cell.allocated_bytes + extra
    just = dataclasses.replace(h100, total_bytes=cell.compute_ranges(h100)[DEVICE_USED][2])
    assert just.total_bytes > cell.compute_ranges()[DEVICE_USED][2] + extra - 2
    assert cell.judge_fit(just) == FITS
    assert cell.judge_fit(dataclasses.replace(just, total_bytes=just.total_bytes - 1)) == BORDERLINE


@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.key)
def test_every_kind_of_figure_has_a_band(method):
    cell = build_estimate(build_from_model("llama-3.2-1b")).cells[method.key, "bfloat16"]
    figures = cell.compute_ranges()
    allocated, reserved, device = (figures[kind][0] for kind in MEMORY_KINDS)
    assert allocated == cell.allocated_bytes <= reserved
    assert device == reserved + CONTEXT_BYTES
    for kind, (size, low, high) in figures.items():
        assert low <= size <= high
        # A program that gives its cached blocks back has what is allocated, whatever others keep.
        assert low <= allocated + (CONTEXT_BYTES if kind == DEVICE_USED else 0)
    if method.kind == "weights":
        assert figures[ALLOCATED] == (allocated, allocated, allocated)


def test_checkpointing_is_no_reason_to_need_a_larger_gpu():
    cells = build_estimate(build_from_params("1.2B")).cells
    for method in METHODS:
        if method.checkpointing:
            plain = cells[method.key.removesuffix("-checkpointing"), "bfloat16"]
            assert cells[method.key, "bfloat16"].device_bytes <= plain.device_bytes


def test_bands_say_what_they_rest_on():
    for kind in MEMORY_KINDS:
        band = read_band(kind)
        assert band.low <= 0 < band.high
        assert band.figures >= 5
        assert band.sources >= 2
        assert band.inside >= 0.85


def test_generated_tokens_make_the_cache_longer():
    subject = build_from_model("qwen3-4b")
    prompt, generated = (
        build_estimate(subject, EstimateOptions(context_length=1, new_tokens=count)).cells["inference", "bfloat16"]
        for count in (1, 2048)
    )
    assert generated.peak.name == "last token"
    per_token = 2 * 36 * 8 * 128 * 2
    assert generated.peak.terms["KV cache"] == 2048 * per_token
    assert prompt.peak.terms["KV cache"] == per_token


def test_lora_targets_are_counted():
    subject = build_from_model("llama-3.2-1b")
    sizes = [
        build_estimate(subject, EstimateOptions(lora_targets=targets, context_length=16)).cells["lora", "bfloat16"].peak
        for targets in (None, "q_proj,v_proj", "self_attn.q_proj, self_attn.v_proj", "all-linear")
    ]
    assert sizes[0] == sizes[1] == sizes[2]
    # Rank 8: q and v are 2,048 to 2,048 and to 512 in each of 16 layers; two float32 states each.
    assert sizes[0].terms["optimizer state"] == 2 * 4 * 16 * 8 * (2048 + 2048 + 2048 + 512)
    assert sizes[3].terms["optimizer state"] > 3 * sizes[0].terms["optimizer state"]
    with pytest.raises(UsageError, match="lora-targets"):
        build_estimate(subject, EstimateOptions(lora_targets="c_attn"))
    assert build_from_model("gpt2").geometry.resolve_lora_targets("c_proj") == ("o", "down")


@pytest.mark.parametrize(
    ("dtype", "bits"), [("fp8", 8.002), ("gptq-int8", 8.19), ("gptq-int4", 4.16), ("awq-int4", 4.16)]
)
def test_stored_formats_are_for_inference(dtype, bits):
    subject = build_from_model("llama-3.1-8b")
    answer = build_estimate(subject, EstimateOptions(dtype=dtype))
    assert {method for method, column in answer.cells if column == dtype} == {"weights", "inference"}
    geometry = subject.geometry
    weights = answer.cells["weights", dtype].allocated_bytes - 2 * (8_030_261_248 - geometry.linear_parameters)
    assert weights * 8 / geometry.linear_parameters == pytest.approx(bits, abs=0.02)


def test_optimizers_have_states_of_their_own():
    subject = build_from_model("pythia-70m")

    def states(**asked):
        peak = build_estimate(subject, EstimateOptions(context_length=16, **asked)).cells["full", "float32"].moments[-1]
        return tuple(peak.terms[name] / (4 * subject.num_parameters) for name in ("optimizer state", "temporaries"))

    assert states() == (2, 1)
    assert states(optimizer_impl="fused") == (2, 0)
    assert states(optimizer="sgd-momentum") == (1, 0)
    assert states(optimizer="paged-adamw-8bit") == (0, 0)
    with pytest.raises(UsageError, match="optimizer"):
        states(optimizer="adafactor")


def test_lengths_that_vary_take_what_the_longest_batch_takes(tmp_path):
    path = tmp_path / "lengths.txt"
    path.write_text("10 200 30 40")
    answer = build_estimate(build_from_model("gpt2"), EstimateOptions(lengths=str(path), batch_size=2))
    assert answer.context_length == 200
    cell = answer.cells["full", "bfloat16"]
    options = EstimateOptions(context_length=200, batch_size=2)
    constant = build_estimate(build_from_model("gpt2"), options).cells["full", "bfloat16"]
    assert cell.allocated_bytes >= constant.allocated_bytes
    assert cell.reserved_bytes > 1.2 * constant.reserved_bytes
    emptied = build_estimate(
        build_from_model("gpt2"), EstimateOptions(lengths=str(path), batch_size=2, empties_cache=True)
    )
    assert emptied.cells["full", "bfloat16"].reserved_bytes < cell.reserved_bytes


def test_spreading_takes_less_of_each_gpu():
    answer = build_estimate(build_from_model("llama-3.1-8b"), EstimateOptions(gpus=8))
    full = [cell.allocated_bytes for cell in answer.sharded if cell.method.key == "full-checkpointing"]
    assert full == sorted(full, reverse=True)
    alone = answer.cells["full-checkpointing", "bfloat16"].allocated_bytes
    assert full[0] > alone > full[1] > alone / 8
    assert not build_estimate(build_from_model("llama-3.1-8b")).sharded


def test_models_that_are_not_known_have_their_weights():
    answer = build_estimate(build_from_model("mixtral-8x7b"))
    assert {method for method, _ in answer.cells} == {"weights"}
    assert answer.cells["weights", "bfloat16"].allocated_bytes == 2 * build_from_model("mixtral-8x7b").num_parameters


def test_all_gpus_have_a_verdict():
    cell = build_estimate(build_from_model("llama-3.1-70b")).cells["full", "bfloat16"]
    assert {cell.judge_fit(gpu) for gpu in list_gpus()} == {NO}


@pytest.mark.parametrize(("asked", "column"), [("float16", "float16"), ("nf4", "int4"), ("awq-int4", "awq-int4")])
def test_the_column_of_what_is_asked(asked, column):
    assert find_column(asked) == column


@pytest.mark.parametrize(
    "wrong", [{"context_length": 0}, {"batch_size": 0}, {"gpus": 0}, {"lora_rank": -1}, {"dtype": "float17"}]
)
def test_wrong_values_are_refused(wrong):
    with pytest.raises(UsageError):
        build_estimate(build_from_model("gpt2"), EstimateOptions(**wrong))


def test_positions_that_a_model_lacks_are_refused():
    with pytest.raises(UsageError, match="positions for 1,024"):
        build_estimate(build_from_model("gpt2"), EstimateOptions(context_length=1025))
    assert build_estimate(build_from_model("gpt2")).context_length == 1024
