"""What stacks say: line, operator, module, part of the step and category."""

from __future__ import annotations

import pytest

from memprof.snapshots.origins import UNKNOWN, find_origin, find_package, guess_category, list_module_calls
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


def test_backward_is_named_by_its_node():
    node = Frame("", 0, "torch::autograd::generated::MmBackward0::apply(std::vector<at::Tensor>&&)")
    origin = find_origin((Frame("", 0, "at::_ops::mm::call(at::Tensor const&)"), node, ENGINE))
    assert (origin.source, origin.op, origin.part) == ("autograd MmBackward0", "MmBackward0", "backward")
    assert guess_category(origin, outlives=True) == "gradients"
    assert guess_category(origin, outlives=False) == "temporaries"


@pytest.mark.parametrize(
    ("frames", "category"),
    [
        # Built inside a call is an activation, for all that is known.
        (stack("model.py:12 forward", "call", "train.py:9 __init__"), None),
        (stack(f"{SITE}/torch/nn/parallel/replicate.py:95 _broadcast_coalesced_reshape", "call"), "parameters"),
        (stack(f"{SITE}/transformers/cache_utils.py:70 update", "model.py:12 forward", "call"), "KV cache"),
        (stack("my_adamw.py:10 __init__", "train.py:3 main"), "optimizer state"),
        (stack("my_adamw.py:30 step", "train.py:3 main"), None),
        ((Frame("", 0, "torch::autograd::AccumulateGrad::apply(std::vector<at::Tensor>&&)"), ENGINE), "gradients"),
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


@pytest.mark.parametrize(
    "package",
    ["torch", "functorch", "triton", "einops", "einx", "opt_einsum", "jaxtyping", "beartype", "typeguard", "accelerate",
     "nvtx", "decorator"],
)  # fmt: skip
def test_plumbing_is_passed_over(package: str) -> None:
    for folder in ("site-packages", "dist-packages"):
        lines = (f"/usr/lib/python3/{folder}/{package}/core.py:3 inner", "model.py:12 forward")
        assert find_origin(stack(*lines)).source == "/home/me/model.py:12 forward"
    assert find_package(f"/usr/lib/python3/site-packages/{package}.py") == package


@pytest.mark.parametrize(
    ("filename", "package"),
    [
        ("/home/me/model.py", ""),
        ("/src/torch/nn/functional.py", "torch"),  # a build of torch from its sources
        ("/src/torch/optim/adam.py", "torch"),
        ("/src/torch/utils/checkpoint.py", "torch"),
        ("/src/torch/autograd/function.py", "torch"),
        ("/src/torch/_dynamo/eval_frame.py", "torch"),
        ("/src/torch/functional.py", "torch"),
        ("/src/torch/mine.py", ""),
        ("<torch_package>", "torch"),
        ("<eval_with_key>.7", "torch"),
        ("<string>", "torch"),
        ("/usr/lib/python3.12/runpy.py", "python"),
        ("C:\\lib\\python3.12\\contextlib.py", "python"),
        ("/opt/runpy.py", "python"),
        ("<frozen importlib._bootstrap>", "python"),
    ],
)
def test_package_of_a_file(filename: str, package: str) -> None:
    assert find_package(filename) == package


@pytest.mark.parametrize(
    ("frames", "source", "op"),
    [
        # Without a line of the program: the autograd node, torch's own line, or the operator.
        ((Frame("", 0, "torch::autograd::(anonymous namespace)::Copy::apply(x)"), ENGINE), "autograd Copy", "Copy"),
        (stack(f"{SITE}/torch/a.py:3 linear", op="mm", main=False), f"{SITE}/torch/a.py:3 linear", "mm"),
        (stack(f"{SITE}/torch/a.py:3 f", "<string>:1 <module>", main=False), "<string>:1 <module>", ""),
        ((Frame("", 0, "at::_ops::mm::redispatch(at::Tensor const&)"),), "operator mm", "mm"),
        ((Frame("", 0, "cudaMalloc"),), "(no frames)", ""),
        ((Frame("y>", 3, "f"), Frame("<y", 3, "f")), "(no frames)", ""),
        ((Frame("model.cpp", 3, "f()"), Frame("<x>", 3, "g"), Frame("<y", 3, "h"), Frame("z>", 3, "i")), "<x>:3 g", ""),
    ],
)  # fmt: skip
def test_source_of_a_stack_without_the_program(frames, source: str, op: str) -> None:
    origin = find_origin(frames)
    assert (origin.source, origin.op) == (source, op)


def test_the_operator_is_the_outermost_below_the_innermost_line() -> None:
    inner, outer, above = (Frame("", 0, f"at::_ops::{name}::call(x)") for name in ("empty", "mul", "linear"))
    line, node = Frame("/home/me/model.py", 3, "f"), Frame("", 0, "torch::autograd::generated::MmBackward0::apply(x)")
    assert find_origin((inner, outer, line, above)).op == "mul"
    assert find_origin((inner, outer, node, ENGINE)).op == "MmBackward0"
    assert find_origin((node, line)).op == "MmBackward0"  # where there is no operator
    assert find_origin((inner, node, line)).op == "empty"  # a forward: its operator says more
    # A custom function's Python code in a backward, and a module that is recomputed, have operators of their own.
    for name in ("PyNode", "PythonFunction", "Node"):
        python = Frame("", 0, f"torch::autograd::{name}::apply(x)")
        assert find_origin((inner, python, ENGINE)).op == ("PyNode" if name == "PyNode" else "empty")
    module = stack("model.py:12 forward", "call", op="mul", main=False)
    assert find_origin((*module, node, ENGINE)).op == "mul"
    # Of several nodes, the outermost.
    second = Frame("", 0, "torch::autograd::generated::AddBackward0::apply(x)")
    assert find_origin((node, second, ENGINE)).op == "AddBackward0"


@pytest.mark.parametrize(
    "name",
    [
        "Tensor",
        "Scalar_out",
        "dim",
        "dim_max",
        "dtype",
        "dtype_layout",
        "memory_format",
        "generator",
        "generator_out",
        "vec",
        "start",
        "start_step",
    ],
)
def test_overloads(name: str) -> None:
    assert find_origin(stack("model.py:12 forward", op=f"mul_{name}")).op == "mul"


@pytest.mark.parametrize("name", ["log_softmax", "starter", "mul_x", "vector_norm", "add_dimension"])
def test_names_that_end_like_an_overload(name: str) -> None:
    assert find_origin(stack("model.py:12 forward", op=name)).op == name


@pytest.mark.parametrize(
    "name", ["wrapper", "wrapped", "wrapped_func", "new_forward", "decorate_context", "inner", "decorator", "_fn"]
)
def test_functions_that_wrap_a_forward(name: str) -> None:
    lines = ("block.py:20 forward", f"wrap.py:1 {name}", f"wrap.py:2 {name}", "call", "net.py:7 forward", "call")
    assert find_origin(stack(*lines)).module == "net:7 > block:20"


def test_chains_of_calls() -> None:
    call_impl, wrapped, slow = ("module.py:1 _call_impl", "module.py:2 _wrapped_call_impl", "module.py:3 _slow_forward")
    for calls in ((call_impl,), (wrapped,), (slow,), (slow, call_impl, wrapped)):
        origin = find_origin(stack("block.py:20 forward", *calls, "net.py:7 forward", *calls))
        assert (origin.module, origin.in_module) == ("net:7 > block:20", True)
    # A wrapper right below a call has its own module's call below it.
    assert find_origin(stack("a.py:1 forward", call_impl, "b.py:2 wrapper", call_impl)).module == "b:2 > a:1"
    assert find_origin(stack("wrap.py:2 wrapper", call_impl)).module == "wrap:2"
    assert find_origin(stack(r"C:\me\net.py:7 forward", "call")).module == "net:7"
    for lines, module, part in (
        (("train.py:1 f",), "(outside modules)", "forward"),
        (("train.py:1 f", f"{SITE}/torch/optim/sgd.py:3 step"), "(optimizer)", "optimizer step"),
        (("train.py:1 f", f"{SITE}/torch/autograd/graph.py:3 _engine_run_backward"), "(backward)", "backward"),
    ):
        origin = find_origin(stack(*lines))
        assert (origin.module, origin.part, origin.in_module) == (module, part, False)


OPTIMIZER_LINES = [
        *((f"my_{file}.py:3 step", True) for file in (
            "optim", "Adam", "sgd", "lion", "muon", "shampoo", "adafactor", "lamb")),
        *((f"my_adam.py:3 {name}", True) for name in (
            "__init__", "_init_group", "init_group", "init_state", "add_param_group")),
        ("my_adam.py:3 update", False),
        ("my_lambda.py:3 step", False),
        ("/adam/train.py:3 step", False),  # the file's name counts
        (f"{SITE}/torch/optim/adamw.py:3 anything", True),
        (f"{SITE}/torch/optim/lr_scheduler.py:3 step", False),
    ]  # fmt: skip


def test_lines_of_an_optimizer() -> None:
    for line, is_optimizer in OPTIMIZER_LINES:
        assert (find_origin(stack(line)).part == "optimizer step") == is_optimizer


@pytest.mark.parametrize(
    "name",
    ["__init__", "reset_parameters", "_apply", "convert", "load_state_dict", "from_pretrained",
     "_load_from_state_dict", "from_config", "_load_state_dict_into_meta_model", "init_weights", "init_weight",
     "create_weights", "load_model", "materialize", "_init_weights", "_broadcast_coalesced_reshape"],
)  # fmt: skip
def test_functions_that_build_a_model(name: str) -> None:
    assert find_origin(stack(f"model.py:5 {name}")).category == "parameters"


CATEGORIES_OF_LINES = [
        *(((f"f.py:3 {name}",), "", "logits and loss") for name in (
            "cross_entropy", "nll_loss", "log_softmax", "my_loss", "loss_fn", "LOSS", "logsumexp")),
        (("f.py:3 flossing",), "", "logits and loss"),
        (("f.py:3 forward",), "nll_loss_forward", "logits and loss"),
        (("f.py:3 forward",), "cross_entropy_loss", "logits and loss"),
        (("f.py:3 forward",), "mse_loss", "logits and loss"),
        (("f.py:3 forward",), "log_softmax_int", "logits and loss"),
        (("f.py:3 forward",), "softmax", None),
        *((("f.py:3 load",), op, "inputs") for op in (
            "to", "_to_copy", "copy_", "rand", "randn", "randint", "randperm", "zeros", "ones", "full", "empty",
            "empty_strided", "tensor", "arange", "arange_start")),
        (("f.py:3 load",), "total", None),
        (("f.py:3 load",), "mul", None),
        (("f.py:3 forward", "call"), "zeros", None),  # within a module
        (("cache_engine.py:3 allocate",), "", "KV cache"),
        (("kv_cache.py:3 f",), "", "KV cache"),
        (("f.py:3 make_kvcache",), "", "KV cache"),
        (("f.py:3 forward", "call", "kv_cache.py:9 f"), "", None),  # what calls the module is not what allocates
        # Of the lines below the module's call, the innermost that says something decides.
        (("f.py:3 cross_entropy", "kv_cache.py:9 f"), "", "logits and loss"),
        (("kv_cache.py:9 f", "f.py:3 cross_entropy"), "", "KV cache"),
    ]  # fmt: skip


def test_category_by_the_line_or_the_operator() -> None:
    for lines, op, category in CATEGORIES_OF_LINES:
        assert find_origin(stack(*lines, op=op)).category == category


@pytest.mark.parametrize(
    ("native", "category"),
    [
        *((name, "library workspace") for name in (
            "myWorkspace", "allocate_workspace()", "getCurrentCUDABlasHandle", "cublasLtMatmul", "cudnn::run_conv_plan",
            "at::cuda::blas::gemm()")),
        ("flat::cuda::blas::gemm()", None),
        *((name, "communication") for name in ("c10d::f()", "ProcessGroupX", "a::Reducer::f", "ncclSend", "NCCL")),
        ("at::native::f()", None),
    ],
)  # fmt: skip
def test_category_by_a_function_of_cpp(native: str, category: str | None) -> None:
    frame, line = Frame("", 0, native), Frame("/home/me/model.py", 3, "forward")
    assert find_origin((frame, line)).category == category
    assert find_origin((line, frame)).category is None  # what is outside the program's line allocates nothing


@pytest.mark.parametrize(
    ("node", "category"),
    [
        *((f"{name}Backward0", "logits and loss") for name in (
            "NllLoss", "LogSoftmax", "CrossEntropyLoss", "MseLoss", "SmoothL1Loss", "KlDiv", "BinaryCrossEntropy")),
        ("MmBackward0", None),
    ],
)  # fmt: skip
def test_category_by_the_node_of_a_backward(node: str, category: str | None) -> None:
    apply = Frame("", 0, f"torch::autograd::generated::{node}::apply(x)")
    assert find_origin((apply, ENGINE)).category == category
    assert find_origin((apply, Frame("/x/model.py", 3, "f"))).category is None  # no engine runs


def test_guesses_by_how_long_a_block_lives() -> None:
    outside, inside = find_origin(stack("train.py:1 f")), find_origin(stack("model.py:1 forward", "call"))
    optimizer = find_origin(stack("my_adam.py:3 step"))
    backward = find_origin((*stack("f.py:3 f", main=False), ENGINE))
    assert guess_category(find_origin(stack("train.py:40 f", op="zeros")), outlives=False) == "inputs"  # known
    for origin, kept in (
        (outside, "unattributed"),
        (inside, "activations"),
        (optimizer, "optimizer state"),
        (backward, "gradients"),
    ):
        assert guess_category(origin, outlives=False, saved=True) == "temporaries"
        assert guess_category(origin, outlives=True) == kept
    assert guess_category(outside, outlives=True, saved=True) == "activations"


def test_calls_around_an_origin() -> None:
    origin = find_origin(
        stack("linear.py:3 forward", "call", "block.py:20 forward", "call", "net.py:7 forward", "call")
    )
    assert list_module_calls(origin) == [("", "net"), ("net:7", "block"), ("block:20", "linear")]
    assert list_module_calls(find_origin(stack("train.py:1 f"))) == []
