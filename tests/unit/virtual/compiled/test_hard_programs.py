"""What programs do around torch.compile: backends, settings, errors, threads, folders that cannot be written."""

from __future__ import annotations

import errno
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import memprof
from memprof.device.catalog import find_gpu
from memprof.trace.events import EventKind
from memprof.virtual import VirtualGpu
from tests.unit.virtual.compiled.test_compiler import GPU, LARGE, SMALL, Block, batch, eager_lines, moves

pytest.importorskip("triton", reason="Inductor writes no kernels for a GPU without it")


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(GPU) as virtual:
        yield virtual


def double(x: torch.Tensor) -> torch.Tensor:
    """Two operators: fused, they make one tensor."""
    return (x * 2).relu()


def allocations(gpu: VirtualGpu, run: Callable[[], Any]) -> list[int]:
    """The bytes that a call takes, without what it releases."""
    since = len(gpu.trace.events)
    run()
    return [size for size in moves(gpu.trace, since) if size > 0]


def test_what_torch_held_of_triton_without_the_gpu_is_forgotten() -> None:
    """It is requested once in a process: before the virtual GPU by a library, after it by a test."""
    from torch.utils._triton import has_triton

    has_triton.cache_clear()
    without = has_triton()
    with VirtualGpu(GPU) as gpu:
        assert allocations(gpu, lambda: torch.compile(double)(batch())) == [SMALL, SMALL]
        assert not eager_lines(gpu)
    assert has_triton() is without


def told(gpu: VirtualGpu, words: str) -> list[str]:
    return [line for line in gpu.trace.assumptions if words in line]


# -- backends ----------------------------------------------------------------------------------------------------------


def test_cuda_graphs_without_inductor_run_eagerly_and_are_told(gpu: VirtualGpu) -> None:
    x = batch()
    assert allocations(gpu, lambda: torch.compile(double, backend="cudagraphs")(x)) == [SMALL, SMALL]
    (line,) = eager_lines(gpu)
    assert "(backend cudagraphs)" in line


def test_a_backend_that_does_not_exist_is_torchs_error(gpu: VirtualGpu) -> None:
    with pytest.raises(Exception, match="Invalid backend: 'fastest'"):
        torch.compile(double, backend="fastest")


def test_a_backend_that_raises_is_the_programs_error(gpu: VirtualGpu) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        raise ValueError("not today")

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="not today"):
        torch.compile(double, backend=backend)(batch())


def test_a_backend_of_the_programs_own_may_hand_on_to_inductor(gpu: VirtualGpu) -> None:
    def backend(graph: Any, inputs: Any) -> Any:
        from torch._inductor.compile_fx import compile_fx

        return compile_fx(graph, inputs)

    x = batch()
    assert allocations(gpu, lambda: torch.compile(double, backend=backend)(x)) == [SMALL]


# -- settings ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings", [{"options": {"epilogue_fusion": True}}, {"mode": "reduce-overhead"}, {"dynamic": True}]
)
def test_what_is_asked_of_inductor_does_not_keep_it_from_compiling(gpu: VirtualGpu, settings: dict[str, Any]) -> None:
    x = batch()
    assert allocations(gpu, lambda: torch.compile(double, **settings)(x)) == [SMALL]
    assert not eager_lines(gpu)


def test_settings_of_the_program_that_would_time_kernels_are_told(gpu: VirtualGpu) -> None:
    from torch._inductor import config

    with config.patch(max_autotune=True):
        torch.compile(lambda x: x @ x.T)(batch(256))
        assert config.max_autotune
    assert told(gpu, "is not asked to time kernels against each other (max_autotune)")


def test_a_function_is_compiled_as_often_as_the_program_allows(gpu: VirtualGpu) -> None:
    from torch._dynamo import config

    name = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    with config.patch({name: 2, "automatic_dynamic_shapes": False}):
        compiled = torch.compile(double)
        inputs = [batch(rows) for rows in (256, 512, 768, 1024)]
        taken = [len(allocations(gpu, partial(compiled, x))) for x in inputs]
    assert taken == [1, 1, 2, 2]  # one tensor of compiled code, or two of eager code
    (again,) = told(gpu, "is compiled again")
    assert f"double ({__file__}:" in again and "size mismatch at index 0. expected 256, actual 512" in again
    (limit,) = told(gpu, "was compiled 2 times")
    assert "for whatever fits none of them runs eagerly" in limit


def test_what_was_compiled_before_the_run_is_not_compiled_again_in_it() -> None:
    """Dynamo keeps compiled code, and looks first whether it still fits."""
    compiled = torch.compile(double, backend="eager")
    compiled(torch.zeros(3, 4))
    with VirtualGpu(GPU) as gpu:
        compiled(batch())
    assert not told(gpu, "is compiled again")


def test_dynamo_that_the_program_has_switched_off_compiles_nothing(gpu: VirtualGpu) -> None:
    from torch._dynamo import config

    x = batch()
    with config.patch(disable=True):
        assert allocations(gpu, lambda: torch.compile(double)(x)) == [SMALL, SMALL]


def test_a_stance_of_the_program_holds(gpu: VirtualGpu) -> None:
    x, compiled = batch(), torch.compile(double)
    with torch.compiler.set_stance("force_eager"):
        assert allocations(gpu, lambda: compiled(x)) == [SMALL, SMALL]
    assert allocations(gpu, lambda: compiled(x)) == [SMALL]


@pytest.mark.nightly
def test_cuda_graphs_have_a_pool_that_is_kept() -> None:
    """Eager code gets nothing of what graphs have, and it does not go back."""
    with memprof.virtual_gpu("a100-80gb") as gpu:
        model = Block().cuda()
        compiled = torch.compile(model, mode="reduce-overhead")
        x = batch()
        reserved = []
        for _ in range(4):
            compiled(x).square().mean().backward()
            model.zero_grad()
            reserved.append(torch.cuda.memory_reserved())
        torch.cuda.empty_cache()
        kept = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    trace = gpu.trace
    assert reserved[2] == reserved[3]  # replays take nothing more
    assert kept >= 2 * LARGE  # the activations' place
    assert {event.ref for event in trace.events if event.kind is EventKind.POOL} == {0, 1}
    # The batch, and the gradient of the result that the backward's graph is given.
    assert [s.num_bytes for s in trace.storages if trace.op(s) == "aten.empty_strided"] == [SMALL, SMALL]
    assert any("in a pool of their own" in line for line in trace.assumptions)
    (line,) = trace.graphed
    assert line.sizes == 1 and line.source.endswith(" forward")


@pytest.mark.parametrize("dynamic", [None, False])
def test_graphs_are_counted_for_each_size(gpu: VirtualGpu, dynamic: bool | None) -> None:
    """Whether they are compiled again or not."""
    step = torch.compile(lambda x: (x + 1) * 2, mode="reduce-overhead", dynamic=dynamic)
    for rows in (1024, 2048, 4096, 2048):
        step(torch.randn(rows, 1024, device="cuda"))
    assert [line.sizes for line in gpu.trace.graphed] == [3]


# -- functions ---------------------------------------------------------------------------------------------------------


def test_a_function_that_is_not_to_be_compiled_ends_a_graph(gpu: VirtualGpu) -> None:
    left_out = torch.compiler.disable(double)

    @torch.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        return (left_out(x + 1) * 2).relu()

    x = batch()
    assert allocations(gpu, lambda: step(x)) == [SMALL] * 4  # the sum, two of eager code, and what follows
    (line,) = told(gpu, "A graph ends at")
    at = step.__wrapped__.__code__.co_firstlineno + 2
    assert f"{__file__}:{at} (" in line and "16.00 MiB are left there in memory" in line


def test_compiled_code_in_compiled_code_is_one_graph(gpu: VirtualGpu) -> None:
    inner = torch.compile(double)
    x = batch()
    assert allocations(gpu, lambda: torch.compile(lambda x: inner(x + 1) - 1)(x)) == [SMALL]


def test_a_mistake_in_compiled_code_is_told_as_torch_tells_it(gpu: VirtualGpu) -> None:
    with pytest.raises(RuntimeError, match="must have same reduction dim") as raised:
        torch.compile(lambda x: x @ torch.ones(3, 3, device="cuda"))(batch())
    assert f"{__file__}" in str(raised.value)
    assert not eager_lines(gpu)


def test_another_thread_may_call_compiled_code(gpu: VirtualGpu) -> None:
    x, compiled, shapes = batch(), torch.compile(double), []
    compiled(x)
    thread = threading.Thread(target=lambda: shapes.append(compiled(x).shape))
    thread.start()
    thread.join()
    assert shapes == [x.shape]


# -- files -------------------------------------------------------------------------------------------------------------


def test_caches_of_the_machine_are_neither_read_nor_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Folders that are named by the environment, and what is in the home and the temporary folder."""
    for name in ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "HOME"):
        (tmp_path / name / "fxgraph").mkdir(parents=True)
        (tmp_path / name / "fxgraph" / "entry").write_text("of another run")
        monkeypatch.setenv(name, str(tmp_path / name))
    for folder in tmp_path.iterdir():
        folder.chmod(0o500)
    opened: list[str] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path.parent))
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    with VirtualGpu(GPU) as gpu:
        torch.compile(Block().cuda())(batch()).sum().backward()
        opened += [name for name in _loaded() if name.startswith(str(tmp_path))]
    assert not eager_lines(gpu) and not opened
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before
    assert all(path.read_text() == "of another run" for path in tmp_path.rglob("entry"))


def _loaded() -> list[str]:
    """Files of generated code that are in use."""
    from torch._inductor.codecache import PyCodeCache

    return [str(module.__file__) for module in PyCodeCache.modules]


def test_a_full_disk_is_told_and_the_program_runs_eagerly(gpu: VirtualGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import codecache

    def write(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(codecache, "write_atomic", write)
    x = batch()
    assert allocations(gpu, lambda: torch.compile(double)(x)) == [SMALL, SMALL]
    (line,) = eager_lines(gpu)
    assert line.startswith("double (") and "No space left on device" in line


def test_without_a_folder_to_write_in_nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_folder(*args: Any, **kwargs: Any) -> str:
        raise PermissionError(errno.EACCES, "Permission denied")

    with VirtualGpu(GPU) as gpu:
        monkeypatch.setattr(tempfile, "mkdtemp", no_folder)
        compiled = torch.compile(double)
        x = batch()
        assert allocations(gpu, lambda: compiled(x)) == [SMALL, SMALL]
    (line,) = eager_lines(gpu)
    assert "no folder to write its code in ([Errno 13] Permission denied)" in line


@pytest.mark.nightly
def test_a_layer_that_is_compiled_once_serves_all_that_are_alike(gpu: VirtualGpu) -> None:
    torch._dynamo.utils.counters.clear()
    layers = nn.ModuleList(Block() for _ in range(3)).cuda()
    for layer in layers:
        layer.compile()
    x = batch().requires_grad_()
    for layer in layers:
        x = layer(x)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    assert not told(gpu, "is compiled again")


# -- what decides memory -----------------------------------------------------------------------------------------------


def kept(gpu: VirtualGpu, run: Callable[[], torch.Tensor]) -> tuple[int, torch.Tensor]:
    """Bytes that a forward leaves behind, and its result."""
    since = len(gpu.trace.events)
    result = run()
    return sum(moves(gpu.trace, since)), result


@pytest.mark.nightly
def test_a_budget_for_activations_is_what_the_partitioner_keeps_to(gpu: VirtualGpu) -> None:
    from torch._functorch import config

    found = []
    for budget in (1.0, 0.5, 0.0):
        torch._dynamo.reset()
        with config.patch(activation_memory_budget=budget):
            model, x = torch.compile(nn.Sequential(Block(), Block()).cuda()), batch()
            num_bytes, result = kept(gpu, partial(model, x))
            result.sum().backward()
            found.append(num_bytes)
    assert found[0] > found[1] > found[2] == SMALL  # the last: the result alone
    assert not eager_lines(gpu)


def test_selective_checkpointing_inside_a_graph_keeps_what_it_must(gpu: VirtualGpu) -> None:
    products = (torch.ops.aten.addmm.default, torch.ops.aten.mm.default)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if operator in products else CheckpointPolicy.PREFER_RECOMPUTE

    model, x = Block().cuda(), batch().requires_grad_()
    contexts = partial(create_selective_checkpoint_contexts, policy)
    compiled = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False, context_fn=contexts))
    num_bytes, result = kept(gpu, partial(compiled, x))
    assert num_bytes == LARGE + SMALL  # the products, the second of which becomes the result
    result.sum().backward()


def test_a_compiled_optimizer_makes_its_state_and_nothing_else(gpu: VirtualGpu) -> None:
    model = Block().cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    step = torch.compile(optimizer.step)
    model(batch()).sum().backward()
    weights = [4 * parameter.numel() for parameter in model.parameters()]
    assert allocations(gpu, step) == [size for weight in weights for size in (4, weight, weight)]
    assert allocations(gpu, step) == []
    assert all(tensor.is_cuda for state in optimizer.state.values() for tensor in state.values())
    assert not eager_lines(gpu)


def test_compiled_code_that_enters_a_mode_leaves_the_runs_own(gpu: VirtualGpu) -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    mask = torch.compile(create_block_mask)(lambda b, h, q, k: q >= k, None, None, 2048, 2048, device="cuda")
    assert mask.kv_num_blocks.is_cuda and torch.ones(2, device="cuda").is_cuda


def test_a_graph_ends_where_a_stream_is_entered(gpu: VirtualGpu) -> None:
    stream = torch.cuda.Stream()

    @torch.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        x = double(x)
        with torch.cuda.stream(stream):
            return double(x)

    x = batch()
    assert allocations(gpu, partial(step, x)) == [SMALL, SMALL]
    assert told(gpu, "(a stream is entered)") and not eager_lines(gpu)


def test_an_operator_of_the_programs_own_is_called_by_the_graph(gpu: VirtualGpu) -> None:
    @torch.library.custom_op("memprof_tests::twice", mutates_args=())
    def twice(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    twice.register_fake(torch.empty_like)
    x = batch()
    assert allocations(gpu, partial(torch.compile(lambda x: twice(x + 1).relu()), x)) == [SMALL, SMALL]
    assert not eager_lines(gpu)


@pytest.mark.nightly
def test_a_backward_pass_as_one_graph_runs_as_without_and_is_told(gpu: VirtualGpu) -> None:
    model = torch.compile(Block().cuda())
    with torch._dynamo.config.patch(compiled_autograd=True):
        torch.compile(lambda x: model(x).sum().backward())(batch())
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert told(gpu, "(compiled autograd)")


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:barrier:UserWarning")
@pytest.mark.nightly
def test_layers_that_are_compiled_and_sharded_gather_and_let_go_as_eager_ones() -> None:
    """fully_shard's hooks are around the compiled forward: the gathered weights are whole for one layer at a time."""
    found = []
    for compiles in (True, False):
        torch._dynamo.reset()
        with VirtualGpu(GPU, gpus=2) as gpu:
            torch.distributed.init_process_group("nccl", rank=0, world_size=2)
            model = nn.Sequential(Block(), Block()).cuda()
            for layer in model:
                if compiles:
                    layer.compile()
                fully_shard(layer)
            fully_shard(model)
            for _ in range(2):
                since = len(gpu.trace.storages)
                model(batch()).sum().backward()
                model.zero_grad()
            trace = gpu.trace
            assert not eager_lines(gpu)
        made = [trace.storages[at] for at in range(since, len(trace.storages))]
        found.append([(s.num_bytes, trace.op(s)) for s in made if "chunk_cat" in trace.op(s) or "fsdp" in trace.op(s)])
        fused = [trace.op(s) for s in made if s.num_bytes == LARGE]
        assert ("aten.gelu_backward" in fused) != compiles, fused
    assert found[0] == found[1] and found[0]


def test_an_operator_in_python_compiles_its_own_body() -> None:
    """As modded-nanogpt's products in float8 do: numbers become tensors there, and nothing ends the graph."""

    @torch.library.custom_op("memprof_test::product_in_float8", mutates_args=())
    def product(x: torch.Tensor) -> torch.Tensor:
        @torch.compile(fullgraph=True)
        def inner(x: torch.Tensor) -> torch.Tensor:
            narrow, scale = x.div(2).to(torch.float8_e4m3fn), x.new_tensor(2.0, dtype=torch.float32)
            return torch._scaled_mm(narrow, narrow.T, scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)

        return inner(x)

    with VirtualGpu(find_gpu("h100-80gb")) as gpu:  # the oldest GPU with float8
        x = torch.empty(64, 256, device="cuda")
        before = len(gpu.trace.storages)
        product(x)
        taken = [storage.num_bytes for storage in gpu.trace.storages[before:]]
    assert taken == [64 * 256, 64 * 256, 4, 64 * 64 * 2]  # both factors in float8, the scale, the product
    assert not told(gpu, "A graph ends")
