"""Advice for a failed allocation of torch on a GPU: to make the tensor smaller, to free enough, and to see more."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

from memprof.doctor.activity import Activity, find_activity, list_call_advice
from memprof.doctor.diagnosis import Advice, Candidate, MessageSizes
from memprof.doctor.engines.engine import LIST_PROCESSES
from memprof.doctor.reported_run import ReportedRun
from memprof.doctor.room import Room
from memprof.doctor.tracebacks import TracebackFrame, choose_frames
from memprof.fixes.catalog import find_fixes_for
from memprof.units import format_bytes

SEGMENTS_FIX = find_fixes_for("fragmentation")[0]
_MICRO_BATCH = "micro-batch"
_WINDOWS_PATH = re.compile(r"\b[A-Za-z]:\\(?!n)")  # A Windows path.
# What only logs of these builds of torch have: their errors, a variable of ROCm, the end of the version.
_LOG_OF_ROCM = re.compile(r"\bHIP (?:error: )?out of memory|PYTORCH_HIP_ALLOC_CONF|\+rocm\d")
_LOG_OF_INTEL_OR_APPLE = re.compile(r"\bXPU out of memory|MPS backend out of memory|\+xpu\b")


@dataclass(frozen=True, slots=True)
class FailedAllocation:
    """A failed allocation of torch, with everything that is known of it."""

    sizes: MessageSizes
    tensors: tuple[Candidate, ...]  # Candidates, likeliest first.
    run: ReportedRun
    frames: Sequence[TracebackFrame] = ()  # Outermost first.
    log: str = ""  # The message, with the log around it.

    @property
    def room(self) -> Room:
        """Return what the allocation lacks."""
        return Room.from_sizes(self.sizes)

    @property
    def activity(self) -> Activity:
        """Return what the program did."""
        return find_activity(self.frames)


def list_memory_advice(failed: FailedAllocation) -> Iterator[Advice]:
    """Yield advice if this process's tensors, or one of them, are too large, what helps most first."""
    is_certain = bool(failed.tensors) and (failed.tensors[0].in_traceback or not failed.tensors[0].is_guess)
    tensor_advice = tuple(_list_tensor_advice(failed))
    yield from list_call_advice(failed.frames, failed.activity)
    if is_certain:
        yield from tensor_advice
    elif not failed.room.is_reached_by_freeing:
        yield _make_smaller_advice(failed)
    if failed.run.script is not None:
        what = "run the script on a simulated GPU: which tensors there are at that moment, and what saves how much"
        yield Advice(what, failed.run.build_script_command())
    if not is_certain:
        yield from tensor_advice
    if failed.run.model is not None or (failed.run.script is None and failed.room.is_reached_by_freeing):
        what = "let memprof search: the set of fixes whose step takes least among those that fit"
        yield Advice(what, failed.run.build_command("auto"))
    yield from _list_freeing_advice(failed)


def _make_smaller_advice(failed: FailedAllocation) -> Advice:
    """Return the advice for a request that is too large for anything that could be freed."""
    tried, room = failed.sizes.tried, failed.room
    relevant_frames = choose_frames(list(failed.frames))
    place = f" in {relevant_frames[0].file.rsplit('/', 1)[-1]}:{relevant_frames[0].line}" if relevant_frames else ""
    size = "" if tried is None else f" of {tried.text}"
    reason = "it is larger than the GPU"
    if room.total is None or room.need is None or room.need <= room.total:
        reason = f"without all other tensors ({format_bytes(room.allocated or 0)}) it would not fit either"
    return Advice(
        f"this one tensor{size} has to be smaller, for {reason}: fewer rows, tokens, pixels or pairs at once{place}"
    )


def _list_fix_advice(case: str, failed: FailedAllocation, condition: str = "") -> Iterator[Advice]:
    """Yield advice for the fixes that the catalog lists for `case`, in order; `condition` precedes each."""
    is_training = failed.activity not in (Activity.EVALUATION, Activity.GENERATION, Activity.LOADING)
    for fix in find_fixes_for(case):
        if not is_training and (fix.training_only or fix.name == _MICRO_BATCH):
            if fix.name == _MICRO_BATCH:
                yield Advice("a smaller batch: without training it changes no result")
            continue
        cost = "" if fix.cost.startswith("none") else f" (costs: {fix.cost})"
        if (command := failed.run.build_command_with_fix(fix)) is not None:
            yield Advice(condition + fix.doctor_texts.get(case, fix.changes) + cost, command, fix=fix.name)


def _list_tensor_advice(failed: FailedAllocation) -> Iterator[Advice]:
    """Yield advice that makes the first candidate smaller."""
    if not failed.tensors:
        return
    first = failed.tensors[0]
    role = first.role
    condition = f"if it is {role.split(',')[0]}: " if first.is_guess and not first.in_traceback else ""
    if role.startswith("logits"):
        yield from _list_fix_advice("doctor: logits", failed, condition)
        hint = "in inference and prefill: logits of the last position alone"
        if not condition and failed.activity is not Activity.BACKWARD:
            yield Advice.python(hint, "model(input_ids, logits_to_keep=1)")
    elif role.startswith("attention"):
        yield from _list_fix_advice("doctor: attention", failed, condition)
    elif "delta" in role:
        yield from _list_fix_advice("doctor: weight delta", failed, condition)
    elif role.startswith(("hidden states", "queries", "keys", "feed-forward act")):
        yield from _list_fix_advice("doctor: activations", failed, condition)
    else:
        yield from _list_fix_advice("doctor: parameters" if "parameters" in role else "doctor: weights", failed)


def _list_freeing_advice(failed: FailedAllocation) -> Iterator[Advice]:
    """Yield advice that frees memory of the whole run, as far as it can free enough."""
    room = failed.room
    if not room.is_reached_by_freeing:
        return
    if failed.activity is Activity.LOADING:
        steps = _list_fix_advice("doctor: weights", failed)
    elif failed.activity is Activity.OPTIMIZER:
        steps = chain(_list_fix_advice("doctor: parameters", failed), _list_fix_advice("doctor: smaller", failed))
    else:
        steps = _list_fix_advice("doctor: smaller", failed)
    tensor_fixes = {step.fix for step in _list_tensor_advice(failed)}
    yield from (step for step in steps if step.fix not in tensor_fixes and room.is_reached_by(step.fix))


def list_fragmentation_advice(failed: FailedAllocation) -> Iterator[Advice]:
    """Yield advice if enough is reserved and unused, in pieces too small."""
    segments = tuple(
        list_segments_advice("let segments grow: what is reserved and unused serves this request", failed.log)
    )
    yield from segments or _list_split_size_advice(failed.log)
    yield Advice("sizes that change from batch to batch leave gaps: pad lengths to multiples of 64, or sort by length")
    if failed.run.script is not None:
        yield Advice(
            "run the script on a simulated GPU: how much is reserved and unused, and where",
            failed.run.build_script_command(),
        )
    what_if = f" --alloc-conf {SEGMENTS_FIX.alloc_conf}" if segments else ""
    yield Advice("see what lies in the gaps", f"memprof analyze SNAPSHOT{what_if}")
    yield from list_memory_advice(failed)


def _is_before_torch_2_1(text: str) -> bool:
    """Return whether `text` has an error message in the wording of torch before 2.1, without expandable segments."""
    return "reserved in total by PyTorch" in text or " cached)" in text


def list_segments_advice(advice: str, text: str) -> Iterator[Advice]:
    """Yield advice to use expandable segments, in the words `advice`; nothing where the log's torch lacks them, or may
    hang with them: ROCm's, whose own messages advise them all the same (github.com/pytorch/pytorch, issue 192259)."""
    has_them = not _is_before_torch_2_1(text) and not _WINDOWS_PATH.search(text)
    if has_them and not _LOG_OF_ROCM.search(text) and not _LOG_OF_INTEL_OR_APPLE.search(text):
        yield Advice(advice, f"export PYTORCH_CUDA_ALLOC_CONF={SEGMENTS_FIX.alloc_conf}", fix=SEGMENTS_FIX.name)


def _list_split_size_advice(text: str) -> Iterator[Advice]:
    """Yield advice against fragmentation where torch lacks expandable segments; `text` is of the log."""
    if _LOG_OF_INTEL_OR_APPLE.search(text):
        return
    if _is_before_torch_2_1(text) and "max_split_size_mb" not in text:
        yield Advice("this release of torch has no setting against it: a newer one has", "pip install -U torch")
        return
    reason = "there are no expandable segments before torch 2.1"
    if _WINDOWS_PATH.search(text):
        reason = "there are no expandable segments on Windows"
    elif not _is_before_torch_2_1(text):
        reason = "with ROCm, expandable segments are new and may hang"
    shell = "set" if _WINDOWS_PATH.search(text) else "export"
    variable = "PYTORCH_HIP_ALLOC_CONF" if _LOG_OF_ROCM.search(text) else "PYTORCH_CUDA_ALLOC_CONF"
    yield Advice(f"leave large blocks whole for large requests ({reason})", f"{shell} {variable}=max_split_size_mb:128")


def list_other_process_advice(failed: FailedAllocation) -> Iterator[Advice]:
    """Yield advice if the request would fit without other processes."""
    yield LIST_PROCESSES
    yield Advice("end what is left over of an earlier run (a notebook keeps its GPU until its kernel ends)", "kill PID")
    yield Advice("or take another GPU", "CUDA_VISIBLE_DEVICES=1 python ...")
    is_script = failed.run.script is not None
    command = failed.run.build_script_command() if is_script else failed.run.build_command()
    yield Advice("how much your own run needs", command)


def list_limit_advice(failed: FailedAllocation) -> Iterator[Advice]:
    """Yield advice if the program reached a limit of its own."""
    change = (
        "raise or remove the limit, set in the program or as per_process_memory_fraction in the allocator's settings"
    )
    yield Advice.python(change, "torch.cuda.set_per_process_memory_fraction(1.0)")
    yield Advice("how much the run needs", failed.run.build_command())


def list_refusal_advice(failed: FailedAllocation) -> Iterator[Advice]:
    """Yield advice if the driver refuses memory that it calls free."""
    script = failed.run.script or "train.py"
    yield Advice(
        "see what the driver shows while the run goes on: another process may come and go",
        f"memprof monitor -- python {script}",
    )
    yield from list_segments_advice(
        "no single segment is requested any more, so that no one piece must be had", failed.log
    )
    yield Advice(
        "check limits that free memory does not show: a container's, a slice's (MIG), a virtual GPU's, and on Windows "
        "the page file, which backs what GPUs commit",
        "memprof doctor --env",
    )


def list_library_advice(failed: FailedAllocation) -> Iterator[Advice]:
    """Yield advice if a CUDA library finds no memory for itself."""
    script = failed.run.script or "train.py"
    yield Advice.python(
        "the library asks the driver for memory beside torch's, which has taken it all: leave it some",
        "torch.cuda.set_per_process_memory_fraction(0.95)",
    )
    yield Advice(
        "an index out of range (labels, token ids) ends in the same message: run once on the CPU, or with",
        f"CUDA_LAUNCH_BLOCKING=1 python {script}",
    )
    yield Advice(
        "a smaller batch shows whether memory is the matter; if the error stays, it is the installation",
        "memprof doctor --env",
    )
    yield from list_memory_advice(failed)
