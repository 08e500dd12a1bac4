"""A block's origin, derived from its stack: line, operator, module, phase, and a guess of its category.

A snapshot has only stacks: no module names and no roles. Origins are therefore guesses, and reports say so. Frames are
torch's own file and function names, of Python and, if recorded, of C++.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

from memprof.ledger.categories import Category
from memprof.trace.snapshot import Frame, Stack

NO_FRAMES = "(no frames)"
OUTSIDE_MODULES = "(outside modules)"


class Part(StrEnum):
    """The part of a step in which a block was allocated."""

    FORWARD = "forward"
    BACKWARD = "backward"
    OPTIMIZER = "optimizer step"


@dataclass(frozen=True, slots=True)
class Origin:
    """Where a block was allocated: source line, operator, module, part of the step, and category."""

    source: str  # `file:line function`: the innermost line of the user; else an autograd node or a C++ function
    op: str  # the operator or autograd node; empty if the stack has no C++ frames
    module: str  # the chain of module calls, outermost first, as far as the stack shows it
    part: Part
    category: Category | None  # None if the stack does not determine it: then the block's life does
    in_module: bool = False


_LABEL_OUTSIDE_MODULES = {Part.FORWARD: OUTSIDE_MODULES, Part.BACKWARD: "(backward)", Part.OPTIMIZER: "(optimizer)"}

UNKNOWN = Origin(NO_FRAMES, "", NO_FRAMES, Part.FORWARD, Category.UNATTRIBUTED)

_PACKAGE_PATTERN = re.compile(r"[/\\](?:site|dist)-packages[/\\]([^/\\.]+)")
_STDLIB_PATTERN = re.compile(r"[/\\]lib[/\\]python3[^/\\]*[/\\](?!(?:site|dist)-packages)|[/\\]runpy\.py$|^<frozen")
# Packages whose lines say nothing about the user's program.
_PLUMBING_PACKAGES = frozenset((
    "torch", "functorch", "triton", "einops", "einx", "opt_einsum", "jaxtyping", "beartype", "typeguard", "accelerate",
    "nvtx", "decorator",
))  # fmt: skip
# Generated code of torch.compile, torch.fx, einx and dataclasses. In a cache folder, Inductor names a file by the hash
# of its text (torch/_inductor/codecache.py).
_GENERATED_PATTERN = re.compile(
    r"/torchinductor_[^/]*/|/([a-z2-7]{2})/c\1[a-z2-7]{49}\.py$|^<eval_with_key>|^<torch|^<string>"
)
_SOURCE_TREES = ("/torch/nn/", "/torch/optim/", "/torch/utils/", "/torch/autograd/", "/torch/_", "/torch/functional.py")

_OP_PATTERN = re.compile(r"^at::_ops::(\w+?)::(?:call|redispatch)\(")
_NODE_PATTERN = re.compile(r"torch::autograd::(?:generated::)?(?:\(anonymous namespace\)::)?(\w+)::apply\(")
# All allocations inside the wrappers of at::cuda::blas are workspaces: results are allocated by their callers.
_WORKSPACE = re.compile(r"[Ww]orkspace|getCurrentCUDABlas|cublasLt|cudnn.*run_conv_plan|\bat::cuda::blas::")
# The default of a cuBLAS handle on GPUs other than Hopper, 8.125 MiB (`parseChosenWorkspaceSize` of
# aten/src/ATen/cuda/CublasHandlePool.cpp). Hopper's, 32 MiB, is the size of many tensors, and so identifies nothing.
CUBLAS_WORKSPACE_BYTES = (4096 * 2 + 16 * 8) << 10
_COMMUNICATION = re.compile(r"\bc10d::|ProcessGroup|::Reducer::|nccl", re.IGNORECASE)
_OPTIMIZER_FILE = re.compile(r"optim|adam|sgd|lion|muon|shampoo|adafactor|lamb(?!da)", re.IGNORECASE)
_OPTIMIZER_NAMES = frozenset(("step", "__init__", "_init_group", "init_group", "init_state", "add_param_group"))
# The suffix of an operator's C++ name for its overload: mul_Tensor, sum_dim_IntList, empty_memory_format.
_OVERLOAD_PATTERN = re.compile(
    r"_(?:[A-Z]\w*|dim(?:_\w+)?|dtype(?:_\w+)?|memory_format|generator\w*|vec|start(?:_\w+)?)$"
)
# Functions between a module's call and its own forward.
_WRAPPERS = frozenset(
    ("wrapper", "wrapped", "wrapped_func", "new_forward", "decorate_context", "inner", "decorator", "_fn")
)
MODULE_CALLS = frozenset(("_call_impl", "_wrapped_call_impl", "_slow_forward"))
_MODEL_BUILDING = frozenset((
    "__init__", "reset_parameters", "_apply", "convert", "load_state_dict", "from_pretrained", "_load_from_state_dict",
    "from_config", "_load_state_dict_into_meta_model", "init_weights", "init_weight", "create_weights", "load_model",
    "materialize", "_init_weights",
    "_broadcast_coalesced_reshape",  # the replicas of nn.DataParallel
))  # fmt: skip
_LOSS_PATTERN = re.compile(r"cross_entropy|nll_loss|log_softmax|\w*loss\w*|logsumexp", re.IGNORECASE)
_LOSS_OPS = ("cross_entropy", "nll_loss", "mse_loss", "log_softmax")
_LOSS_NODES = re.compile(r"NllLoss|LogSoftmax|CrossEntropy|MseLoss|SmoothL1|KlDiv|BinaryCrossEntropy")
_INPUT_OPS = re.compile(r"^(?:to|_to_copy|copy_|randn?|randint|randperm|zeros|ones|full|empty\w*|tensor|arange)(?:_|$)")
_KV_CACHE = re.compile(r"cache_utils|cache_engine|kv_?cache", re.IGNORECASE)


def find_origin(stack: Stack) -> Origin:
    """Return the origin of a block with `stack` (innermost frame first); UNKNOWN if the stack is empty."""
    if not stack:
        return UNKNOWN
    inner_native: list[str] = []  # C++ below the innermost Python line
    python: list[Frame] = []
    for frame in stack:
        if _is_python(frame):
            python.append(frame)
        elif not python:
            inner_native.append(frame.name)
    native = [frame.name for frame in stack if not _is_python(frame)]
    part = _find_step_part(python, native)
    node = next((match[1] for name in reversed(native) if (match := _NODE_PATTERN.search(name))), "")
    op = _OVERLOAD_PATTERN.sub(
        "", next((match[1] for name in reversed(inner_native) if (match := _OP_PATTERN.match(name))), "")
    )
    if node.startswith(("Python", "Node")):
        node = ""
    modules, inner = _find_module_chain(python)
    op_or_node = node if part is Part.BACKWARD and node and not inner else op
    return Origin(
        source=_find_source(python, node, op),
        op=op_or_node or node,
        module=" > ".join(modules) if modules else _LABEL_OUTSIDE_MODULES[part],
        part=part,
        category=_find_category(python, inner_native, native, part, node or op, inner),
        in_module=bool(modules),
    )


def _is_python(frame: Frame) -> bool:
    name = frame.filename
    return name.endswith(".py") or (name.startswith("<") and name.endswith(">"))


def find_package(filename: str) -> str:
    """Return the installed package that a file belongs to; "" for the user's own, "python" for the standard library."""
    match = _PACKAGE_PATTERN.search(filename)
    if match:
        return match[1]
    path = filename.replace("\\", "/")
    if any(tree in path for tree in _SOURCE_TREES) or _GENERATED_PATTERN.search(path):
        return "torch"
    return "python" if _STDLIB_PATTERN.search(filename) else ""


def _find_source(python: list[Frame], node: str, op: str) -> str:
    """Return the innermost line of the user's code; else the autograd node, a Python line or the operator."""
    for frame in python:
        package = find_package(frame.filename)
        if package not in _PLUMBING_PACKAGES and package != "python":
            return f"{frame.filename}:{frame.line} {frame.name}"
    if node:
        return f"autograd {node}"
    if python:
        frame = next((frame for frame in python if frame.filename == "<string>"), python[0])  # `python -c`
        return f"{frame.filename}:{frame.line} {frame.name}"
    return f"operator {op}" if op else NO_FRAMES


def _find_module_chain(python: list[Frame]) -> tuple[list[str], Frame | None]:
    """Return the modules called in a stack, outermost first, and the frame of the innermost forward.

    A module's `_call_impl` is the frame right outside its forward; the forward's file and line identify the module.
    """
    chain: list[str] = []
    innermost: Frame | None = None
    for index, (inner, outer) in enumerate(pairwise(python)):
        if outer.name not in MODULE_CALLS or inner.name in MODULE_CALLS:
            continue
        position = index
        while position > 0 and python[position].name in _WRAPPERS and python[position - 1].name not in MODULE_CALLS:
            position -= 1
        inner = python[position]
        stem = inner.filename.replace("\\", "/").rpartition("/")[2].removesuffix(".py")
        is_user_code = find_package(inner.filename) != "torch"
        chain.append(f"{stem}:{inner.line}" if is_user_code else stem)
        if innermost is None:
            innermost = inner
    return chain[::-1], innermost


def _find_step_part(python: list[Frame], native: list[str]) -> Part:
    if any(_is_optimizer(frame) for frame in python):
        return Part.OPTIMIZER
    if any("torch::autograd::Engine::" in name for name in native):
        return Part.BACKWARD
    if any(frame.name == "_engine_run_backward" for frame in python):
        return Part.BACKWARD
    return Part.FORWARD


def _is_optimizer(frame: Frame) -> bool:
    path = frame.filename.replace("\\", "/")
    if "/torch/optim/" in path and "/lr_scheduler" not in path:
        return True
    return frame.name in _OPTIMIZER_NAMES and bool(_OPTIMIZER_FILE.search(path.rpartition("/")[2]))


def _find_category(
    python: list[Frame], inner_native: list[str], native: list[str], part: Part, op: str, inner: Frame | None
) -> Category | None:
    if any(_WORKSPACE.search(name) for name in inner_native):
        return Category.LIBRARY_WORKSPACE
    if any(_COMMUNICATION.search(name) for name in inner_native):
        return Category.COMMUNICATION
    if part is Part.OPTIMIZER:
        # Allocated by the optimizer's constructor, it is state; in a step, the block's life decides.
        return Category.OPTIMIZER_STATE if any(f.name == "__init__" and _is_optimizer(f) for f in python) else None
    if any("AccumulateGrad" in name for name in native):
        return Category.GRADIENTS
    if part is Part.BACKWARD:
        return Category.LOGITS_AND_LOSS if _LOSS_NODES.search(op) else None
    for frame in python:
        if frame.name in MODULE_CALLS:
            break
        if _KV_CACHE.search(frame.filename) or _KV_CACHE.search(frame.name):
            return Category.KV_CACHE
        if frame.name in _MODEL_BUILDING:
            return Category.PARAMETERS
        if _LOSS_PATTERN.fullmatch(frame.name):
            return Category.LOGITS_AND_LOSS
    if op.startswith(_LOSS_OPS):
        return Category.LOGITS_AND_LOSS
    if inner is None and _INPUT_OPS.match(op):
        return Category.INPUTS
    return None


def list_module_calls(origin: Origin) -> list[tuple[str, str]]:
    """Return the module calls around `origin`, outermost first, as pairs (calling line, file of the module)."""
    chain = origin.module.split(" > ") if origin.in_module else []
    return [(outer, line.partition(":")[0]) for outer, line in zip(["", *chain], chain, strict=False)]


def guess_category(origin: Origin, *, outlives: bool, saved: bool = False, kept_bytes: int | None = None) -> Category:
    """Return the category of a block.

    Args:
        origin: the origin of the block.
        kept_bytes: the requested bytes of a block that is never freed: a cuBLAS handle keeps its workspace.
        outlives: whether the block outlives the module call that allocated it, or the part of the step outside modules.
        saved: whether a forward allocated the block, and the backward pass freed it.
    """
    if origin.category is not None:
        return origin.category
    if kept_bytes == CUBLAS_WORKSPACE_BYTES and not origin.op:  # without C++ frames, only the size identifies it
        return Category.LIBRARY_WORKSPACE
    if not outlives:
        return Category.TEMPORARIES
    if origin.part is Part.OPTIMIZER:
        return Category.OPTIMIZER_STATE
    if origin.part is Part.BACKWARD:
        return Category.ACTIVATIONS if origin.in_module else Category.GRADIENTS
    return Category.ACTIVATIONS if origin.in_module or saved else Category.UNATTRIBUTED
