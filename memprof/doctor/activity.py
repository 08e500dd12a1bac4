"""What the program did when memory ran out, by its traceback: this decides which advice makes sense."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from enum import StrEnum

from memprof.doctor.diagnosis import Advice
from memprof.doctor.tracebacks import TracebackFrame


class Activity(StrEnum):
    """The activity of the program."""

    LOADING = "loading"  # Weights are loaded, or moved to the GPU.
    OPTIMIZER = "optimizer"
    BACKWARD = "backward"
    EVALUATION = "evaluation"  # A forward without training.
    GENERATION = "generation"  # Tokens after tokens, with a KV cache.
    UNKNOWN = "unknown"


_EVALUATION = re.compile(
    r"^_?(?:eval|evaluate|evaluation|validate|validation|test|predict|prediction|infer|inference|generate|sample)"
    r"(?:_(?!loss|logits|size)\w+)?$"
)
_KV_CACHE = r"\b(?:kv|k|key|v|value)_cache\b|past_key_value|DynamicCache|StaticCache"
# The first pattern that the functions or code of a frame match, outermost frame last, names the activity.
_PATTERNS = (
    (Activity.OPTIMIZER, r"\boptim(?:izer)?\w*\.step\(|\b_init_group\b|\b_multi_tensor_adam\w*|exp_avg"),
    (Activity.BACKWARD, r"\.backward\(|_run_backward|run_backward\("),
    (
        Activity.LOADING,
        r"torch\.load\(|\bfrom_pretrained\b|load_state_dict\(|load_checkpoint\(|\bcreate_weights\b|dispatch_model\("
        r"|\b_load_pretrained_model\b|\bmodel\w*\.(?:to|cuda)\(",
    ),
    (Activity.GENERATION, _KV_CACHE),
)


def find_activity(frames: Sequence[TracebackFrame]) -> Activity:
    """Return the activity that `frames`, outermost first, show."""
    lines = [f"{frame.function} {frame.code}" for frame in reversed(frames)]
    for line in lines:
        for activity, pattern in _PATTERNS:
            if re.search(pattern, line):
                return activity
    functions = (frame.function.rpartition(".")[2] for frame in frames if not frame.is_in_torch)
    return Activity.EVALUATION if any(map(_EVALUATION.match, functions)) else Activity.UNKNOWN


# What the innermost lines of a program call -> advice for this call, and its code.
_CALLS = (
    (
        r"\b(?:jacrev|jacfwd|hessian)\b",
        "fewer rows of the Jacobian at once: the memory is in proportion to the chunk",
        "torch.func.jacrev(function, chunk_size=64)",
    ),
    (
        r"\bvmap\b|\b_vmap_internals\b",
        "vmap over fewer samples at once: the memory is in proportion to the chunk",
        "torch.func.vmap(function, chunk_size=64)",
    ),
    (
        r"torch\.load\(|\bdefault_restore_location\b|_cuda_deserialize",
        "load the file to the host: by default its tensors return to the GPU they were saved from",
        'torch.load(path, map_location="cpu")',
    ),
    (
        r"\bcdist\(|\bpairwise_distance\(|\[:, None\]|\bouter\(|\bmeshgrid\(",
        "pairs of all rows are one tensor: some rows at a time",
        "for part in rows.split(1024): ...",
    ),
    (
        _KV_CACHE,
        "the KV cache grows with the length and the sequences: a shorter maximum length, or fewer sequences at once",
        "",
    ),
)


def list_call_advice(frames: Sequence[TracebackFrame], activity: Activity) -> Iterator[Advice]:
    """Yield advice for what the traceback's frames call."""
    text = "\n".join(f"{frame.function} {frame.code}" for frame in frames[-8:])
    for pattern, what, code in _CALLS:
        if re.search(pattern, text):
            yield Advice.python(what, code)
            return
    if activity is Activity.EVALUATION and not re.search(r"no_grad|inference_mode", text):
        yield Advice.python(
            "without gradients, a forward frees its activations: is it so already?", "with torch.inference_mode():"
        )
