"""What stacks say: line, operator, module, part of the step and category."""

from __future__ import annotations

import pytest

from memprof.snapshots.origins import UNKNOWN, find_origin, guess_category
from memprof.trace.snapshot import Frame
from tests.unit.snapshots.builder import stack

SITE = "/venv/lib/python3.12/site-packages"
WORKSPACE = Frame("", 0, "at::cuda::getCUDABlasLtWorkspace()")
HASH = "rqi2a6dtsgnlkgpr4ajhnqxz3vhmrb4dtextosnrzy7m2c3ycct"  # 51 letters, of whose first two the folder is named.
ENGINE = Frame("", 0, "torch::autograd::Engine::evaluate_function()")


def test_no_frames():
    assert find_origin(()) is UNKNOWN


@pytest.mark.parametrize(
    ("lines", "source"),
    [
        (("model.py:12 forward", "call", "train.py:3 step"), "/home/me/model.py:12 forward"),
        # Lines of torch and of plumbing are passed over, lines of a library are not.
        ((f"{SITE}/torch/nn/functional.py:20 linear", "model.py:12 forward"), "/home/me/model.py:12 forward"),
        ((f"{SITE}/einops/einops.py:9 einsum", "model.py:12 forward"), "/home/me/model.py:12 forward"),
        (
            (f"{SITE}/transformers/models/llama/modeling_llama.py:216 forward", "train.py:3 step"),
            f"{SITE}/transformers/models/llama/modeling_llama.py:216 forward",
        ),
        (("/tmp/torchinductor_me/ab/cabcdef.py:310 call", "model.py:12 forward"), "/home/me/model.py:12 forward"),
        ((f"/scratch/compiled/rq/c{HASH}.py:10050 call", "model.py:12 forward"), "/home/me/model.py:12 forward"),
        (("/scratch/compiled/rq/crq.py:10050 call", "model.py:12 forward"), "/scratch/compiled/rq/crq.py:10050 call"),
        (("<eval_with_key>.3:5 forward", "model.py:12 forward"), "/home/me/model.py:12 forward"),
        (("<string>:3 op1", f"{SITE}/einx/op.py:9 call", "model.py:12 forward"), "/home/me/model.py:12 forward"),
        (("/usr/lib/python3.12/contextlib.py:81 inner", "train.py:3 step"), "/home/me/train.py:3 step"),
    ],
)
def test_source_is_the_innermost_line_of_the_program(lines, source):
    assert find_origin(stack(*lines)).source == source


@pytest.mark.parametrize(
    ("name", "op"),
    [("mul_Tensor", "mul"), ("sum_dim_IntList", "sum"), ("empty_memory_format", "empty"), ("bmm", "bmm"),
     ("to_dtype_layout", "to"), ("cross_entropy_loss", "cross_entropy_loss")],
)  # fmt: skip
def test_operator_without_its_overload(name, op):
    assert find_origin(stack("model.py:12 forward", op=name)).op == op


def test_module_chain():
    lines = (
        f"{SITE}/torch/nn/modules/linear.py:125 forward",
        "call",
        "block.py:20 forward",
        "call",
        "net.py:7 forward",
        "call",
    )
    assert find_origin(stack(*lines)).module == "net:7 > block:20 > linear"


def test_wrappers_between_a_call_and_its_forward():
    lines = ("block.py:20 forward", f"{SITE}/accelerate/hooks.py:166 new_forward", "call", "net.py:7 forward", "call")
    assert find_origin(stack(*lines)).module == "net:7 > block:20"


def test_backward_is_named_by_its_node():
    node = Frame("", 0, "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)")
    origin = find_origin((Frame("", 0, "at::_ops::mm::call(at::Tensor const&)"), node, ENGINE))
    assert (origin.source, origin.op, origin.part) == ("autograd MmBackward0", "MmBackward0", "backward")
    assert guess_category(origin, outlives=True) == "gradients"
    assert guess_category(origin, outlives=False) == "temporaries"


@pytest.mark.parametrize(
    ("frames", "category"),
    [
        (stack("model.py:5 __init__", "train.py:3 main"), "parameters"),
        (stack(f"{SITE}/torch/nn/modules/module.py:900 _apply", "train.py:3 main"), "parameters"),
        # Built inside a call is an activation, for all that is known.
        (stack("model.py:12 forward", "call", "train.py:9 __init__"), None),
        (stack(f"{SITE}/torch/nn/parallel/replicate.py:95 _broadcast_coalesced_reshape", "call"), "parameters"),
        (stack(f"{SITE}/transformers/cache_utils.py:70 update", "model.py:12 forward", "call"), "KV cache"),
        (stack(f"{SITE}/torch/nn/functional.py:3000 cross_entropy", "train.py:5 step"), "logits and loss"),
        (stack("train.py:40 train", op="_to_copy"), "inputs"),
        (stack("my_adamw.py:10 __init__", "train.py:3 main"), "optimizer state"),
        (stack("my_adamw.py:30 step", "train.py:3 main"), None),
        ((WORKSPACE, *stack("model.py:12 forward", "call")), "library workspace"),
        ((Frame("", 0, "at::cuda::blas::gemm_and_bias<float>()"), *stack("model.py:12 forward")), "library workspace"),
        ((Frame("", 0, "c10d::Reducer::initialize_buckets()"), *stack("train.py:12 main")), "communication"),
        ((Frame("", 0, "torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)"), ENGINE), "gradients"),
        (
            (Frame("", 0, "torch::autograd::generated::NllLossBackward0::apply(std::vector<at::Tensor>&&)"), ENGINE),
            "logits and loss",
        ),
    ],
)  # fmt: skip
def test_category_of_a_stack(frames, category):
    assert find_origin(frames).category == category


def test_recomputation_in_a_backward_is_an_activation():
    frames = (*stack("model.py:12 forward", "call", main=False), ENGINE)
    assert guess_category(find_origin(frames), outlives=True) == "activations"


def test_windows_paths():
    lines = (r"C:\env\lib\site-packages\torch\nn\functional.py:20 linear", r"C:\me\model.py:12 forward")
    assert find_origin(stack(*lines)).source == r"C:\me\model.py:12 forward"


@pytest.mark.parametrize(
    ("kept_bytes", "op", "category"),
    [
        (8_519_680, "", "library workspace"),
        (8_519_679, "", "activations"),
        (8_519_681, "", "activations"),
        (None, "", "activations"),  # freed
        (8_519_680, "mul", "activations"),  # C++ frames say what it is
        (32 << 20, "", "activations"),  # Hopper's workspace, and any tensor
    ],
)
def test_the_workspace_of_cublas_without_frames_of_cpp(kept_bytes: int | None, op: str, category: str) -> None:
    origin = find_origin(stack("model.py:12 forward", "call", op=op))
    assert guess_category(origin, outlives=True, kept_bytes=kept_bytes) == category
