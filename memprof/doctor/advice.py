"""Advice for each cause of an error, with commands: at most four steps, what helps most first."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice

from memprof.doctor import torch_advice
from memprof.doctor.diagnosis import Advice, Cause
from memprof.doctor.engines.engine import LIST_PROCESSES
from memprof.doctor.torch_advice import FailedAllocation
from memprof.fixes.catalog import find_fixes_for
from memprof.units import GIB, parse_gib

MAX_STEPS = 4
_SPILL_FIX = find_fixes_for("doctor: spilled")[0]
_HOST_FIX = find_fixes_for("doctor: host memory")[0]
_PROFILE = "memprof profile --model MODEL"
# Causes in an engine that are not of the engine's options.
_COMMON_CAUSES = (Cause.OTHER_PROCESSES, Cause.MEMORY_LIMIT, Cause.FREE_REFUSED)


def list_advice(
    cause: Cause, source: str, failed: FailedAllocation, engine_steps: Iterator[Advice] | None = None
) -> tuple[Advice, ...]:
    """Return the advice for `cause`, most useful first; `engine_steps` are those of the engine that failed, if any."""
    steps = _list_steps(cause, source, _complete_run(failed), engine_steps)
    by_text: dict[tuple[str, str], Advice] = {}
    for step in steps:
        by_text.setdefault((step.command, "" if step.command else step.what), step)
        if len(by_text) == MAX_STEPS:
            break
    return tuple(by_text.values())


def _complete_run(failed: FailedAllocation) -> FailedAllocation:
    """Return `failed` with what the message says of its run: the GPU's size, and the setting that makes the tensor."""
    sizes, tensors, run = failed.sizes, failed.tensors, failed.run
    if sizes.total is not None and sizes.total.num_bytes >= GIB:
        run = replace(run, gpu_bytes=parse_gib(f"{sizes.total.num_bytes / GIB:.2f}"))  # as printed
    if tensors and "delta" in tensors[0].role:
        run = replace(run, npt="dense")
    if tensors and tensors[0].role == "attention scores":
        run = replace(run, attention="eager")  # only eager attention stores scores
    return replace(failed, run=run)


def _list_steps(
    cause: Cause, source: str, failed: FailedAllocation, engine_steps: Iterator[Advice] | None
) -> Iterator[Advice]:
    if engine_steps is not None and cause not in _COMMON_CAUSES:
        if cause is Cause.FRAGMENTATION:
            yield from islice(torch_advice.list_fragmentation_advice(failed), 1)
        yield from engine_steps
        return
    if source in _ADVICE_BY_SOURCE:
        yield from _ADVICE_BY_SOURCE[source]
    elif cause in _ADVICE_BY_CAUSE:
        yield from _ADVICE_BY_CAUSE[cause]
    elif cause is Cause.HOST_KILLED:
        yield from _list_killed_advice(source, failed)
    elif cause in _TORCH_ADVICE:
        yield from _TORCH_ADVICE[cause](failed)
    else:
        steps = torch_advice.list_memory_advice(failed)
        if cause is Cause.DEVICE_MEMORY and source == "CUDA":
            # The message has no figures: others may have the GPU, unless the traceback says more.
            yield from islice(steps, 1 if failed.frames else 0)
            yield LIST_PROCESSES
        yield from steps


_TORCH_ADVICE = {
    Cause.FRAGMENTATION: torch_advice.list_fragmentation_advice,
    Cause.OTHER_PROCESSES: torch_advice.list_other_process_advice,
    Cause.MEMORY_LIMIT: torch_advice.list_limit_advice,
    Cause.FREE_REFUSED: torch_advice.list_refusal_advice,
    Cause.LIBRARY_HANDLE: torch_advice.list_library_advice,
}


def _list_killed_advice(source: str, failed: FailedAllocation) -> Iterator[Advice]:
    """Yield advice for a killed process: what the log says of it decides the order."""
    log = failed.log
    limit = Advice("raise the memory limit of the container or job", "docker run --memory 64g ...  # sbatch --mem=64G")
    is_limited = re.search(r"cgroup|docker|kube|slurm|137\b", log, re.I) is not None
    if source not in ("the kernel", "the scheduler"):
        command = "dmesg -T | grep -i -E 'out of memory|killed process'"
        yield Advice("was it the kernel, for want of host memory?", command)
    if source == "the scheduler":
        yield limit
    if "DataLoader" in log or source == "torch (DataLoader)":
        yield Advice.python(
            "fewer DataLoader workers: each copies what it touches of the dataset", "DataLoader(..., num_workers=2)"
        )
    if re.search(r"from_pretrained|checkpoint shards|safetensors|load_checkpoint", log):
        yield Advice.python(
            "load weights once and straight to the GPU, not once per process",
            'from_pretrained(..., device_map={"": local_rank}, dtype="auto")',
        )
    if re.search(r"offload|zero.?3|stage3", log, re.I):
        what = "what is offloaded to the host takes 12 to 16 bytes a parameter there: offload less, or to disk"
        yield Advice(what, f"{_PROFILE} --ladder")
    script = failed.run.script or "train.py"
    yield Advice("watch resident memory, and who takes it", f"memprof monitor --log memory.csv -- python {script}")
    if is_limited:
        yield limit
    command = f"{_PROFILE} --dataset-batches 100 --fix {_HOST_FIX.name}"
    yield Advice("batches made one at a time", command, fix=_HOST_FIX.name)
    yield limit


# Source of an error -> advice, for libraries that need other fixes than torch.
_ADVICE_BY_SOURCE: dict[str, tuple[Advice, ...]] = {
    "torch (MPS)": (
        Advice("a smaller batch, half precision, or a smaller model: the GPU shares the computer's memory"),
        Advice.python(
            "drop what is no longer used; other allocations are this process's too, such as graphs that Metal has "
            "compiled, one for each shape: pad batches to few shapes",
            "torch.mps.empty_cache()",
        ),
        Advice(
            "lift the limit, at the risk that the system swaps or stops", "export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"
        ),
    ),
    "NCCL": (
        Advice("let NCCL say which call failed, and for want of what", "NCCL_DEBUG=WARN torchrun train.py"),
        Advice.python(
            "NCCL takes its buffers from the driver, beside torch's cache: leave it some of the GPU",
            "torch.cuda.set_per_process_memory_fraction(0.95)",
        ),
        Advice("smaller buffers: a quarter of 4 MiB for each channel and peer", "export NCCL_BUFFSIZE=1048576"),
        Advice.python(
            "one GPU for each process: two on one GPU also end in this",
            'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))',
        ),
    ),
    "bitsandbytes": (
        Advice("paged states lie in memory that GPU and host share: was the host's full?", "free -h"),
        Advice.python("an optimizer whose states are not paged", 'TrainingArguments(optim="adamw_8bit")'),
        LIST_PROCESSES,
    ),
}
_ADVICE_BY_CAUSE: dict[Cause, tuple[Advice, ...]] = {
    Cause.NOT_KNOWN: (
        Advice("a smaller batch: if the error goes, memory was the matter"),
        Advice.python("without cuDNN torch's own kernels say what they lack", "torch.backends.cudnn.enabled = False"),
        Advice.python("or an input that is not laid out in order", "x = x.contiguous()"),
        Advice("or an installation that does not belong together", "memprof doctor --env"),
    ),
    Cause.MODEL_SPILLS: (
        Advice.python("see how the model was spread, and on what", "print(model.hf_device_map)"),
        Advice(
            "weights in 4 bits: a quarter of half precision",
            "memprof profile --model MODEL --quantize nf4 --mode inference",
            fix=_SPILL_FIX.name,
        ),
        Advice.python(
            "or run with the rest in host memory, slowly", 'device_map="auto", llm_int8_enable_fp32_cpu_offload=True'
        ),
        Advice("other processes may have the GPU: see who does", "memprof gpus --present"),
    ),
    Cause.HOST_MEMORY: (
        Advice(
            "the request's size says what it is (a whole dataset, all logits of an evaluation, a model in float32): "
            "make it in pieces"
        ),
        Advice("how much host memory there is, pinned memory's limit among it", "memprof doctor --env"),
        Advice.python(
            "pinned memory cannot be swapped: fewer workers, or none pinned", "DataLoader(..., pin_memory=False)"
        ),
    ),
    Cause.SHARED_MEMORY: (
        Advice("how large /dev/shm is, and how full", "df -h /dev/shm"),
        Advice("a container has 64 MiB unless told otherwise", "docker run --shm-size=16g ...  # or --ipc=host"),
        Advice.python("fewer workers, fewer batches ahead", "DataLoader(..., num_workers=2, prefetch_factor=1)"),
        Advice.python(
            "tensors of workers as files instead", 'torch.multiprocessing.set_sharing_strategy("file_system")'
        ),
    ),
}
