"""From logs to diagnoses: which error is the one, where it was, which tensor, and what is not a log."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest

from memprof.allocator import OomReport, parse_release
from memprof.doctor import Cause, Diagnosis, ReportedRun, diagnose
from memprof.doctor.dimensions import find_dimensions, find_model_name, get_dimensions
from memprof.doctor.doctor import _CAUSES_WITHOUT_TENSOR, _SOURCES_WITHOUT_TENSOR
from memprof.doctor.tensors import TensorQuery, find_candidates
from memprof.errors import UsageError
from memprof.fixes.catalog import FIXES
from memprof.workload.catalog import find_model

GIB, MIB = 1 << 30, 1 << 20
LOGITS = 131072 * 151936 * 2


def diagnoses(text: str | bytes, **known: object) -> list[Diagnosis]:
    data = text if isinstance(text, bytes) else text.encode()
    return diagnose(io.BytesIO(data), "log", ReportedRun(**known))


def test_the_sizes_of_some_errors_are_not_those_of_a_tensor():
    engines = (Cause.ENGINE_BUDGET, Cause.ENGINE_BATCH, Cause.KV_CACHE, Cause.WEIGHTS)
    others = (Cause.HOST_KILLED, Cause.SHARED_MEMORY, Cause.LIBRARY_HANDLE, Cause.NOT_KNOWN)
    assert {*engines, *others} <= _CAUSES_WITHOUT_TENSOR
    assert {"ggml", "XLA", "TensorFlow", "TensorRT-LLM"} <= _SOURCES_WITHOUT_TENSOR


def report(find_request_range: int = LOGITS, **changes: int) -> OomReport:
    tried = -(-find_request_range // (2 * MIB)) * 2 * MIB
    figures = {
        "total_bytes": 80 * GIB, "free_bytes": 20 * GIB, "allocated_bytes": 57 * GIB, "reserved_bytes": 58 * GIB,
        "process_bytes": 59 * GIB, "device": 0,
    }  # fmt: skip
    return OomReport(find_request_range, tried, **{**figures, **changes})


@pytest.mark.parametrize("version", ["2.0.1", "2.1.2", "2.2.0", "2.6.0", "2.9.1", "2.10.0", "2.13.0", "2.15.0"])
def test_the_message_of_every_release_gives_its_figures_back(version: str):
    wanted = report(private_pool_bytes=0 if version == "2.0.1" else 64 * MIB)
    (found,) = diagnoses("torch.OutOfMemoryError: " + wanted.message(parse_release(version)))
    assert " on a GPU of 80.00 GiB" in found.title
    figures = found.figures
    for size, expected in (
        (figures.tried, wanted.tried_bytes),
        (figures.total, wanted.total_bytes),
        (figures.free, wanted.free_bytes),
        (figures.allocated, wanted.allocated_bytes),
        (figures.reserved, wanted.reserved_bytes),
    ):
        assert size is not None
        assert size.low <= expected <= size.high
    assert found.cause is Cause.LARGE_TENSOR
    # The tensor too, from its rounded size alone.
    assert found.tensors[0].shape == (1, 131072, 151936)
    assert found.tensors[0].dtype == "bfloat16"


def test_the_tensor_of_given_sizes_comes_first():
    text = report().message()
    (found,) = diagnoses(text, model="qwen3-4b", batch_size=1, context_length=131072)
    first = found.tensors[0]
    assert (first.shape, first.dtype, first.role, first.exact) == ((1, 131072, 151936), "bfloat16", "logits", True)
    assert first.num_bytes == LOGITS
    assert found.steps[0].fix == "chunked-loss"
    assert "--model qwen3-4b --context-length 131072 --gpu-vram 80" in found.steps[0].command


@pytest.mark.parametrize(
    ("shape", "item", "role"),
    [
        ((2, 4096, 128256), 4, "logits"),
        ((4, 32, 8192, 8192), 2, "attention scores"),
        ((8, 4096, 14336), 2, "feed-forward activations"),
        ((8, 8192, 4096), 2, "hidden states"),
    ],
)
def test_tensors_of_a_known_run_are_named(shape: tuple[int, ...], item: int, role: str):
    length = shape[1] if len(shape) == 3 else shape[2]
    text = report(math.prod(shape) * item).message()
    (found,) = diagnoses(text, model="llama-3.1-8b", batch_size=shape[0], context_length=length)
    assert found.tensors[0].shape == shape
    assert found.tensors[0].role == role
    assert found.tensors[0].exact


def test_dimensions_of_a_configuration_file(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": 1024, "num_attention_heads": 16, "vocab_size": 77777, "torch_dtype": "float16"}')
    shape = (3, 5000, 77777)
    for name in (path, tmp_path):
        (found,) = diagnoses(report(math.prod(shape) * 2).message(), model=str(name), batch_size=3, context_length=5000)
        first = found.tensors[0]
        assert (first.shape, first.dtype, first.role) == (shape, "float16", "logits")
    path.write_text("[]")
    with pytest.raises(UsageError, match="configuration"):
        diagnoses("Killed", model=str(path))


def test_a_size_that_fits_nothing_well_gets_no_name():
    # 12,347 tokens of a vocabulary: chance finds as much.
    low = 12_347 * 151_936 * 2
    assert find_candidates(TensorQuery(low - 2 * MIB, low)) == []


@pytest.mark.parametrize(
    ("size", "is_told"), [(1 << 32, False), (3 << 31, False), (5 << 30, True), (8192 * 128256 * 4, True)]
)
def test_a_round_size_is_not_known_by_itself(size, is_told):
    """4 GiB are as many bfloat16 logits of 32,768 words as scores of 8 heads, or weights."""
    assert bool(find_candidates(TensorQuery(size, size))) == is_told
    query = TensorQuery(size, size, roles=frozenset({"logits"}))
    assert ("logits" in {one.role for one in find_candidates(query)}) == (size == 8192 * 128256 * 4)


def test_a_buffer_of_ggml_is_no_tensor():
    """It has all weights of a model, its cache or its graph."""
    what = "ggml_backend_cuda_buffer_type_alloc_buffer: allocating 4008.00 MiB on device 0"
    (found,) = diagnoses(f"{what}: cudaMalloc failed: out of memory")
    assert found.source == "ggml in llama.cpp" and not found.tensors


def test_a_size_of_no_known_model_is_not_of_more_tokens_than_the_gpu_had_room_for():
    low, high = (int(amount * 2**30) for amount in (447.995, 448.005))
    found = find_candidates(TensorQuery(low, high, allocated_bytes=18 << 30))
    assert {candidate.role for candidate in found} == {"one weight delta for each token"}
    assert found[0].shape[1:] == (4096, 4096 * 14336)
    # 7,340,032 tokens of hidden states, 4,096 wide: 56 GiB were there before their logits.
    assert (1, 7_340_032, 32_768) not in [candidate.shape for candidate in found]


def test_a_configuration_nested_without_end_is_one_error(tmp_path: Path):
    path = tmp_path / "config.json"
    path.write_text('{"hidden_size": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(UsageError, match="not a model's configuration"):
        find_dimensions(str(path))


def test_every_model_of_the_catalog_has_dimensions():
    for name in ("gpt2", "llama-3.1-8b", "qwen3-30b-a3b", "t5-base", "mamba-130m", "falcon-7b"):
        found = get_dimensions(find_model(name))
        assert found.hidden > 0
        assert found.vocabulary > 0
    assert get_dimensions(find_model("falcon-7b")).kv_heads == 1
    assert get_dimensions(find_model("qwen3-30b-a3b")).num_experts == 128


@pytest.mark.parametrize(
    ("text", "key"),
    [
        ("python train.py --model_name_or_path Qwen/Qwen3-4B", "qwen3-4b"),
        ("model='meta-llama/Llama-3.1-8B-Instruct', dtype=torch.bfloat16", "llama-3.1-8b"),
        ("vllm serve Qwen/Qwen2.5-7B-Instruct --port 80", "qwen2.5-7b"),
        ("model = Net()", None),
    ],
)
def test_a_model_that_the_log_names_is_found(text: str, key: str | None):
    assert find_model_name(text) == key


MISMATCH = """[rank1]: Traceback (most recent call last):
[rank0]: Traceback (most recent call last):
[rank1]:   File "/app/other.py", line 9, in g
[rank0]:   File "/app/train.py", line 5, in main
[rank0]:     model(x)
[rank1]:     oops()
[rank0]:   File "/app/net.py", line 31, in forward
[rank0]:     return x @ self.mask
[rank0]: RuntimeError: Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! \
(when checking argument for argument mat2 in method wrapper_CUDA_mm)
"""


def test_the_guilty_line_is_of_the_rank_that_failed():
    (found,) = diagnoses(MISMATCH)
    assert found.cause is Cause.DEVICE_MISMATCH
    assert found.devices == ("cuda:0", "cpu")
    assert found.where[0] == "/app/net.py:31 forward: return x @ self.mask"
    assert any(step.fix == "device-placement" for step in found.steps)


def test_the_first_cause_explains_what_follows_it():
    text = "starting\n" + report().message() + "\n" + "x\n" * 20 + "exits with return code = -9\n" + report().message()
    first, second = diagnoses(text)
    assert (first.cause, first.line, first.count) == (Cause.LARGE_TENSOR, 2, 2)
    assert (second.cause, second.line) == (Cause.HOST_KILLED, 23)


def test_every_fix_that_is_advised_exists():
    for text in (report().message(), "Killed", "No available memory for the cache blocks.", MISMATCH):
        for step in diagnoses(text)[0].steps:
            assert not step.fix or step.fix in FIXES
            assert step.what


def test_a_container_takes_itself_for_another_process():
    text = (
        "CUDA out of memory. Tried to allocate 128.00 MiB. GPU 0 has a total capacity of 79.33 GiB of which 16.00 MiB "
        "is free. Process 7 has 79.29 GiB memory in use. Of the allocated memory 69.59 GiB is allocated by PyTorch, "
        "and 18.90 MiB is reserved by PyTorch but unallocated."
    )
    assert diagnoses(text)[0].cause is Cause.GPU_FULL
    assert diagnoses(text.replace("69.59", "1.59").replace("79.29", "70.29"))[0].cause is Cause.OTHER_PROCESSES


@pytest.mark.parametrize(
    "data",
    [b"\x80\x04\x95snapshot", b"\x1f\x8b\x08", b"PK\x03\x04", bytes(range(32)) * 200, b"\x7fELF" + bytes(900)],
    ids=["pickle", "gzip", "zip", "bytes", "program"],
)
def test_what_is_no_text_is_refused(data: bytes):
    with pytest.raises(UsageError):
        diagnoses(data)


def test_text_of_powershell_is_read():
    text = "\ufeff" + "line\r\n" * 3 + report().message() + "\r\n"
    (found,) = diagnoses(text.encode("utf-16-le"))
    assert (found.cause, found.line) == (Cause.LARGE_TENSOR, 4)


def test_an_error_across_the_ends_of_pieces_is_found_whatever_stands_around_it(monkeypatch: pytest.MonkeyPatch):
    from memprof.doctor import log

    message = b"torch.OutOfMemoryError: " + report().message().encode() + b"\n"
    monkeypatch.setattr(log, "_CHUNK_BYTES", 64 << 10)
    for shift in (0, 1, 500, 900):
        lines = b"loss 1.0\n" * ((64 << 10) // 9 * 2) + b"." * shift + b"\n"
        (found,) = diagnoses(lines + message + b"after\n" * 20_000)
        assert found.line == lines.count(b"\n") + 1
        assert found.figures.total is not None


def test_figures_that_make_no_sense_are_no_trouble():
    text = "CUDA out of memory. Tried to allocate 7.00 GiB (GPU 0; 0 bytes total capacity; 0 bytes already allocated; "
    text += "0 bytes free; 17179869184.00 GiB reserved in total by PyTorch)"
    (found,) = diagnoses(text)
    assert found.cause is Cause.DEVICE_MEMORY
    assert found.figures.reserved is None


@pytest.mark.nightly
def test_memory_is_bounded_and_repeated_errors_are_not_all_looked_at():
    import tracemalloc

    class Endless(io.RawIOBase):
        left = 64 << 20

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: object) -> int:
            view = memoryview(buffer)  # type: ignore[arg-type]
            count = min(len(view), self.left)
            line = report().message().encode() + b"\n"
            view[:count] = (line * (count // len(line) + 1))[:count]
            self.left -= count
            return count

    tracemalloc.start()
    found = diagnose(io.BufferedReader(Endless()), "log")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 32 << 20
    assert found[0].count > 10


def test_every_word_of_a_signature_is_searched_for():
    from memprof.doctor import log
    from memprof.doctor.signatures import SIGNATURES

    searched = {word for words in log._WORDS_BY_ANCHOR.values() for word in words}
    assert {word.encode() for signature in SIGNATURES for word in signature.words} == searched
    assert all(log._WORDS_BY_ANCHOR.values())


def full_gpu(unused: int, **changes: int) -> OomReport:
    """A GPU of 7.62 GiB with 7.13 GiB of tensors."""
    allocated = int(7.13 * GIB)
    figures = {
        "total_bytes": int(7.62 * GIB), "free_bytes": 10 * MIB, "allocated_bytes": allocated,
        "reserved_bytes": allocated + unused, "process_bytes": int(7.6 * GIB),
    }  # fmt: skip
    return report(20 * MIB, **{**figures, **changes})


@pytest.mark.parametrize("version", ["2.0.1", "2.1.2", "2.15.0"])
@pytest.mark.parametrize("unused", [0, 4 * MIB, 90 * MIB, 300 * MIB])
def test_a_gpu_full_of_tensors_is_not_fragmented(version: str, unused: int):
    (found,) = diagnoses("torch.OutOfMemoryError: " + full_gpu(unused).message(parse_release(version)))
    assert found.cause is Cause.GPU_FULL
    assert all("ALLOC_CONF" not in step.command for step in found.steps)
    serves = any("in one piece the rest would serve this request" in line for line in found.explanation)
    assert serves == (unused > 10 * MIB)


@pytest.mark.parametrize(
    ("version", "before", "command"),
    [
        ("2.0.1", "", "export PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"),
        ("2.6.0", "", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ("2.6.0", '  File "C:\\train.py", line 3, in main\n', "set PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"),
    ],
)
def test_what_helps_against_fragmentation_is_what_the_release_has(version: str, before: str, command: str):
    gaps = full_gpu(3 * GIB, allocated_bytes=4 * GIB, reserved_bytes=7 * GIB)
    (found,) = diagnoses(before + "torch.OutOfMemoryError: " + gaps.message(parse_release(version)))
    assert found.cause is Cause.FRAGMENTATION
    assert found.steps[0].command == command


@pytest.mark.parametrize(
    ("backend", "first"),
    [
        ("hip", "export PYTORCH_HIP_ALLOC_CONF=max_split_size_mb:128"),
        ("xpu", "memprof analyze SNAPSHOT"),
    ],
)
def test_expandable_segments_are_advised_with_cuda_alone(backend: str, first: str):
    """ROCm's own message advises them, and they may hang there; XPU has none."""
    gaps = full_gpu(3 * GIB, allocated_bytes=4 * GIB, reserved_bytes=7 * GIB, backend=backend)
    refused = full_gpu(0, allocated_bytes=2 * GIB, reserved_bytes=2 * GIB, free_bytes=6 * GIB, backend=backend)
    (found,) = diagnoses("torch.OutOfMemoryError: " + gaps.message())
    assert found.cause is Cause.FRAGMENTATION
    assert next(step.command for step in found.steps if step.command) == first
    (other,) = diagnoses("torch.OutOfMemoryError: " + refused.message())
    assert other.cause is Cause.FREE_REFUSED
    assert all("expandable" not in step.command for step in (*found.steps, *other.steps))


def test_before_max_split_size_a_newer_torch_is_all_there_is():
    text = (
        "CUDA out of memory. Tried to allocate 64.00 MiB (GPU 0; 8.00 GiB total capacity; 4.00 GiB already allocated; "
    )
    (found,) = diagnoses(text + "9.00 MiB free; 7.00 GiB reserved in total by PyTorch)")
    assert (found.cause, found.steps[0].command) == (Cause.FRAGMENTATION, "pip install -U torch")


NCCL = """[rank0]: torch.distributed.DistBackendError: NCCL error in: ../torch/csrc/distributed/c10d/NCCLUtils.hpp:5, \
unhandled cuda error (run with NCCL_DEBUG=INFO for details), NCCL version 2.20.5
[rank0]: ncclUnhandledCudaError: Call to CUDA function failed.
"""


@pytest.mark.parametrize(
    ("last", "causes"),
    [
        ("[rank0]: Last error:\n[rank0]: Cuda failure 2 'out of memory'\n", [Cause.LIBRARY_HANDLE]),
        ("[rank0]: Last error:\n[rank0]: Cuda failure 'out of memory'\n", [Cause.LIBRARY_HANDLE]),
        ("", [Cause.NOT_KNOWN]),
        ("[rank0]: Last error:\n[rank0]: Cuda failure 999 'unknown error'\n", []),
        ("[rank0]: Last error:\n[rank0]: Cuda failure 1 'invalid argument'\n", []),
    ],
)
def test_nccl_is_believed_where_it_names_its_error(last: str, causes: list[Cause]):
    found = diagnoses(NCCL + last)
    assert [one.cause for one in found] == causes
    assert all(one.source == "NCCL" and "NCCL_DEBUG" in one.steps[0].command for one in found)


def test_metals_other_allocations_are_this_process_s():
    text = (
        "MPS backend out of memory (MPS allocated: 5.50 GB, other allocations: 14.76 GB, max allowed: 20.40 GB). Tried "
    )
    (found,) = diagnoses(text + "to allocate 147.24 MB on private pool.")
    assert found.cause is Cause.GPU_FULL
    assert not any("kill" in step.command or "nvidia-smi" in step.command for step in found.steps)
    assert "14.76 GiB of this process are outside torch's allocator: graphs and buffers of Metal" in found.explanation


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("XlaRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate 629 bytes.", "XLA_PYTHON_CLIENT"),
        ("CUDA error: out of memory", "nvidia-smi"),
        ("Error out of memory at line 380 in file /a/csrc/pythonInterface.c", "adamw_8bit"),
        ("allocating 512.00 MiB on device 0: cudaMalloc failed: out of memory", "--n-gpu-layers"),
        ("RuntimeError: Not enough memory. Please try to increase --mem-fraction-static.", "sglang.launch_server"),
        ("ValueError: No available memory for the cache blocks.", "vllm serve"),
    ],
)  # fmt: skip
def test_advice_is_of_the_program_that_failed(text: str, word: str):
    (found,) = diagnoses(text)
    assert any(word in step.command for step in found.steps)
    assert ("vllm" in word) == any("vllm" in step.command for step in found.steps)
    torch_s = [step.command for step in found.steps if "--fix" in step.command]
    assert bool(torch_s) == text.startswith("CUDA error")


@pytest.mark.parametrize(
    ("text", "cause", "command"),
    [
        ("RuntimeError: Expected all tensors on same device", Cause.DEVICE_MISMATCH, "other.device"),
        ("Expected all tensors to be on same device, but found", Cause.DEVICE_MISMATCH, "other.device"),
        ("train.py: warning: memory is fragmented", Cause.FRAGMENTATION, "expandable_segments:True"),
    ],
)
def test_shorter_wordings_of_guides_and_programs(text: str, cause: Cause, command: str):
    (found,) = diagnoses(text)
    assert found.cause is cause
    assert command in found.steps[0].command
