"""What to do about a cause, in order: cheapest first, what changes the numbers last. Each with its command."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from memprof.catalog import find_model, has_model
from memprof.command_line import profile_command
from memprof.doctor.diagnosis import Advice, Candidate, Cause, Figures
from memprof.errors import UsageError
from memprof.remedies.fixes import Fix, edit_spec
from memprof.remedy_catalog import Remedy, helping
from memprof.spec import Mode, TargetSpec
from memprof.units import GIB, parse_gib


@dataclass(frozen=True, slots=True)
class Known:
    """What the user says about the run that died; None: look in the log."""

    model: str | None = None
    batch_size: int | None = None
    context_length: int | None = None
    npt: str | None = None
    card_bytes: int | None = None
    attention: str | None = None

    @property
    def spec(self) -> TargetSpec:
        """The same for `memprof profile`."""
        return TargetSpec(
            model=self.model or "MODEL",
            batch_size=self.batch_size or 1,
            context_length=self.context_length,
            npt=self.npt,
            gpu_vram_bytes=self.card_bytes,
            attention=self.attention,
        )

    def command(self, fix: str = "") -> str:
        """`memprof profile` of it."""
        return profile_command(self.spec.edit(fixes=(fix,) if fix else ()), names_card=False)

    def command_with(self, remedy: Remedy) -> str | None:
        """`memprof profile` of it with a remedy, in inference if it is for that alone; None if it does not apply.

        Of a run that is not known the batch may be of any size.
        """
        dtype = None
        if self.model is not None and has_model(self.model):
            dtype = "float32" if find_model(self.model).checkpoint_dtype == "float32" else "bfloat16"
        specs = [self.spec] if self.batch_size else [self.spec, self.spec.edit(batch_size=2)]
        for mode, spec in itertools.product(Mode, specs):
            try:
                edit_spec(spec.edit(mode=mode), Fix(remedy), {"dtype": dtype})
            except UsageError:
                continue
            return profile_command(spec.edit(mode=mode, fixes=(remedy.name,)), names_card=False)
        return None


_SEGMENTS, _SPILLED = helping("fragmentation")[0], helping("doctor: spilled")[0]
_HOST = helping("doctor: host memory")[0]
"""Cases that have one remedy."""
EXPANDABLE = f"export PYTORCH_CUDA_ALLOC_CONF={_SEGMENTS.alloc_conf}"


def _against(case: str, run: Known) -> tuple[Advice, ...]:
    """The remedies of a case, in order."""
    return tuple(
        Advice(
            remedy.words.get(case, remedy.changes)
            + ("" if remedy.cost.startswith("none") else f" (costs: {remedy.cost})"),
            command,
            remedy=remedy.name,
        )
        for remedy in helping(case)
        if (command := run.command_with(remedy)) is not None
    )


def steps(
    cause: Cause, figures: Figures, tensors: tuple[Candidate, ...], run: Known, source: str
) -> tuple[Advice, ...]:
    """What to try for `cause`, in order."""
    if figures.total is not None and figures.total.num_bytes >= GIB:
        run = replace(run, card_bytes=parse_gib(f"{figures.total.num_bytes / GIB:.2f}"))  # as it was printed
    if tensors and "delta" in tensors[0].role:
        run = replace(run, npt="dense")
    if tensors and tensors[0].role == "attention scores":
        run = replace(run, attention="eager")  # which alone keeps them
    if cause in _FIXED:
        return _FIXED[cause]
    if source.startswith("torch (MPS)"):
        return _MPS
    if cause is Cause.OTHER_PROCESSES:
        return (
            Advice("see who is on the card", "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"),
            Advice(
                "end what is left over of an earlier run (a notebook keeps its card until its kernel ends)", "kill PID"
            ),
            Advice("or take another card", "CUDA_VISIBLE_DEVICES=1 python ..."),
            Advice("how much your own run needs", run.command()),
        )
    if cause is Cause.MEMORY_LIMIT:
        return (
            Advice.python(
                "raise or remove the limit, set in the program or as per_process_memory_fraction in "
                "the allocator's settings",
                "torch.cuda.set_per_process_memory_fraction(1.0)",
            ),
            Advice("how much the run needs", run.command()),
        )
    if cause is Cause.FREE_REFUSED:
        return (
            Advice(
                "see what the driver shows while the run goes on: another process may come and go",
                "memprof monitor -- python train.py",
            ),
            Advice(
                "no single segment is asked for any more, so that no one piece must be had",
                EXPANDABLE,
                remedy=_SEGMENTS.name,
            ),
            Advice(
                "check limits that free memory does not show: a container's, a slice's (MIG), a virtual GPU's, and on "
                "Windows the page file, which backs what cards commit",
                "memprof doctor --env",
            ),
        )
    if cause is Cause.LIBRARY_HANDLE:
        return (
            Advice.python(
                "the library asks the driver for memory beside torch's, which has taken it all: leave it some",
                "torch.cuda.set_per_process_memory_fraction(0.95)",
            ),
            Advice(
                "a smaller batch shows whether memory is the matter; if the error stays, it is the installation",
                "memprof doctor --env",
            ),
            Advice(
                "an index out of range (labels, token ids) ends in the same message: run once on the CPU, or with",
                "CUDA_LAUNCH_BLOCKING=1 python train.py",
            ),
            *_smaller(run, tensors)[:3],
        )
    if cause is Cause.FRAGMENTATION:
        return (
            Advice(
                "let segments grow instead of asking for others: what is reserved and unused becomes usable",
                EXPANDABLE,
                remedy=_SEGMENTS.name,
            ),
            Advice(
                "sizes that change from batch to batch leave gaps: pad lengths to multiples of 64, or sort by length"
            ),
            Advice("see what lies in the gaps", f"memprof analyze SNAPSHOT --alloc-conf {_SEGMENTS.alloc_conf}"),
            *_smaller(run, tensors),
        )
    return _for_tensor(tensors, run) + _smaller(run, tensors)


def _for_tensor(tensors: tuple[Candidate, ...], run: Known) -> tuple[Advice, ...]:
    """Remedies for the very tensor, if it is known."""
    if not tensors:
        return ()
    role = tensors[0].role
    if role.startswith("logits"):
        last = Advice.python(
            "in inference and prefill: logits of the last position alone", "model(input_ids, logits_to_keep=1)"
        )
        return (*_against("doctor: logits", run), last)
    if role.startswith("attention"):
        return _against("doctor: attention", run)
    if "delta" in role:
        return _against("doctor: weight delta", run)
    if role in ("feed-forward activations", "hidden states") or role.startswith(
        ("queries", "keys", "feed-forward act")
    ):
        return _against("doctor: activations", run)
    return _against("doctor: parameters" if "parameters" in role else "doctor: weights", run)


def _smaller(run: Known, tensors: tuple[Candidate, ...]) -> tuple[Advice, ...]:
    """A run that takes less, in order; what `_for_tensor` said is left out."""
    said = {step.remedy for step in _for_tensor(tensors, run)}
    listed = (
        Advice(
            "let memprof search: the set of remedies whose step takes least among those that fit", run.command("auto")
        ),
        *_against("doctor: smaller", run),
        Advice("torch.cuda.empty_cache() does not help: torch gives back its cache itself before it raises this error"),
    )
    return tuple(step for step in listed if not step.remedy or step.remedy not in said)


_MPS = (
    Advice("a smaller batch, half precision, or a smaller model: the GPU shares the computer's memory"),
    Advice("close what else uses memory: other allocations are other programs' and this one's outside torch"),
    Advice("lift the limit, at the risk that the system swaps or stops", "export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"),
)
_FIXED: dict[Cause, tuple[Advice, ...]] = {
    Cause.KV_CACHE: (
        Advice(
            "give the engine more of the card, if nobody else is on it",
            "vllm serve MODEL --gpu-memory-utilization 0.95",
        ),
        Advice("shorter sequences", "vllm serve MODEL --max-model-len 8192"),
        Advice("a smaller cache: one byte a value", "vllm serve MODEL --kv-cache-dtype fp8"),
        Advice("no CUDA graphs, which take memory too", "vllm serve MODEL --enforce-eager"),
        Advice("spread the weights over cards", "vllm serve MODEL --tensor-parallel-size 2"),
        Advice(
            "how much weights and cache take", "memprof profile --model MODEL --mode inference --context-length 8192"
        ),
    ),
    Cause.ENGINE_BUDGET: (
        Advice("see who is on the card", "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv"),
        Advice("end what is left over of an earlier engine: its worker processes outlive it", "kill PID"),
        Advice("or ask for no more than is free", "vllm serve MODEL --gpu-memory-utilization 0.8"),
    ),
    Cause.MODEL_SPILLS: (
        Advice.python("see how the model was spread, and on what", "print(model.hf_device_map)"),
        Advice(
            "weights in 4 bits: a quarter of half precision",
            "memprof profile --model MODEL --quantize nf4 --mode inference",
            remedy=_SPILLED.name,
        ),
        Advice.python(
            "or run with the rest in host memory, slowly", 'device_map="auto", llm_int8_enable_fp32_cpu_offload=True'
        ),
        Advice("other processes may have the card: see who does", "memprof gpus --present"),
    ),
    Cause.HOST_KILLED: (
        Advice("was it the kernel, for want of host memory?", "dmesg -T | grep -i -E 'out of memory|killed process'"),
        Advice("watch resident memory, and who takes it", "memprof monitor --log memory.csv -- python train.py"),
        Advice.python(
            "load weights once and straight to the card, not once per process",
            'from_pretrained(..., device_map={"": local_rank}, dtype="auto")',
        ),
        Advice(
            "what is offloaded to the host takes 12 to 16 bytes a parameter there: offload less, or to disk",
            "memprof profile --model MODEL --ladder",
        ),
        Advice.python(
            "fewer DataLoader workers: each copies what it touches of the dataset", "DataLoader(..., num_workers=2)"
        ),
        Advice(
            "batches made one at a time",
            f"memprof profile --model MODEL --dataset-batches 100 --fix {_HOST.name}",
            remedy=_HOST.name,
        ),
        Advice("in a container or a job: raise its memory limit", "docker run --memory 64g ...  # sbatch --mem=64G"),
    ),
    Cause.HOST_MEMORY: (
        Advice("how much host memory there is, pinned memory's limit among it", "memprof doctor --env"),
        Advice(
            "the request's size says what it is (a whole dataset, all logits of an evaluation, a model in float32): "
            "make it in pieces"
        ),
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
