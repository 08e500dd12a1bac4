"""Which steps are advised for a cause, in which order, with which options and figures in their commands."""

from __future__ import annotations

from typing import Any

import pytest

from memprof.doctor.advice import _ADVICE_BY_CAUSE, _ADVICE_BY_SOURCE, list_advice
from memprof.doctor.diagnosis import Advice, Candidate, Cause, MessageSizes, PrintedSize
from memprof.doctor.reported_run import ReportedRun
from memprof.doctor.torch_advice import FailedAllocation
from memprof.doctor.tracebacks import TracebackFrame

GIB = 1 << 30
LOGITS = Candidate((1, 8, 50_257), "float32", "logits", 8 * 50_257 * 4, "gpt2")
FRAME = TracebackFrame("/app/train.py", 5, "main", "loss.backward()")


def failed(total: int | None = None, tensors: tuple[Candidate, ...] = (), log: str = "", **run: Any):
    size = None if total is None else PrintedSize("", total, total, total)
    return FailedAllocation(MessageSizes(total=size), tensors, ReportedRun(**run), log=log)


def commands(cause: Cause, source: str = "torch", **known: Any) -> list[str]:
    return [step.command for step in list_advice(cause, source, failed(**known))]


KERNEL, LIMIT = (
    "dmesg -T | grep -i -E 'out of memory|killed process'",
    "docker run --memory 64g ...  # sbatch --mem=64G",
)
WORKERS = "DataLoader(..., num_workers=2)"
WEIGHTS = 'from_pretrained(..., device_map={"": local_rank}, dtype="auto")'
OFFLOAD, WATCH = "memprof profile --model MODEL --ladder", "memprof monitor --log memory.csv -- python train.py"
STREAM = "memprof profile --model MODEL --dataset-batches 100 --fix streamed-batches"


@pytest.mark.parametrize(
    ("source", "log", "expected"),
    [
        ("torchrun", "", [KERNEL, WATCH, STREAM, LIMIT]),
        ("the kernel", "", [WATCH, STREAM, LIMIT]),
        ("the scheduler", "", [LIMIT, WATCH, STREAM]),
        # A container, a scheduler, or the exit code of SIGKILL in the log: a limit may be it.
        *(
            ("torchrun", word, [KERNEL, WATCH, LIMIT, STREAM])
            for word in ("cgroup", "Docker", "kube", "slurm", "137")
        ),
        ("torchrun", "1370", [KERNEL, WATCH, STREAM, LIMIT]),
        ("torch (DataLoader)", "", [KERNEL, WORKERS, WATCH, STREAM]),
        ("the kernel", "DataLoader worker", [WORKERS, WATCH, STREAM, LIMIT]),
        *(
            ("the kernel", word, [WEIGHTS, WATCH, STREAM, LIMIT])
            for word in ("from_pretrained", "Loading checkpoint shards", "model.safetensors", "load_checkpoint")
        ),
        *(
            ("the kernel", word, [OFFLOAD, WATCH, STREAM, LIMIT])
            for word in ("offload_optimizer", "ZeRO-3", "zero3", "Stage3")
        ),
        ("the kernel", "DataLoader from_pretrained offload", [WORKERS, WEIGHTS, OFFLOAD, WATCH]),
    ],
)  # fmt: skip
def test_a_killed_process_gets_what_its_log_speaks_of(source: str, log: str, expected: list[str]) -> None:
    assert commands(Cause.HOST_KILLED, source, log=log) == expected


def test_the_script_of_a_killed_process_is_in_its_command() -> None:
    found = list_advice(Cause.HOST_KILLED, "the kernel", failed(script="run/it.py"))
    assert found[0].command == "memprof monitor --log memory.csv -- python run/it.py"
    assert (found[1].fix, found[1].what) == ("streamed-batches", "batches made one at a time")
    assert "12 to 16 bytes a parameter" in list_advice(Cause.HOST_KILLED, "the kernel", failed(log="offload"))[0].what


@pytest.mark.parametrize(
    ("total", "option"),
    [
        (80 * GIB, "--gpu-vram 80"), (GIB, "--gpu-vram 1"), (int(7.62 * GIB), "--gpu-vram 7.62"), (GIB - 1, ""),
        (None, ""),
    ],
)  # fmt: skip
def test_a_command_has_the_size_of_the_gpu(total: int | None, option: str) -> None:
    (command, *_) = [one for one in commands(Cause.GPU_FULL, total=total, model="gpt2") if "memprof profile" in one]
    assert option in command and bool(option) == ("--gpu-vram" in command)


@pytest.mark.parametrize(
    ("role", "option"),
    [("one weight delta for each token", "--npt dense"), ("attention scores", "--attention eager"), ("logits", "")],
)
def test_a_command_has_the_setting_that_makes_the_tensor(role: str, option: str) -> None:
    tensor = Candidate((1, 8), "float32", role, 32, "gpt2")
    other = Candidate((1, 8), "float32", "attention scores" if role == "logits" else "logits", 32, "gpt2")
    found = [one for one in commands(Cause.GPU_FULL, tensors=(tensor, other), model="gpt2") if "--fix auto" in one]
    assert option in found[0]
    assert sum(name in found[0] for name in ("--npt", "--attention")) == bool(option)


def engine_steps(*names: str):
    return iter([Advice(name, name) for name in names])


@pytest.mark.parametrize(
    ("cause", "expected"),
    [
        (Cause.KV_CACHE, ["a", "b"]),
        (Cause.GPU_FULL, ["a", "b"]),
        # One step of torch's first, as fragments are torch's.
        (Cause.FRAGMENTATION, ["export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "a", "b"]),
    ],
)
def test_an_engine_has_options_of_its_own(cause: Cause, expected: list[str]) -> None:
    found = list_advice(cause, "torch in vLLM", failed(), engine_steps("a", "b"))
    assert [step.command for step in found] == expected


@pytest.mark.parametrize("cause", [Cause.OTHER_PROCESSES, Cause.MEMORY_LIMIT, Cause.FREE_REFUSED])
def test_what_is_not_an_engine_s_matter_has_torch_s_advice(cause: Cause) -> None:
    assert list_advice(cause, "torch", failed(), engine_steps("a")) == list_advice(cause, "torch", failed())
    assert list_advice(cause, "torch", failed())


def test_at_most_four_steps_and_none_twice() -> None:
    steps = [Advice("one", "x"), Advice("other words", "x"), Advice("no command"), Advice("nor this"),
             Advice("no command"), Advice("four", "y"), Advice("five", "z")]  # fmt: skip
    found = list_advice(Cause.KV_CACHE, "vLLM", failed(), iter(steps))
    assert [step.what for step in found] == ["one", "no command", "nor this", "four"]


NVIDIA_SMI = "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"


def test_an_error_of_cuda_has_no_figures_so_others_may_have_the_gpu() -> None:
    assert commands(Cause.DEVICE_MEMORY, "CUDA")[0] == NVIDIA_SMI
    allocation = FailedAllocation(MessageSizes(), (LOGITS,), ReportedRun(), (FRAME,))
    found = [step.command for step in list_advice(Cause.DEVICE_MEMORY, "CUDA", allocation)]
    assert found.index(NVIDIA_SMI) == 1  # the traceback says more
    assert NVIDIA_SMI not in commands(Cause.DEVICE_MEMORY, "torch")[:2]
    assert NVIDIA_SMI not in commands(Cause.GPU_FULL, "CUDA")[:2]


@pytest.mark.parametrize(
    ("cause", "source", "expected"),
    [
        (Cause.GPU_FULL, "torch (MPS)", ["", "torch.mps.empty_cache()", "export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"]),
        (Cause.LIBRARY_HANDLE, "NCCL", [
            "NCCL_DEBUG=WARN torchrun train.py", "torch.cuda.set_per_process_memory_fraction(0.95)",
            "export NCCL_BUFFSIZE=1048576", 'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        ]),
        (Cause.DEVICE_MEMORY, "bitsandbytes", ["free -h", 'TrainingArguments(optim="adamw_8bit")', NVIDIA_SMI]),
        (Cause.NOT_KNOWN, "cuDNN", [
            "", "torch.backends.cudnn.enabled = False", "x = x.contiguous()", "memprof doctor --env",
        ]),
        (Cause.MODEL_SPILLS, "accelerate", [
            "print(model.hf_device_map)", "memprof profile --model MODEL --quantize nf4 --mode inference",
            'device_map="auto", llm_int8_enable_fp32_cpu_offload=True', "memprof gpus --present",
        ]),
        (Cause.LIBRARY_HANDLE, "cuBLAS", [
            "torch.cuda.set_per_process_memory_fraction(0.95)", "CUDA_LAUNCH_BLOCKING=1 python train.py",
            "memprof doctor --env", "memprof profile --model MODEL --fix auto",
        ]),
        (Cause.MEMORY_LIMIT, "torch", [
            "torch.cuda.set_per_process_memory_fraction(1.0)", "memprof profile --model MODEL",
        ]),
        (Cause.OTHER_PROCESSES, "torch", [
            NVIDIA_SMI, "kill PID", "CUDA_VISIBLE_DEVICES=1 python ...", "memprof profile --model MODEL",
        ]),
        (Cause.FREE_REFUSED, "torch", [
            "memprof monitor -- python train.py", "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
            "memprof doctor --env",
        ]),
        (Cause.HOST_MEMORY, "torch", ["", "memprof doctor --env", "DataLoader(..., pin_memory=False)"]),
        (Cause.SHARED_MEMORY, "torch", [
            "df -h /dev/shm", "docker run --shm-size=16g ...  # or --ipc=host",
            "DataLoader(..., num_workers=2, prefetch_factor=1)",
            'torch.multiprocessing.set_sharing_strategy("file_system")',
        ]),
    ],
)  # fmt: skip
def test_commands_of_a_cause(cause: Cause, source: str, expected: list[str]) -> None:
    assert commands(cause, source) == expected


def test_figures_and_languages_of_advice() -> None:
    """What is in Python is not for a shell."""
    for steps in (*_ADVICE_BY_CAUSE.values(), *_ADVICE_BY_SOURCE.values()):
        for step in steps:
            assert (step.code == "python") == step.command.startswith(
                ("torch.", "DataLoader(", "print(", "x = ", "device_map=", "TrainingArguments(")
            )
    assert [step.fix for step in _ADVICE_BY_CAUSE[Cause.MODEL_SPILLS]] == ["", "4-bit-weights", "", ""]
    assert "a quarter of half precision" in _ADVICE_BY_CAUSE[Cause.MODEL_SPILLS][1].what
    assert "64 MiB" in _ADVICE_BY_CAUSE[Cause.SHARED_MEMORY][1].what
    assert "a quarter of 4 MiB" in _ADVICE_BY_SOURCE["NCCL"][2].what  # NCCL_BUFFSIZE is in bytes
