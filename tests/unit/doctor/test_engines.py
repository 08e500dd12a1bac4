"""Engines' options at the boundaries of what they can reach; messages_engines.toml has a whole message of each kind."""

from __future__ import annotations

import io

import pytest

from memprof.doctor import Diagnosis, diagnose
from memprof.doctor.engines.engine import round_fraction_down, round_fraction_up


def diagnosis(text: str) -> Diagnosis:
    return diagnose(io.BytesIO(text.encode()), "log")[0]


def commands(text: str) -> list[str]:
    return [step.command for step in diagnosis(text).steps]


def torch_error(frames: str = "", tried: str = "1.00 GiB", free: str = "0.50 GiB", total: str = "80.00 GiB") -> str:
    return (
        f"{frames}torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {tried}. GPU 0 has a total capacity of "
        f"{total} of which {free} is free. Including non-PyTorch memory, this process has 79.00 GiB memory in use. Of "
        "the allocated memory 78.00 GiB is allocated by PyTorch, and 100.00 MiB is reserved by PyTorch but unallocated."
    )


def frames_of(*functions: str, package: str = "vllm/v1/worker") -> str:
    lines = "".join(
        f'  File "/opt/venv/lib/python3.12/site-packages/{package}/w.py", line 1, in {name}\n    x\n'
        for name in functions
    )
    return f"Traceback (most recent call last):\n{lines}"


# -- fractions ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fraction", "down", "up"), [(0.87, 0.87, 0.87), (0.8699999, 0.86, 0.87), (0.8700001, 0.87, 0.88), (0.0, 0.0, 0.0)]
)
def test_hundredths(fraction: float, down: float, up: float):
    assert (round_fraction_down(fraction), round_fraction_up(fraction)) == (down, up)


# -- vLLM --------------------------------------------------------------------------------------------------------------


def test_weights_in_another_process():
    text = (
        "ValueError: Free memory on device cuda:0 (20.00/79.10 GiB) on startup is less than the engine's budget after "
        "excluding external process's weights (0.9, 41.00 GiB)."
    )
    found = diagnosis(text)
    assert (found.figures.tried.text, found.engine.missing.text) == ("41.00 GiB", "21.00 GiB")


@pytest.mark.parametrize(
    ("frames", "option"),
    [
        (("run_engine_core", "__init__", "load_model"), "--tensor-parallel-size 2"),
        (("determine_available_memory", "profile_run"), "--max-num-batched-tokens 1024 --max-num-seqs 64"),
        (("profile_run", "execute_model"), "--max-num-batched-tokens 1024 --max-num-seqs 64"),
        (("initialize_from_config", "initialize_kv_cache"), "--gpu-memory-utilization 0.89"),
        (("compile_or_warm_up_model", "capture_model"), "--gpu-memory-utilization 0.89"),
        (("__call__", "capture_end"), "--gpu-memory-utilization 0.89"),
        (("run_busy_loop", "execute_model"), "--gpu-memory-utilization 0.89"),
    ],
)
def test_torch_s_error_in_vllm_has_the_advice_of_its_stage(frames: tuple[str, ...], option: str):
    found = diagnosis(torch_error(frames_of(*frames)))
    assert found.source == "torch in vLLM"
    assert option in found.steps[0].command
    assert not any("memprof" in step.command for step in found.steps)


@pytest.mark.parametrize("prefix", ["(RayWorkerWrapper pid=2069, ip=10.0.0.1) ERROR ", "(Worker_TP2 pid=99) ERROR "])
def test_a_worker_s_line_is_enough_to_tell_vllm(prefix: str):
    assert diagnosis(prefix + torch_error()).source == "torch in vLLM"


@pytest.mark.parametrize(
    ("line", "is_after_cache"),
    [
        ("# GPU blocks: 229, # CPU blocks: 512", True),
        ("# cuda blocks: 7299, # CPU blocks: 2048", True),
        ("GPU KV cache size: 23,648 tokens", True),
        ("Capturing cudagraphs for decoding. This may lead to unexpected consequences", True),
        ("Capturing the model for CUDA graphs. This may lead to unexpected consequences", True),
        ("Capturing CUDA graph shapes:   0%|          | 0/67 [00:00<?, ?it/s]", True),
        ("Loading model weights took 15.08 GB", False),
    ],
)
def test_lines_of_the_log_say_that_the_cache_was_allocated(line: str, is_after_cache: bool):
    text = f"(EngineCore pid=9) {line}\n(EngineCore pid=9) " + torch_error()
    assert ("--gpu-memory-utilization" in commands(text)[0]) is is_after_cache


def test_code_that_uses_an_engine_is_not_the_engine():
    frames = frames_of("generate") + '  File "/w/train.py", line 3, in step\n    loss.backward()\n'
    assert diagnosis(torch_error(frames)).source == "torch"


# -- SGLang ------------------------------------------------------------------------------------------------------------


# -- TGI and TensorRT-LLM ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("component", "cause", "option"),
    [
        ("Model", "weights", "--tp_size 2"),
        ("Draft model for speculative decoding", "weights", "--tp_size 2"),
        ("Model resources created during usage", "engine-batch", "--max_num_tokens 4096"),
        ("Sampler", "engine-batch", "--max_num_tokens 4096"),
        ("Initial KV Cache (temporary for KV cache size estimation)", "engine-batch", "--max_num_tokens 4096"),
        ("KV cache", "kv-cache", "--kv_cache_free_gpu_memory_fraction 0.8"),
    ],
)
def test_the_component_decides(component: str, cause: str, option: str):
    text = (
        "Executor creation failed due to insufficient GPU memory.\n\nThe following component could not be created: "
        f"{component}\nTotal GPU memory (GiB): 140.06\nFree GPU memory before component creation attempt (GiB): 139.00"
    )
    found = diagnosis(text)
    assert (found.cause, found.figures.free.text) == (cause, "139.00 GiB")
    assert option in found.steps[0].command


# -- llama.cpp and Ollama ----------------------------------------------------------------------------------------------

FREE = "llama_model_load_from_file_impl: using device CUDA0 (NVIDIA A100) - 40000 MiB free\n"
MODEL = "load_tensors: offloaded 61/61 layers to GPU\nload_tensors:        CUDA0 model buffer size = 20000.00 MiB\n"


def cuda_error(size: str, after: str) -> str:
    return f"ggml_cuda: allocating {size} MiB on device 0: cudaMalloc failed: out of memory\n{after}\n"


@pytest.mark.parametrize(
    ("after", "cause"),
    [
        ("ggml_gallocr_reserve_n: failed to allocate CUDA0 buffer of size 1", "engine-batch"),
        (
            "alloc_tensor_range: failed to allocate CUDA0 buffer of size 1\nllama_model_load: error loading model: x",
            "weights",
        ),
        (
            "alloc_tensor_range: failed to allocate CUDA0 buffer of size 1\nfailed to allocate buffer for kv cache",
            "kv-cache",
        ),
        ("", "device-memory"),
    ],
)
def test_the_lines_after_a_failed_buffer_say_what_it_was_for(after: str, cause: str):
    assert diagnosis(cuda_error("512.00", after)).cause == cause


def test_the_line_on_a_model_that_does_not_load_is_enough():
    found = diagnosis(
        "Error: llama runner process has terminated: error loading model: unable to allocate CUDA0 buffer"
    )
    assert (found.source, found.cause) == ("ggml in Ollama", "weights")
    assert found.steps[0].command == "/set parameter num_gpu 20"


def test_a_buffer_of_another_backend():
    found = diagnosis("0.1 E alloc_tensor_range: failed to allocate Vulkan0 buffer of size 1632174080")
    assert (found.source, found.figures.tried.num_bytes) == ("ggml in llama.cpp", 1632174080)
    assert diagnosis("alloc_tensor_range: failed to allocate CPU buffer of size 37748736000").cause == "host-memory"


# -- XLA ---------------------------------------------------------------------------------------------------------------

EXHAUSTED = "XlaRuntimeError: RESOURCE_EXHAUSTED: "
HBM = EXHAUSTED + "XLA:TPU compile permanent error. Ran out of memory in memory space hbm. "


@pytest.mark.parametrize(
    ("text", "program", "needed", "available", "words"),
    [
        (HBM + "Used 35.56G of 31.25G hbm.",
         "JAX", "35.56 GiB", "31.25 GiB", "88%"),
        (EXHAUSTED + "TPU TensorCore Hbm usage: 34.82G, SparseCore Hbm usage 174.10G, "
         "exceeding available bytes: 95.74G",
         "JAX", "208.92 GiB", "95.74 GiB", "46%"),
        (EXHAUSTED + "Out of memory while trying to allocate 629145600 bytes.",
         "JAX", "629145600 bytes", None, "three quarters"),
        (EXHAUSTED + "Out of memory allocating 2147483648 bytes.", "JAX", "2147483648 bytes", None, "three quarters"),
        ("import torch_xla\n" + EXHAUSTED +
         "Attempting to allocate 1.50G. That was not possible. There are 1.27G free.",
         "torch_xla", "1.50 GiB", "1.27 GiB", "each step"),
        ("tensorflow.errors.ResourceExhaustedError: OOM when allocating tensor with shape[64,1024] and type float on "
         "/job:localhost/device:GPU:0 by allocator GPU_0_bfc", "TensorFlow", "256.00 KiB", None, "as it is needed"),
    ],
)  # fmt: skip
def test_xla_and_who_uses_it(text: str, program: str, needed: str, available: str | None, words: str):
    found = diagnosis(text)
    size = found.figures.total or found.figures.free
    assert found.source.endswith(f"in {program}")
    assert (found.figures.tried.text, size and size.text) == (needed, available)
    assert any(words in step.what for step in found.steps)
