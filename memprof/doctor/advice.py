"""Advice for each cause of an error, with commands: cheapest first, advice that changes numerics last."""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass, replace

from memprof.command_line import make_profile_command
from memprof.doctor.diagnosis import Advice, Candidate, Cause, MessageSizes
from memprof.errors import UsageError
from memprof.fixes.catalog import Fix, find_fixes_for
from memprof.fixes.chosen import ChosenFix, edit_spec
from memprof.spec import Mode, TargetSpec
from memprof.units import GIB, parse_gib
from memprof.workload.catalog import find_model, has_model


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """The options of a failed run as the user gives them; those that are None are searched for in the log."""

    model: str | None = None
    batch_size: int | None = None
    context_length: int | None = None
    npt: str | None = None
    gpu_bytes: int | None = None
    attention: str | None = None

    @property
    def spec(self) -> TargetSpec:
        """Return the options with which `memprof profile` reproduces the run."""
        return TargetSpec(
            model=self.model or "MODEL",
            batch_size=self.batch_size or 1,
            context_length=self.context_length,
            npt=self.npt,
            gpu_vram_bytes=self.gpu_bytes,
            attention=self.attention,
        )

    def build_command(self, fix: str = "") -> str:
        """Return the `memprof profile` command that reproduces the run, with the fix named `fix` unless it is empty."""
        return make_profile_command(self.spec.edit(fixes=(fix,) if fix else ()), names_gpu=False)

    def build_command_with_fix(self, fix: Fix) -> str | None:
        """Return the `memprof profile` command that runs with `fix`; None if the fix does not apply to the run."""
        dtype = None
        if self.model is not None and has_model(self.model):
            dtype = "float32" if find_model(self.model).checkpoint_dtype == "float32" else "bfloat16"
        # Some fixes need a batch of at least 2; an unknown batch may have it.
        specs = [self.spec] if self.batch_size else [self.spec, self.spec.edit(batch_size=2)]
        for mode, spec in itertools.product(Mode, specs):
            try:
                edit_spec(spec.edit(mode=mode), ChosenFix(fix), {"dtype": dtype})
            except UsageError:
                continue
            return make_profile_command(spec.edit(mode=mode, fixes=(fix.name,)), names_gpu=False)
        return None


# The only fix of each of these cases.
_SEGMENTS_FIX, _SPILL_FIX = find_fixes_for("fragmentation")[0], find_fixes_for("doctor: spilled")[0]
_HOST = find_fixes_for("doctor: host memory")[0]
_WINDOWS_PATH = re.compile(r"\b[A-Za-z]:\\(?!n)")  # A Windows path.
_LIST_PROCESSES = Advice("see who is on the GPU", "nvidia-smi --query-compute-apps=pid,name,used_memory --format=csv")


def _list_fix_advice(case: str, run: ReportedRun) -> tuple[Advice, ...]:
    """Return advice for the fixes that the catalog lists for `case`, in order."""
    advice = []
    for fix in find_fixes_for(case):
        cost = "" if fix.cost.startswith("none") else f" (costs: {fix.cost})"
        if (command := run.build_command_with_fix(fix)) is not None:
            advice.append(Advice(fix.doctor_texts.get(case, fix.changes) + cost, command, fix=fix.name))
    return tuple(advice)


def list_advice(
    cause: Cause, sizes: MessageSizes, tensors: tuple[Candidate, ...], run: ReportedRun, source: str, text: str = ""
) -> tuple[Advice, ...]:
    """Return the advice for `cause`, most useful first; `text` is the error message with the log around it."""
    if sizes.total is not None and sizes.total.num_bytes >= GIB:
        run = replace(run, gpu_bytes=parse_gib(f"{sizes.total.num_bytes / GIB:.2f}"))  # as printed
    if tensors and "delta" in tensors[0].role:
        run = replace(run, npt="dense")
    if tensors and tensors[0].role == "attention scores":
        run = replace(run, attention="eager")  # only eager attention stores scores
    if source in _ADVICE_BY_SOURCE:
        return _ADVICE_BY_SOURCE[source]
    if cause in _ADVICE_BY_CAUSE:
        return _ADVICE_BY_CAUSE[cause]
    if cause is Cause.OTHER_PROCESSES:
        problem = "end what is left over of an earlier run (a notebook keeps its GPU until its kernel ends)"
        return (
            _LIST_PROCESSES,
            Advice(problem, "kill PID"),
            Advice("or take another GPU", "CUDA_VISIBLE_DEVICES=1 python ..."),
            Advice("how much your own run needs", run.build_command()),
        )
    if cause is Cause.MEMORY_LIMIT:
        change = "raise or remove the limit, set in the program or as per_process_memory_fraction in the allocator's"
        advice = Advice.python(f"{change} settings", "torch.cuda.set_per_process_memory_fraction(1.0)")
        return advice, Advice("how much the run needs", run.build_command())
    if cause is Cause.FREE_REFUSED:
        return (
            Advice(
                "see what the driver shows while the run goes on: another process may come and go",
                "memprof monitor -- python train.py",
            ),
            *_list_segments_advice("no single segment is requested any more, so that no one piece must be had", text),
            Advice(
                "check limits that free memory does not show: a container's, a slice's (MIG), a virtual GPU's, and on "
                "Windows the page file, which backs what GPUs commit",
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
            *_list_smaller_run_advice(run, tensors)[:3],
        )
    if cause is Cause.FRAGMENTATION:
        return (
            *(
                _list_segments_advice("let segments grow: what is reserved and unused serves this request", text)
                or _list_split_size_advice(text)
            ),
            Advice(
                "sizes that change from batch to batch leave gaps: pad lengths to multiples of 64, or sort by length"
            ),
            Advice("see what lies in the gaps", f"memprof analyze SNAPSHOT --alloc-conf {_SEGMENTS_FIX.alloc_conf}"),
            *_list_smaller_run_advice(run, tensors),
        )
    process_advice = (_LIST_PROCESSES,) if cause is Cause.DEVICE_MEMORY and source == "CUDA" else ()
    return process_advice + _list_tensor_advice(tensors, run) + _list_smaller_run_advice(run, tensors)


def _is_before_torch_2_1(text: str) -> bool:
    """Return whether `text` has an error message in the wording of torch before 2.1, without expandable segments."""
    return "reserved in total by PyTorch" in text or " cached)" in text


def _list_segments_advice(advice: str, text: str) -> tuple[Advice, ...]:
    """Return advice to use expandable segments, in the words `advice`; empty where the log's torch lacks them."""
    if _is_before_torch_2_1(text) or _WINDOWS_PATH.search(text):
        return ()
    variable = "PYTORCH_HIP_ALLOC_CONF" if "HIP out of memory" in text else "PYTORCH_CUDA_ALLOC_CONF"
    return (Advice(advice, f"export {variable}={_SEGMENTS_FIX.alloc_conf}", fix=_SEGMENTS_FIX.name),)


def _list_split_size_advice(text: str) -> tuple[Advice, ...]:
    """Return advice against fragmentation where torch lacks expandable segments; `text` is of the log."""
    if _is_before_torch_2_1(text) and "max_split_size_mb" not in text:
        return (Advice("this release of torch has no setting against it: a newer one has", "pip install -U torch"),)
    condition = "on Windows" if _WINDOWS_PATH.search(text) else "before torch 2.1"
    shell = "set" if _WINDOWS_PATH.search(text) else "export"
    advice = f"leave large blocks whole for large requests (there are no expandable segments {condition})"
    return (Advice(advice, f"{shell} PYTORCH_CUDA_ALLOC_CONF=max_split_size_mb:128"),)


def _list_tensor_advice(tensors: tuple[Candidate, ...], run: ReportedRun) -> tuple[Advice, ...]:
    """Return advice that makes the first of `tensors` smaller; empty without tensors."""
    if not tensors:
        return ()
    role = tensors[0].role
    if role.startswith("logits"):
        hint = "in inference and prefill: logits of the last position alone"
        return (*_list_fix_advice("doctor: logits", run), Advice.python(hint, "model(input_ids, logits_to_keep=1)"))
    if role.startswith("attention"):
        return _list_fix_advice("doctor: attention", run)
    if "delta" in role:
        return _list_fix_advice("doctor: weight delta", run)
    if role.startswith(("hidden states", "queries", "keys", "feed-forward act")):
        return _list_fix_advice("doctor: activations", run)
    return _list_fix_advice("doctor: parameters" if "parameters" in role else "doctor: weights", run)


def _list_smaller_run_advice(run: ReportedRun, tensors: tuple[Candidate, ...]) -> tuple[Advice, ...]:
    """Return advice that reduces the memory of the entire run, without the fixes of `_list_tensor_advice`."""
    tensor_fixes = {step.fix for step in _list_tensor_advice(tensors, run)}
    search_hint = "let memprof search: the set of fixes whose step takes least among those that fit"
    cpu_hint = "in inference that may take many times as long: use the CPU, whose memory is the machine's"
    candidates = (
        Advice(search_hint, run.build_command("auto")),
        *_list_fix_advice("doctor: smaller", run),
        Advice.python(cpu_hint, 'model.to("cpu")'),
        Advice("torch.cuda.empty_cache() does not help: torch releases its cache itself before it raises this error"),
    )
    return tuple(step for step in candidates if not step.fix or step.fix not in tensor_fixes)


_VLLM = "vllm serve MODEL"
_SGLANG = "python -m sglang.launch_server --model-path MODEL"
_MPS_ADVICE = (
    Advice("a smaller batch, half precision, or a smaller model: the GPU shares the computer's memory"),
    Advice.python(
        "drop what is no longer used; other allocations are this process's too, such as graphs that Metal has "
        "compiled, one for each shape: pad batches to few shapes",
        "torch.mps.empty_cache()",
    ),
    Advice("lift the limit, at the risk that the system swaps or stops", "export PYTORCH_MPS_HIGH_WATERMARK_RATIO=0.0"),
)
_PROFILE = "memprof profile --model MODEL"
_CACHE_SIZE_ADVICE = Advice("how much weights and cache take", f"{_PROFILE} --mode inference --context-length 8192")
# Source of an error -> advice, for sources that need other fixes than torch.
_ADVICE_BY_SOURCE: dict[str, tuple[Advice, ...]] = {
    "torch (MPS)": _MPS_ADVICE,
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
        Advice("see what else is on the GPU while it runs", "memprof monitor -- torchrun train.py"),
    ),
    "XLA": (
        _LIST_PROCESSES,
        Advice("JAX takes three quarters of the GPU at its start: less", "export XLA_PYTHON_CLIENT_MEM_FRACTION=.50"),
        Advice("or as much as is needed, when it is needed", "export XLA_PYTHON_CLIENT_PREALLOCATE=false"),
        Advice("TensorFlow takes all of it: as much as is needed instead", "export TF_FORCE_GPU_ALLOW_GROWTH=true"),
        Advice("a smaller batch, or shorter sequences"),
    ),
    "SGLang": (  # its options: docs/advanced_features/server_arguments.md of sgl-project/sglang
        Advice("give the engine more of the GPU, if nobody else is on it", f"{_SGLANG} --mem-fraction-static 0.95"),
        Advice("shorter sequences", f"{_SGLANG} --context-length 8192"),
        Advice("a smaller cache: one byte a value", f"{_SGLANG} --kv-cache-dtype fp8_e5m2"),
        Advice("spread the weights over GPUs", f"{_SGLANG} --tensor-parallel-size 2"),
        _CACHE_SIZE_ADVICE,
    ),
    "ggml": (
        _LIST_PROCESSES,
        Advice("fewer layers on the GPU, the rest on the CPU", "llama-server --model MODEL.gguf --n-gpu-layers 20"),
        Advice("a shorter context: a smaller cache", "llama-server --model MODEL.gguf --ctx-size 4096"),
        Advice("weights of fewer bits"),
    ),
    "bitsandbytes": (
        Advice("paged states lie in memory that GPU and host share: was the host's full?", "free -h"),
        Advice.python("an optimizer whose states are not paged", 'TrainingArguments(optim="adamw_8bit")'),
        _LIST_PROCESSES,
    ),
}
_ADVICE_BY_CAUSE: dict[Cause, tuple[Advice, ...]] = {
    Cause.NOT_KNOWN: (
        Advice("a smaller batch: if the error goes, memory was the matter"),
        Advice.python("without cuDNN torch's own kernels say what they lack", "torch.backends.cudnn.enabled = False"),
        Advice.python("or an input that is not laid out in order", "x = x.contiguous()"),
        Advice("or an installation that does not belong together", "memprof doctor --env"),
    ),
    Cause.KV_CACHE: (
        Advice("give the engine more of the GPU, if nobody else is on it", f"{_VLLM} --gpu-memory-utilization 0.95"),
        Advice("shorter sequences", f"{_VLLM} --max-model-len 8192"),
        Advice("a smaller cache: one byte a value", f"{_VLLM} --kv-cache-dtype fp8"),
        Advice("no CUDA graphs, which take memory too", f"{_VLLM} --enforce-eager"),
        Advice("spread the weights over GPUs", f"{_VLLM} --tensor-parallel-size 2"),
        _CACHE_SIZE_ADVICE,
    ),
    Cause.ENGINE_BUDGET: (
        _LIST_PROCESSES,
        Advice("end what is left over of an earlier engine: its worker processes outlive it", "kill PID"),
        Advice("or ask for no more than is free", f"{_VLLM} --gpu-memory-utilization 0.8"),
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
    Cause.HOST_KILLED: (
        Advice("was it the kernel, for want of host memory?", "dmesg -T | grep -i -E 'out of memory|killed process'"),
        Advice("watch resident memory, and who takes it", "memprof monitor --log memory.csv -- python train.py"),
        Advice.python(
            "load weights once and straight to the GPU, not once per process",
            'from_pretrained(..., device_map={"": local_rank}, dtype="auto")',
        ),
        Advice(
            "what is offloaded to the host takes 12 to 16 bytes a parameter there: offload less, or to disk",
            f"{_PROFILE} --ladder",
        ),
        Advice.python(
            "fewer DataLoader workers: each copies what it touches of the dataset", "DataLoader(..., num_workers=2)"
        ),
        Advice("batches made one at a time", f"{_PROFILE} --dataset-batches 100 --fix {_HOST.name}", fix=_HOST.name),
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
