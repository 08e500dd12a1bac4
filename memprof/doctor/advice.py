"""What to do about a cause, in order: cheapest first, what changes the numbers last. Each with its command."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from memprof.doctor.diagnosis import Candidate, Cause, Figures, Step
from memprof.remedy_catalog import REMEDIES


@dataclass(frozen=True, slots=True)
class Run:
    """The run that died, as far as it is known."""

    model: str | None = None
    batch: int | None = None
    length: int | None = None

    def command(self, fix: str = "") -> str:
        """`memprof profile` of it."""
        words = ["memprof", "profile", "--model", self.model or "MODEL"]
        if self.batch:
            words += ["--batch-size", str(self.batch)]
        if self.length:
            words += ["--context-length", str(self.length)]
        return shlex.join(words) + (f" --fix {fix}" if fix else "")


EXPANDABLE = "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"


def _remedy(name: str, run: Run, what: str = "", value: str = "") -> Step:
    remedy = REMEDIES[name]
    text = what or remedy.changes
    if remedy.cost and not remedy.cost.startswith("none"):
        text += f" (costs: {remedy.cost})"
    return Step(text, run.command(f"{name}{value}"), remedy=name)


def steps(cause: Cause, figures: Figures, tensors: tuple[Candidate, ...], run: Run, source: str) -> tuple[Step, ...]:
    """What to try for `cause`, in order."""
    if cause in _FIXED:
        return _FIXED[cause]
    if source.startswith("torch (MPS)"):
        return _MPS
    if cause is Cause.OTHER_PROCESSES:
        return (
            Step("see who is on the card", "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"),
            Step(
                "end what is left over of an earlier run (a notebook keeps its card until its kernel ends)", "kill PID"
            ),
            Step("or take another card", "CUDA_VISIBLE_DEVICES=1 python ..."),
            Step("how much your own run needs", run.command()),
        )
    if cause is Cause.MEMORY_LIMIT:
        return (
            Step(
                "raise or remove the limit, set in the program or as per_process_memory_fraction in "
                "the allocator's settings",
                "torch.cuda.set_per_process_memory_fraction(1.0)",
                "python",
            ),
            Step("how much the run needs", run.command()),
        )
    if cause is Cause.FREE_REFUSED:
        return (
            Step(
                "see what the driver shows while the run goes on: another process may come and go",
                "memprof monitor -- python train.py",
            ),
            Step(
                "no single segment is asked for any more, so that no one piece must be had",
                EXPANDABLE,
                remedy="expandable-segments",
            ),
            Step(
                "check limits that free memory does not show: a container's, a slice's (MIG), a virtual GPU's, and on "
                "Windows the page file, which backs what cards commit",
                "memprof doctor --env",
            ),
        )
    if cause is Cause.LIBRARY_HANDLE:
        return (
            Step(
                "the library asks the driver for memory beside torch's, which has taken it all: leave it some",
                "torch.cuda.set_per_process_memory_fraction(0.95)",
                "python",
            ),
            Step(
                "a smaller batch shows whether memory is the matter; if the error stays, it is the installation",
                "memprof doctor --env",
            ),
            Step(
                "an index out of range (labels, token ids) ends in the same message: run once on the CPU, or with",
                "CUDA_LAUNCH_BLOCKING=1 python train.py",
            ),
            *_smaller(run, tensors)[:3],
        )
    first: tuple[Step, ...] = ()
    if cause is Cause.FRAGMENTATION:
        first = (
            Step(
                "let segments grow instead of asking for others: what is reserved and unused becomes usable",
                EXPANDABLE,
                remedy="expandable-segments",
            ),
            Step("sizes that change from batch to batch leave gaps: pad lengths to multiples of 64, or sort by length"),
            Step("see what lies in the gaps", "memprof analyze SNAPSHOT --what-if expandable_segments:True"),
        )
        return first + _smaller(run, tensors)
    return _for_tensor(tensors, run) + _smaller(run, tensors)


def _for_tensor(tensors: tuple[Candidate, ...], run: Run) -> tuple[Step, ...]:
    """Remedies for the very tensor, if it is known."""
    if not tensors:
        return ()
    role = tensors[0].role
    if role.startswith("logits"):
        return (
            _remedy("chunked-loss", run, "compute the loss in chunks: the full logits never exist"),
            Step(
                "in inference and prefill: logits of the last position alone",
                "model(input_ids, logits_to_keep=1)",
                "python",
            ),
        )
    if role.startswith("attention"):
        return (_remedy("sdpa-attention", run, "attention that keeps no scores: attn_implementation='sdpa'"),)
    if "delta" in role:
        return (_remedy("low-rank-npt", run),)
    if role in ("feed-forward activations", "hidden states") or role.startswith(
        ("queries", "keys", "feed-forward act")
    ):
        return (_remedy("activation-checkpointing", run),)
    if "parameters" in role:
        return (_remedy("cpu-offload-optimizer", run), _remedy("8-bit-optimizer", run), _remedy("qlora", run))
    return (_remedy("bfloat16", run), _remedy("4-bit-weights", run))


def _smaller(run: Run, tensors: tuple[Candidate, ...]) -> tuple[Step, ...]:
    """A run that takes less, in order; what `_for_tensor` said is left out."""
    said = {step.remedy for step in _for_tensor(tensors, run)}
    if run.batch == 1:
        said.add("micro-batch")
    listed = (
        Step(
            "let memprof search: the set of remedies whose step takes least among those that fit", run.command("auto")
        ),
        _remedy(
            "bfloat16",
            run,
            "parameters and activations in half precision, if they are float32 (autocast: amp-bfloat16)",
        ),
        _remedy("micro-batch", run, "fewer rows at a time, gradients added up: the same step"),
        _remedy("activation-checkpointing", run),
        _remedy("8-bit-optimizer", run),
        _remedy("lora", run),
        _remedy("cpu-offload-optimizer", run),
        _remedy("cpu-offload-weights", run),
        Step("torch.cuda.empty_cache() does not help: torch gives back its cache itself before it raises this error"),
    )
    return tuple(step for step in listed if not step.remedy or step.remedy not in said)


_MPS = (
    Step("a smaller batch, half precision, or a smaller model: the GPU shares the computer's memory"),
    Step("close what else uses memory: other allocations are other programs' and this one's outside torch"),
    Step("lift the limit, at the risk that the system swaps or stops", "export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"),
)
_FIXED: dict[Cause, tuple[Step, ...]] = {
    Cause.KV_CACHE: (
        Step(
            "give the engine more of the card, if nobody else is on it",
            "vllm serve MODEL --gpu-memory-utilization 0.95",
        ),
        Step("shorter sequences", "vllm serve MODEL --max-model-len 8192"),
        Step("a smaller cache: one byte a value", "vllm serve MODEL --kv-cache-dtype fp8"),
        Step("no CUDA graphs, which take memory too", "vllm serve MODEL --enforce-eager"),
        Step("spread the weights over cards", "vllm serve MODEL --tensor-parallel-size 2"),
        Step("how much weights and cache take", "memprof profile --model MODEL --mode inference --context-length 8192"),
    ),
    Cause.ENGINE_BUDGET: (
        Step("see who is on the card", "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"),
        Step("end what is left over of an earlier engine: its worker processes outlive it", "kill PID"),
        Step("or ask for no more than is free", "vllm serve MODEL --gpu-memory-utilization 0.8"),
    ),
    Cause.MODEL_SPILLS: (
        Step("see how the model was spread, and on what", "print(model.hf_device_map)", "python"),
        Step(
            "weights in 4 bits: a quarter of half precision",
            "memprof profile --model MODEL --quantize nf4 --mode inference",
            remedy="4-bit-weights",
        ),
        Step(
            "or run with the rest in host memory, slowly",
            'device_map="auto", llm_int8_enable_fp32_cpu_offload=True',
            "python",
        ),
        Step("other processes may have the card: see who does", "memprof gpus --present"),
    ),
    Cause.HOST_KILLED: (
        Step("was it the kernel, for want of host memory?", "dmesg -T | grep -i -E 'out of memory|killed process'"),
        Step("watch resident memory, and who takes it", "memprof monitor --log memory.csv -- python train.py"),
        Step(
            "load weights once and straight to the card, not once per process",
            'from_pretrained(..., device_map={"": local_rank}, dtype="auto")',
            "python",
        ),
        Step(
            "what is offloaded to the host takes 12 to 16 bytes a parameter there: offload less, or to disk",
            "memprof profile --model MODEL --ladder",
        ),
        Step(
            "fewer DataLoader workers: each copies what it touches of the dataset",
            "DataLoader(..., num_workers=2)",
            "python",
        ),
        Step(
            "batches made one at a time",
            "memprof profile --model MODEL --fix streamed-batches",
            remedy="streamed-batches",
        ),
        Step("in a container or a job: raise its memory limit", "docker run --memory 64g ...  # sbatch --mem=64G"),
    ),
    Cause.HOST_MEMORY: (
        Step("how much host memory there is, pinned memory's limit among it", "memprof doctor --env"),
        Step(
            "the request's size says what it is (a whole dataset, all logits of an evaluation, a model in float32): "
            "make it in pieces"
        ),
        Step(
            "pinned memory cannot be swapped: fewer workers, or none pinned",
            "DataLoader(..., pin_memory=False)",
            "python",
        ),
    ),
    Cause.SHARED_MEMORY: (
        Step("how large /dev/shm is, and how full", "df -h /dev/shm"),
        Step("a container has 64 MiB unless told otherwise", "docker run --shm-size=16g ...  # or --ipc=host"),
        Step("fewer workers, fewer batches ahead", "DataLoader(..., num_workers=2, prefetch_factor=1)", "python"),
        Step(
            "tensors of workers as files instead", 'torch.multiprocessing.set_sharing_strategy("file_system")', "python"
        ),
    ),
}
