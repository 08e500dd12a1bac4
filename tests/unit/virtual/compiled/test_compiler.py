"""torch.compile on the virtual GPU: what Inductor's wrapper allocates, in order; fallbacks; nothing is left behind."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from memprof.device.catalog import find_gpu
from memprof.flows.account import analyze
from memprof.ledger.categories import categorize
from memprof.ledger.stages import list_spans
from memprof.trace.events import EventKind, Trace
from memprof.virtual import VirtualGpu

pytest.importorskip("triton", reason="Inductor writes no kernels for a GPU without it")

GPU = find_gpu("a100-80gb")
MIB = 1 << 20
ROWS, WIDTH, HIDDEN = 4096, 1024, 4096
SMALL, LARGE = 4 * ROWS * WIDTH, 4 * ROWS * HIDDEN


@pytest.fixture
def gpu() -> Iterator[VirtualGpu]:
    with VirtualGpu(GPU) as virtual:
        torch._dynamo.utils.counters.clear()
        yield virtual


class Block(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.dropout = dropout

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.up(x))
        return x + nn.functional.dropout(self.down(hidden), self.dropout, self.training)


def batch(rows: int = ROWS) -> torch.Tensor:
    return torch.randn(rows, WIDTH, device="cuda")


def moves(trace: Trace, since: int) -> list[int]:
    """Bytes that were taken (positive) and released, in order, without what libraries keep."""
    storages = [trace.storages[event.ref] for event in trace.events[since:] if event.kind in MOVES]
    signs = [1 if event.kind is EventKind.ALLOC else -1 for event in trace.events[since:] if event.kind in MOVES]
    return [sign * s.num_bytes for sign, s in zip(signs, storages, strict=True) if not s.hidden and s.device != "cpu"]


MOVES = (EventKind.ALLOC, EventKind.FREE)


def eager_lines(gpu: VirtualGpu) -> list[str]:
    return [line for line in gpu.trace.assumptions if "runs eagerly" in line]


def test_a_forward_takes_the_buffers_of_its_wrapper(gpu: VirtualGpu) -> None:
    """Two products; gelu and the sum are done in place, where eager code makes a tensor each."""
    model = Block().cuda().eval()
    compiled = torch.compile(model)
    x = batch()
    with torch.no_grad():
        for _ in range(2):
            since = len(gpu.trace.events)
            compiled(x)
            assert moves(gpu.trace, since) == [LARGE, SMALL, -LARGE, -SMALL]
        since = len(gpu.trace.events)
        model(x)
        assert moves(gpu.trace, since)[:2] == [LARGE, LARGE]
    assert not eager_lines(gpu)


@pytest.mark.nightly
def test_torch_that_is_built_for_cuda_asks_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on the login node of a cluster: what asks the driver is there, and fails."""

    def no_driver(*args: object) -> None:
        raise RuntimeError("CUDA driver version is insufficient for CUDA runtime version")

    for name in ("_cuda_getCurrentRawStream", "_cuda_getDevice", "_accelerator_getDeviceIndex"):
        monkeypatch.setattr(torch._C, name, no_driver, raising=False)
    monkeypatch.setattr(torch._C, "_accelerator_getAccelerator", lambda: torch.device("cuda"))
    with VirtualGpu(GPU) as gpu:
        model = torch.compile(Block().cuda())
        model(batch()).sum().backward()
    assert not eager_lines(gpu)
    assert torch._C._cuda_getCurrentRawStream is no_driver  # type: ignore[comparison-overlap]


def test_a_step_is_compiled_once_and_keeps_what_its_backward_needs(gpu: VirtualGpu) -> None:
    compiled = torch.compile(Block(dropout=0.1).cuda())
    optimizer = torch.optim.AdamW(compiled.parameters())
    frames: list[int] = []
    for _ in range(3):
        since = len(gpu.trace.events)
        out = compiled(batch())
        # The input, the first product, gelu, the result in the place of the second product, and the dropout's mask.
        kept = sum(moves(gpu.trace, since))
        assert out.grad_fn is not None and kept == SMALL + LARGE + LARGE + SMALL + SMALL // 4
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        del out
        frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert frames[0] == frames[-1]
    assert not eager_lines(gpu)


def test_autocast_inside_and_around(gpu: VirtualGpu) -> None:
    model = Block().cuda()
    compiled = torch.compile(model)
    with torch.autocast("cuda", torch.bfloat16):
        out = compiled(batch())
    assert out.dtype is torch.float32 and out.grad_fn is not None  # a sum with the input, which is none of the listed

    @torch.compile
    def inside(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16):
            return model.up(x)

    assert inside(batch()).dtype is torch.float16
    assert not eager_lines(gpu)


def test_buffers_have_the_module_the_line_and_the_operator_that_they_are_of(gpu: VirtualGpu) -> None:
    model = nn.Sequential(Block(), Block()).cuda()
    compiled = torch.compile(model)
    since = len(gpu.trace.storages)
    compiled(batch()).sum().backward()
    trace = gpu.trace
    made = [s for s in trace.storages[since:] if s.num_bytes == LARGE and not s.hidden]
    found = {(trace.modules[s.module].path, trace.op(s), trace.sources[s.source].rpartition("/")[2]) for s in made}
    line = Block.forward.__code__.co_firstlineno + 1
    own = f"{__file__.rpartition('/')[2]}:{line} forward"
    assert {(f"{at}.up", "aten.addmm", own) for at in "01"} <= found
    assert {(f"{at}", "aten.gelu", own) for at in "01"} <= found
    assert {source for _, _, source in found} <= {own, own.replace(str(line), str(line + 1))}


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def test_a_compiled_model_is_reported_under_its_own_names(gpu: VirtualGpu) -> None:
    compiled = torch.compile(Stack().cuda())
    optimizer = torch.optim.AdamW(compiled.parameters())
    for _ in range(2):
        compiled(batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = analyze(gpu.trace)
    assert report.verdict.required_bytes > 0
    names = [owner.name for owner in gpu.trace.owners.values()] + [module.path for module in gpu.trace.modules]
    assert "layers.1.up.weight" in names and not any("_orig_mod" in name for name in names)


class Speaker(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layers = nn.Embedding(1000, WIDTH), nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 1000, bias=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.words(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.mark.nightly
def test_a_whole_models_forward_is_one_stage_that_has_its_logits(gpu: VirtualGpu) -> None:
    model = Speaker().cuda()
    compiled = torch.compile(model)
    ids = torch.arange(1000, device="cuda").reshape(4, 250)
    nn.functional.cross_entropy(compiled(ids).flatten(0, 1), ids.flatten()).backward()
    report = analyze(gpu.trace)
    names = [stage.name for stage in report.stages]
    assert "forward" in names and not {"embedding", "layer 0"} & set(names)
    logits = next(i for i, s in enumerate(gpu.trace.storages) if s.num_bytes == 4 * 1000 * 1000 and s.module != -1)
    assert categorize(gpu.trace, list_spans(gpu.trace))[logits].value == "logits and loss"


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:barrier:UserWarning")
@pytest.mark.nightly
def test_a_head_that_is_cast_is_no_logits(gpu: VirtualGpu) -> None:
    """Autocast's copy of its weight is laid out as the product wants it: hidden size by words."""
    compiled = torch.compile(Speaker().cuda())
    ids = torch.arange(1000, device="cuda").reshape(4, 250)
    with torch.autocast("cuda", torch.bfloat16):
        compiled(ids).float().sum().backward()
    trace = gpu.trace
    kept = [
        c for c, s in zip(categorize(trace, list_spans(trace)), trace.storages, strict=True) if s.shape == (WIDTH, 1000)
    ]
    assert kept and "logits and loss" not in {category.value for category in kept}


@pytest.mark.nightly
def test_a_model_that_is_compiled_in_pieces_has_its_modules() -> None:
    """DistributedDataParallel has Dynamo compile a graph for each bucket (torch/_dynamo/backends/distributed.py)."""
    with VirtualGpu(GPU, gpus=2) as gpu:
        torch.distributed.init_process_group("nccl", rank=0, world_size=2)
        model = nn.parallel.DistributedDataParallel(torch.compile(Speaker().cuda()))
        since = len(gpu.trace.storages)
        model(torch.arange(1000, device="cuda").reshape(4, 250)).sum().backward()
    made = [s for s in gpu.trace.storages[since:] if not s.hidden and s.module != -1 and s.num_bytes > MIB]
    paths = {gpu.trace.modules[s.module].path for s in made}
    assert {"module.layers.0.up", "module.layers.1"} <= paths
    assert not any("Module" in path for path in paths)


def test_the_program_may_forget_what_was_compiled(gpu: VirtualGpu) -> None:
    compiled = torch.compile(lambda x: x * 2)
    compiled(batch())
    torch._dynamo.reset()
    compiled(batch())
    assert not eager_lines(gpu)


@pytest.mark.nightly
def test_attention_inside_a_function_of_torch_is_the_kernel_that_the_gpu_chooses(gpu: VirtualGpu) -> None:
    """Not the math kernel's scores: an H100 took 803 MB for four compiled layers, where memprof had said 1,041."""
    attention = nn.MultiheadAttention(256, 4, batch_first=True, device="cuda")
    x = torch.randn(2, 512, 256, device="cuda")
    since = len(gpu.trace.storages)
    torch.compile(lambda x: attention(x, x, x, need_weights=False)[0])(x)
    made = gpu.trace.storages[since:]
    assert 4 * 2 * 4 * 512 * 512 not in {storage.num_bytes for storage in made}
    assert any("efficient_attention" in gpu.trace.op(storage) for storage in made)


def test_a_second_length_compiles_again_with_sizes_that_are_known_when_it_runs(gpu: VirtualGpu) -> None:
    compiled = torch.compile(Block().cuda().eval())
    with torch.no_grad():
        for rows in (4096, 5120, 6144):
            x = batch(rows)
            since = len(gpu.trace.events)
            compiled(x)
            assert moves(gpu.trace, since)[:2] == [4 * rows * HIDDEN, 4 * rows * WIDTH]
            del x
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    assert not eager_lines(gpu)


def test_code_between_two_graphs_runs_as_it_is_written(gpu: VirtualGpu) -> None:
    model = Block().cuda()
    seen = []

    @torch.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        hidden = model.up(x)
        torch._dynamo.graph_break()
        seen.append((hidden.device.type, torch.cuda.get_device_name()))
        return model.down(hidden)

    step(batch()).sum().backward()
    assert seen == [("cuda", GPU.name)]
    assert model.up.weight.grad is not None and model.up.weight.grad.is_cuda
    assert not eager_lines(gpu)


@pytest.mark.parametrize("breaks", [False, True])
def test_a_break_that_leaves_much_in_memory_is_a_finding(gpu: VirtualGpu, breaks: bool) -> None:
    model = Block().cuda()

    @torch.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(model.up(x))
        if breaks:
            torch._dynamo.graph_break()
        return model.down(hidden)

    step(batch()).sum().backward()
    found = [finding for finding in analyze(gpu.trace).findings if finding.id == "graph-breaks"]
    assert len(found) == breaks
    if breaks:
        (finding,) = found
        line = step.__wrapped__.__code__.co_firstlineno + 4
        assert "end at a line, and leave up to 64.00 MiB there" in finding.title
        assert f"{Path(__file__).name}:{line}: Call to `torch._dynamo.graph_break()`" in finding.evidence[0].text


def test_recomputed_inside_a_graph(gpu: VirtualGpu) -> None:
    model = Block(dropout=0.1).cuda()
    compiled = torch.compile(lambda x: checkpoint(model, x, use_reentrant=False))
    x = batch()
    since = len(gpu.trace.events)
    out = compiled(x)
    assert sum(moves(gpu.trace, since)) < SMALL + MIB  # the result and a state of random numbers
    out.sum().backward()
    assert not eager_lines(gpu)


def test_what_cannot_be_compiled_runs_eagerly_and_is_told(gpu: VirtualGpu) -> None:
    """Its CPU part would be a kernel in C++, made and run on the host."""

    def mixed(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * 2, y * 2 + 1

    x, y = batch(), torch.ones(3)
    assert torch.compile(mixed)(x, y)[1].tolist() == [3.0, 3.0, 3.0]
    (line,) = eager_lines(gpu)
    assert "mixed (" in line and f"{__file__}:" in line and line.endswith("part of it runs on the CPU.")


def test_the_hosts_own_work_gives_its_results(gpu: VirtualGpu) -> None:
    assert torch.compile(lambda x: x * 2 + 1)(torch.arange(3)).tolist() == [1, 3, 5]
    assert not eager_lines(gpu)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_other_backends_run_the_programs_operators(gpu: VirtualGpu, backend: str) -> None:
    compiled = torch.compile(Block().cuda(), backend=backend)
    since = len(gpu.trace.events)
    compiled(batch()).sum().backward()
    assert moves(gpu.trace, since)[1:3] == [LARGE, LARGE]


def test_a_backend_of_the_programs_own_is_given_its_graph(gpu: VirtualGpu) -> None:
    given = []

    def backend(graph: Any, inputs: Any) -> Callable[..., Any]:
        given.append([node.op for node in graph.graph.nodes].count("call_function"))
        return graph.forward

    torch.compile(Block().cuda(), backend=backend)(batch())
    assert given == [5]  # two linear layers, gelu, dropout and the sum


def test_errors_of_the_program_are_its_own(gpu: VirtualGpu) -> None:
    @torch.compile(fullgraph=True)
    def broken(x: torch.Tensor) -> torch.Tensor:
        torch._dynamo.graph_break()
        return x * 2

    with pytest.raises(torch._dynamo.exc.Unsupported):
        broken(batch())


def test_modes_that_need_a_gpu_are_told(gpu: VirtualGpu) -> None:
    model = Block().cuda().eval()
    with torch.no_grad():
        torch.compile(model, mode="max-autotune")(batch())
    text = " ".join(gpu.trace.assumptions)
    assert "max_autotune" in text and "CUDA graphs" in text
    assert not eager_lines(gpu)


@torch.compile
def compiled_before(x: torch.Tensor) -> torch.Tensor:
    return (x * 2).relu()


def test_what_was_compiled_before_is_compiled_for_the_gpu(gpu: VirtualGpu) -> None:
    x = batch()
    since = len(gpu.trace.events)
    compiled_before(x)
    assert moves(gpu.trace, since) == [SMALL, -SMALL]


def test_nothing_is_left_behind(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "own"))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    hooks = [vars(torch.Tensor).get(name) for name in ("_make_subclass", "_make_wrapper_subclass", "to")]
    with VirtualGpu(GPU):
        torch.compile(Block().cuda())(batch()).sum().backward()
        assert list(tmp_path.glob("memprof-inductor-*"))
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "own")
    assert not (tmp_path / "own").exists()
    assert not list(tmp_path.glob("memprof-inductor-*"))
    assert hooks == [vars(torch.Tensor).get(name) for name in ("_make_subclass", "_make_wrapper_subclass", "to")]
    assert torch.compile(lambda x: x * 2, backend="eager")(torch.ones(2)).tolist() == [2.0, 2.0]


@pytest.mark.parametrize("name", ["torch._prims.TensorMeta", "torch._dynamo.convert_frame.ConvertFrameReturn"])
def test_a_release_without_a_hook_runs_eagerly_and_is_told(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delattr(name)
    with VirtualGpu(GPU) as gpu:
        assert torch.compile(lambda x: x * 2)(torch.arange(3, device="cuda")).tolist() == [0, 2, 4]
    (line,) = eager_lines(gpu)
    assert f"for torch {torch.__version__} is not prepared for it" in line and name.rpartition(".")[2] in line


def test_by_request_nothing_is_compiled() -> None:
    with VirtualGpu(GPU, compiles=False) as gpu:
        since = len(gpu.trace.events)
        torch.compile(Block().cuda().eval())(batch())
        assert moves(gpu.trace, since).count(LARGE) >= 2
    assert eager_lines(gpu) == [
        "torch.compile runs eagerly here, as requested: compiled code fuses operators and as a rule needs less."
    ]
