"""What to change where an engine does not start or has few tokens: one option, more GPUs, or a larger one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from memprof.device.catalog import Gpu, find_gpu, list_suggested_gpus
from memprof.errors import MemprofError
from memprof.estimate.serving.changes import (
    SGLANG_FLAGS,
    VLLM_FLAGS,
    Flags,
    add_larger_gpu,
    complete_budget,
    make_command,
)
from memprof.estimate.serving.options import ServingOptions
from memprof.serving.budget import CLOSED_FORM, EngineBudget
from memprof.units import GIB


@pytest.mark.parametrize("least_gib", [0, 30, 100])
def test_the_smallest_larger_gpu_on_which_it_starts(least_gib: int) -> None:
    present = find_gpu("rtx-4090").total_bytes
    tried: list[int] = []

    def compute(gpu: Gpu) -> EngineBudget:
        tried.append(gpu.total_bytes)
        refusal = "" if gpu.total_bytes >= least_gib * GIB else "no room"
        return EngineBudget(engine="vllm", num_tokens=7, kv_cache_bytes=GIB, refusal=refusal)

    budget = EngineBudget(engine="vllm", total_bytes=present, refusal="no room")
    (change,) = add_larger_gpu(budget, ServingOptions(), compute).changes
    sizes = sorted(gpu.total_bytes for gpu in list_suggested_gpus())
    expected = next(size for size in sizes if size > present and size >= least_gib * GIB)
    assert tried[0] == next(size for size in sizes if size > present)
    assert tried[-1] == find_gpu(change.flag.removeprefix("another GPU: ")).total_bytes == expected
    assert (change.num_tokens, change.kv_cache_bytes, change.cost) == (7, GIB, f"{expected / GIB:.0f} GiB")


# Of 100 GiB, all but the CUDA context is 99%.
ROOMY: dict[str, Any] = {"engine": "vllm", "total_bytes": 100 * GIB, "num_tokens": 1000}
FULL = {**ROOMY, "refusal": "no room"}
TWO_GPUS = ("--tensor-parallel-size 2", "2 GPUs")
FP8_CACHE = ("--kv-cache-dtype fp8", "precision of keys and values")


def tried_on(budget: EngineBudget, gpu: str = "rtx-4090", flags: Flags = VLLM_FLAGS, **options: Any):
    """Return the flag and the cost of each change, if each of them has twice the tokens."""
    better = EngineBudget(engine="vllm", num_tokens=2000)
    found = complete_budget(budget, ServingOptions(**options), lambda _: better, find_gpu(gpu), flags, "org/model")
    return [(change.flag, change.cost) for change in found.changes]


CHANGES = [
        (ROOMY, {}, [FP8_CACHE, TWO_GPUS]),
        (ROOMY, {"kv_cache_dtype": "fp8"}, [TWO_GPUS]),
        (ROOMY, {"kv_cache_dtype": "fp8", "tensor_parallel": 4}, [("--tensor-parallel-size 8", "8 GPUs")]),
        # Above 99% it does not start, and 95% is enough for others.
        (ROOMY | {"utilization": 0.995}, {}, [("--gpu-memory-utilization 0.99", ""), FP8_CACHE, TWO_GPUS]),
        (ROOMY | {"utilization": 0.99}, {}, [FP8_CACHE, TWO_GPUS]),
        (ROOMY | {"utilization": 0.95}, {}, [FP8_CACHE, TWO_GPUS]),
        (
            ROOMY | {"utilization": 0.8, "profile_peak_bytes": GIB}, {},
            [("--gpu-memory-utilization 0.95", "less is left to others"), FP8_CACHE, TWO_GPUS],
        ),
        # Where activations take what is left, 5 points at once.
        (
            ROOMY | {"utilization": 0.8}, {},
            [("--gpu-memory-utilization 0.85", "less for activations, CUDA graphs"), FP8_CACHE, TWO_GPUS],
        ),
        (
            ROOMY | {"utilization": 0.92}, {},
            [("--gpu-memory-utilization 0.95", "less for activations, CUDA graphs"), FP8_CACHE, TWO_GPUS],
        ),
        (ROOMY | {"max_num_seqs": 65}, {}, [("--max-num-seqs 64", "fewer requests in a step"), FP8_CACHE, TWO_GPUS]),
        (ROOMY | {"max_num_seqs": 64}, {}, [FP8_CACHE, TWO_GPUS]),
        (ROOMY | {"max_num_seqs": 101}, {"concurrency": 100},
         [("--max-num-seqs 100", "fewer requests in a step"), FP8_CACHE, TWO_GPUS]),
        (ROOMY | {"max_num_seqs": 100}, {"concurrency": 100}, [FP8_CACHE, TWO_GPUS]),
        (ROOMY | {"max_num_batched_tokens": 2049}, {},
         [("--max-num-batched-tokens 2048", "slower prefill"), FP8_CACHE, TWO_GPUS]),
        (ROOMY | {"max_num_batched_tokens": 2048}, {}, [FP8_CACHE, TWO_GPUS]),
        (ROOMY | {"graph_bytes": 1}, {}, [FP8_CACHE, ("--enforce-eager", "slower decoding"), TWO_GPUS]),
        (ROOMY | {"graph_bytes": 1}, {"is_eager": True}, [FP8_CACHE, TWO_GPUS]),
        (ROOMY | {"longest_context": 512}, {}, [FP8_CACHE, TWO_GPUS]),
        (FULL | {"longest_context": 512, "quantization": "awq"}, {},
         [("--max-model-len 512", "shorter requests"), FP8_CACHE, TWO_GPUS]),
        (FULL, {}, [FP8_CACHE, ("--quantization fp8", "precision of weights"),
                    ("--quantization bitsandbytes", "precision of weights"), TWO_GPUS]),
    ]  # fmt: skip


def test_options_that_may_be_changed() -> None:
    for budget, options, changes in CHANGES:
        assert tried_on(EngineBudget(**budget), **options) == changes


@pytest.mark.parametrize(
    ("gpu", "flags", "names"),
    [
        ("a100-80gb", VLLM_FLAGS, ["--quantization bitsandbytes", "--tensor-parallel-size 2"]),
        ("v100-16gb", VLLM_FLAGS, ["--quantization bitsandbytes", "--tensor-parallel-size 2"]),
        ("gtx-1080-ti", VLLM_FLAGS, ["--tensor-parallel-size 2"]),
        ("l4", SGLANG_FLAGS, ["--kv-cache-dtype fp8_e4m3", "--quantization fp8", "--tp-size 2"]),
    ],
)
def test_formats_of_8_bits_need_a_gpu_that_has_them(gpu: str, flags: Flags, names: list[str]) -> None:
    assert [flag for flag, _ in tried_on(EngineBudget(**FULL), gpu, flags)] == names


@pytest.mark.parametrize(
    ("num_tokens", "starts", "is_shown"), [(1006, True, True), (1004, True, False), (2000, False, False)]
)
def test_a_change_is_shown_that_has_more_tokens(num_tokens: int, starts: bool, is_shown: bool) -> None:
    found = EngineBudget(engine="vllm", num_tokens=num_tokens, refusal="" if starts else "no")
    budget = EngineBudget(**ROOMY)
    changes = complete_budget(budget, ServingOptions(), lambda _: found, find_gpu("l4"), VLLM_FLAGS, "m").changes
    shown = [(change.num_tokens, change.kv_cache_bytes, change.source) for change in changes]
    assert shown == [(num_tokens, 0, CLOSED_FORM)] * 2 * is_shown


def test_at_most_six_changes_and_those_with_most_tokens_first() -> None:
    """The less a GPU may use, the more tokens here."""

    def compute(options: ServingOptions) -> EngineBudget:
        if options.tensor_parallel > 1:
            raise MemprofError("heads do not divide")
        tokens = 5000 if options.is_eager else 2000 + (options.max_num_seqs or 0) - (options.kv_cache_dtype == "fp8")
        return EngineBudget(engine="vllm", num_tokens=tokens, kv_cache_bytes=-1)

    budget = EngineBudget(
        **FULL, utilization=0.8, max_num_seqs=256, max_num_batched_tokens=8192, graph_bytes=1, longest_context=64
    )
    found = complete_budget(budget, ServingOptions(), compute, find_gpu("l4"), VLLM_FLAGS, "m")
    assert [change.num_tokens for change in found.changes] == [5000, 2064, 2000, 2000, 2000, 2000]
    assert found.changes[0].kv_cache_bytes == 0 and (found.least_gpus, found.requested_concurrency) == (1, None)
    assert found.command == "vllm serve m --max-model-len 64"


def serves(is_enough: Callable[[ServingOptions], bool], **options: Any) -> tuple[str, int | None, list[str]]:
    """Return what to start, on how many GPUs, and the changes, if `is_enough` says which options start."""

    def compute(options: ServingOptions) -> EngineBudget:
        refusal = "" if is_enough(options) else "no"
        return EngineBudget(engine="vllm", num_tokens=10, concurrency=2.0, refusal=refusal)

    budget = EngineBudget(**FULL, quantization="awq", utilization=0.8, max_num_seqs=256, max_num_batched_tokens=8192)
    found = complete_budget(budget, ServingOptions(**options), compute, find_gpu("a100-80gb"), VLLM_FLAGS, "m")
    return found.command, found.least_gpus, [change.flag for change in found.changes]


def test_tokens_of_more_gpus_that_start_nothing_are_none() -> None:
    found = EngineBudget(engine="vllm", concurrency=2.0)
    budget = EngineBudget(**FULL)
    changes = complete_budget(budget, ServingOptions(), lambda _: found, find_gpu("l4"), VLLM_FLAGS, "m").changes
    assert {change.num_tokens for change in changes} == {0}


def test_what_starts_with_one_change_else_with_all_that_cost_no_precision_else_on_more_gpus() -> None:
    seqs, tokens = "--max-num-seqs 64", "--max-num-batched-tokens 2048"
    assert serves(lambda options: options.max_num_seqs == 64) == (f"vllm serve m {seqs}", 1, [seqs])
    both = serves(lambda options: (options.max_num_seqs, options.max_num_batched_tokens) == (64, 2048))
    assert both == (f"vllm serve m --gpu-memory-utilization 0.85 {seqs} {tokens}", 1, [])
    for least in (2, 4, 64):
        flag = f"--tensor-parallel-size {least}"
        found = serves(lambda options, least=least: options.tensor_parallel >= least)  # type: ignore[misc]
        assert found == (f"vllm serve m {flag}", least, [flag])
    assert serves(lambda options: options.tensor_parallel > 64) == ("", None, [])
    assert serves(lambda options: options.max_num_seqs == 64, concurrency=2)[1] == 1
    assert serves(lambda options: True, concurrency=3)[:2] == ("", None)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ""),
        ({"kv_cache_dtype": "fp8", "tensor_parallel": 2, "utilization": 0.9, "context_length": 512},
         " --max-model-len 512 --tensor-parallel-size 2 --gpu-memory-utilization 0.9 --kv-cache-dtype fp8"),
        ({"max_num_seqs": 8, "max_num_batched_tokens": 16}, " --max-num-seqs 8 --max-num-batched-tokens 16"),
        ({"quantization": "fp8"}, " --quantization fp8"),
        ({"quantization": "bitsandbytes", "is_eager": True}, " --quantization bitsandbytes --enforce-eager"),
        ({"quantization": "awq"}, ""),
        ({"max_loras": 2}, " --enable-lora --max-loras 2"),
        ({"max_loras": 2, "max_lora_rank": 8}, " --enable-lora --max-loras 2 --max-lora-rank 8"),
        ({"max_lora_rank": 8}, ""),
    ],
)  # fmt: skip
def test_the_command_has_what_was_asked(options: dict[str, Any], words: str) -> None:
    assert make_command(VLLM_FLAGS, "my model", ServingOptions(**options)) == f"vllm serve 'my model'{words}"
