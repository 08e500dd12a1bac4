"""Several GPUs in one process: which tensor is where, what they say, and what crosses from one to another."""

import collections
import copy
import pickle

import pytest
import torch
from torch import nn

import memprof
from memprof.device.catalog import find_gpu
from memprof.errors import UsageError
from memprof.flows.gpus import RunAllocator, resolve_settings
from memprof.trace.events import EventKind
from memprof.virtual import VirtualGpu

MIB = 1 << 20


def gpus(number: int, name: str = "a100-80gb", *, workspaces: bool = False) -> VirtualGpu:
    gpu, settings = find_gpu(name), resolve_settings(None)
    return VirtualGpu(gpu, gpus=number, workspaces=workspaces, memory=lambda trace: RunAllocator(trace, gpu, settings))


def test_several_gpus_of_the_library():
    with memprof.virtual_gpus(2, "a100-80gb") as run:
        kept = [megabytes(3, "cuda:0"), megabytes(30, "cuda:1")]
    report = run.report()
    assert report.gpu == "cuda:1" and report.peak.allocated_bytes == kept[1].nbytes
    assert run.report(gpu=0).peak.allocated_bytes == kept[0].nbytes
    assert run.report(limit_bytes=(426 << 20) + (30 << 20)).verdict.fits
    assert run.report(limit_bytes=(426 << 20) + (22 << 20)).verdict.fits is False
    with pytest.raises(UsageError, match="n must be at least 1"):
        memprof.virtual_gpus(0)
    with pytest.raises(UsageError, match="99,999 GPUs"):
        memprof.virtual_gpus(99_999)


def megabytes(number: int, device: str, **options) -> torch.Tensor:
    return torch.empty(number, MIB // 4, device=device, **options)


def taken(run: VirtualGpu) -> list[tuple[str, str, int]]:
    trace = run.trace
    return [
        (trace.storages[ref].device, trace.op(trace.storages[ref]), trace.storages[ref].num_bytes)
        for kind, ref in trace.events
        if kind is EventKind.ALLOC
    ]


def test_each_gpu_has_its_own_tensors_and_statistics():
    with gpus(3):
        first, second = megabytes(1, "cuda"), megabytes(2, "cuda:1")
        assert torch.cuda.device_count() == torch.accelerator.device_count() == 3
        assert (first.device, second.device) == (torch.device("cuda", 0), torch.device("cuda:1"))
        assert (first.get_device(), second.get_device(), second.cpu().get_device()) == (0, 1, -1)
        assert [torch.cuda.memory_allocated(index) for index in range(3)] == [MIB, 2 * MIB, 0]
        large = megabytes(30, "cuda:1")
        del large
        assert torch.cuda.max_memory_allocated("cuda:1") == 32 * MIB
        torch.cuda.reset_peak_memory_stats(torch.device("cuda:1"))
        assert torch.cuda.max_memory_allocated(1) == 2 * MIB
        free = [torch.cuda.mem_get_info(index)[0] for index in range(3)]
        assert free[2] - free[0] == 2 * MIB and free[2] - free[1] == torch.cuda.memory_reserved(1)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved(1) == 20 * MIB
        assert "device ID 1" in torch.cuda.memory_summary(1)


def test_the_current_gpu_is_where_cuda_is():
    with gpus(2):
        assert torch.cuda.current_device() == 0
        with torch.cuda.device(1):
            assert torch.cuda.current_device() == 1
            assert torch.zeros(3, device="cuda").get_device() == torch.tensor([1]).cuda().get_device() == 1
            assert torch.arange(4, device="cuda:0").get_device() == 0
        torch.cuda.set_device("cuda:1")
        assert torch.empty(0, device="cuda").get_device() == 1
        with torch.cuda.device_of(torch.zeros(2, device="cuda:0")):
            assert torch.randn(2, device="cuda").get_device() == 0
        stream = torch.cuda.Stream(0)
        with torch.cuda.stream(stream):
            assert torch.cuda.current_device() == 0 and torch.cuda.current_stream() == stream
        assert torch.cuda.current_device() == 1 and torch.cuda.current_stream(0) == torch.cuda.default_stream(0)
        assert [generator.device.index for generator in torch.cuda.default_generators] == [0, 1]
        assert torch.Generator("cuda:1").device == torch.device("cuda:1")


def test_what_is_made_of_a_tensor_is_beside_it():
    with gpus(2):
        x = megabytes(1, "cuda:1", requires_grad=True)
        made = [x * 2, x.new_zeros(3), torch.zeros_like(x), x[:1], x.detach().clone(), torch.tensor([2.0]).to(x)]
        made += [nn.functional.dropout(x), x.sum(), nn.Linear(4, 4).to("cuda:1").weight, x.type(torch.float16)]
        assert {one.get_device() for one in made} == {1}
        x.square().sum().backward()
        assert x.grad.get_device() == 1 and torch.cuda.memory_allocated(0) == 0


def test_gradients_go_back_to_where_they_came_from():
    with gpus(2) as run:
        x, w = megabytes(1, "cuda:0", requires_grad=True), megabytes(1, "cuda:1", requires_grad=True)
        (x.to("cuda:1") * w).sum().backward()
        assert x.grad.get_device() == 0 and w.grad.get_device() == 1
        assert torch.cuda.memory_allocated(0) == 2 * MIB
        y = megabytes(1, "cuda:1").copy_(x)
        y.sum().backward()
        assert x.grad.get_device() == 0
    assert ("cuda:0", "aten._to_copy", MIB) in taken(run)


@pytest.mark.parametrize(
    ("mix", "said"),
    [
        (lambda x, y: x + y, "found at least two devices, cuda:0 and cuda:1!"),
        (lambda x, y: x + y.sum(), "found at least two devices, cuda:0 and cuda:1!"),
        (lambda x, y: y @ x.T, "mat2 is on cuda:0, different from other tensors on cuda:1 (when checking argument in "
                               "method wrapper_CUDA_mm)"),
        (lambda x, y: x[y.long()], "on cpu or on the same device as the indexed tensor (cuda:0)"),
    ],
)  # fmt: skip
def test_gpus_are_not_mixed(mix, said):
    with gpus(2) as run:
        with pytest.raises(RuntimeError) as raised:
            mix(megabytes(1, "cuda:0"), megabytes(1, "cuda:1"))
        assert said in str(raised.value)
    assert [operand.device for operand in run.trace.mismatches[0].operands][:2] in (
        ["cuda:0", "cuda:1"],
        ["cuda:1", "cuda:0"],
    )


def test_a_mismatch_between_gpus_is_found():
    """With both lines; nothing that moves host tensors would help."""
    with memprof.virtual_gpus(2, "a100-80gb") as run, pytest.raises(RuntimeError):
        nn.Linear(8, 8).to("cuda:1")(torch.ones(4, 8, device="cuda:0"))
    found = next(one for one in run.report().findings if one.id == "device-mismatch")
    assert "is given cuda:1 and cuda:0" in found.title and not found.fixes
    assert "mat1 is on cuda:0, different from other tensors on cuda:1" in found.evidence[-2].text
    assert found.evidence[-1].text.startswith("fix: move it with .to(<the cuda:1 tensor>.device) before")


@pytest.mark.parametrize("ask", [
    lambda: torch.empty(1, device="cuda:2"), lambda: torch.zeros(1).to("cuda:2"), lambda: torch.cuda.set_device(2),
])  # fmt: skip
def test_a_gpu_that_is_not_there(ask):
    with gpus(2), pytest.raises(RuntimeError, match="invalid device ordinal"):
        ask()
    with gpus(2), pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_name(2)


def test_of_one_gpu_every_index_means_it():
    """A script of one rank of several names the GPU by its local rank."""
    with gpus(1):
        assert torch.empty(1, device="cuda:3").device == torch.device("cuda:0")


def test_gpus_that_do_not_reach_each_other_copy_through_buffers():
    def copied(name: str) -> list[tuple[str, str, int]]:
        with gpus(2, name) as run:
            x = megabytes(2, "cuda:0").T
            x.to("cuda:1")  # as it lies: one transfer
            x.to("cuda:1", torch.float16)
        return taken(run)[1:]

    assert copied("a100-80gb") == [("cuda:1", "aten._to_copy", 2 * MIB), ("cuda:1", "aten._to_copy", MIB)]
    assert copied("rtx-4090") == [
        ("cuda:1", "aten._to_copy", 2 * MIB),
        ("cuda:1", "aten._to_copy", MIB),
        ("cuda:1", "aten._to_copy", 2 * MIB),
        ("cuda:0", "aten._to_copy", 2 * MIB),
    ]


def test_each_gpu_has_its_workspace():
    with gpus(2, workspaces=True) as run:
        for device in ("cuda:0", "cuda:1", "cuda:1"):
            x = torch.ones(64, 64, device=device)
            x @ x
    spaces = [device for device, op, _ in taken(run) if op == "cublas workspace"]
    assert spaces == ["cuda:0", "cuda:1"]


def test_one_gpu_is_full_and_the_other_is_not():
    gpu, settings = find_gpu("rtx-4090"), resolve_settings(None)
    half = 15 << 30
    with VirtualGpu(gpu, gpus=2, memory=lambda trace: RunAllocator(trace, gpu, settings), raises_oom=True):
        kept = [torch.empty(half, dtype=torch.uint8, device=f"cuda:{index}") for index in range(2)]
        with pytest.raises(torch.OutOfMemoryError, match=r"GPU 1 has a total capacity"):
            torch.empty(half, dtype=torch.uint8, device="cuda:1")
        assert len(kept) == 2


def test_a_module_in_data_parallel():
    """By hand: the second GPU holds a flat copy of all parameters and half of the batch; all gradients meet on the
    first, where they are added up in flat buffers."""
    wide, narrow, batch = 1024, 512, 64
    parameters = 4 * (wide * wide + wide * narrow)
    with gpus(2) as run:
        model = nn.Sequential(nn.Linear(wide, wide, bias=False), nn.ReLU(), nn.Linear(wide, narrow, bias=False)).cuda()
        parallel = nn.DataParallel(model)
        y = parallel(torch.randn(batch, wide))
        assert y.shape == (batch, narrow) and y.get_device() == 0
        half = 4 * batch // 2 * wide  # of the input, and of the hidden layer
        assert torch.cuda.memory_allocated(1) == parameters + 2 * half
        y.sum().backward()
        assert {parameter.grad.get_device() for parameter in model.parameters()} == {0}
        del y
        assert torch.cuda.memory_allocated(0) == 2 * parameters and torch.cuda.memory_allocated(1) == 0
    taken_by = collections.Counter((device, op) for device, op, size in taken(run) if size == parameters)
    assert taken_by == {
        ("cuda:0", "aten.cat"): 2,
        ("cuda:1", "aten.empty_like"): 1,
        ("cuda:1", "aten.cat"): 1,
        ("cuda:0", "aten.empty_like"): 1,
    }


def test_batch_norm_on_the_second_gpu():
    """Its kernel gives out an empty tensor, which has no memory that would say where it is."""
    with gpus(2):
        layer = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)).to("cuda:1")
        with torch.autocast("cuda"):
            layer(torch.randn(2, 3, 8, 8, device="cuda:1")).sum().backward()
        assert {parameter.grad.get_device() for parameter in layer.parameters()} == {1}


def test_optimizers_step_on_each_gpu():
    with gpus(2):
        weights = [nn.Parameter(megabytes(1, f"cuda:{index % 2}")) for index in range(4)]
        for fused in (False, True):
            optimizer = torch.optim.AdamW(weights, fused=fused)
            sum(weight.square().sum().to("cuda:0") for weight in weights).backward()
            assert nn.utils.clip_grad_norm_(weights, 1.0).get_device() == 0
            optimizer.step()
            for weight, state in optimizer.state.items():
                assert state["exp_avg"].device == weight.device


def test_tensors_are_saved_and_copied_where_they_are(tmp_path):
    with gpus(2):
        x = megabytes(1, "cuda:1")
        assert copy.deepcopy(x).device == pickle.loads(pickle.dumps(x)).device == x.device
        torch.save(x, tmp_path / "x.pt")
        assert torch.load(tmp_path / "x.pt").device == x.device
        assert torch.load(tmp_path / "x.pt", map_location="cuda:0").get_device() == 0


def test_what_a_backward_pass_makes_of_nothing_is_on_its_gpu():
    """Zeros for a gradient that nobody gave, and for the parts of a tensor that were not used."""

    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, first, second):
            return first * 2, second * 2

        @staticmethod
        def backward(ctx, first, second):
            return first * 2, second * 2

    with gpus(2):
        x, y = (megabytes(2, "cuda:1", requires_grad=True) for _ in range(2))
        Twice.apply(x, y)[0].sum().backward()
        x.unbind(0)[1].sum().backward()
        assert x.grad.get_device() == y.grad.get_device() == 1


def test_the_gradient_of_a_host_tensor_goes_back_to_the_host():
    """Of a large one as well, which is virtual like those on the GPU."""
    with gpus(1):
        x = torch.randn(1024, 1024, requires_grad=True)
        x.cuda().sum().backward()
        assert x.grad.device.type == "cpu" and torch.cuda.memory_allocated() == 0
        y = megabytes(2, "cuda", requires_grad=True)
        y.cpu().sum().backward()
        assert y.grad.is_cuda


def test_a_snapshot_of_all_gpus():
    with gpus(2):
        torch.cuda.memory._record_memory_history()
        kept = [megabytes(1, "cuda:1"), megabytes(30, "cuda:1"), megabytes(2, "cuda:0")]
        snapshot = torch.cuda.memory._snapshot()
    assert len(kept) == 3
    assert [segment["device"] for segment in snapshot["segments"]] == [0, 1, 1]
    taken_by = [[event["size"] for event in trace if event["action"] == "alloc"] for trace in snapshot["device_traces"]]
    assert taken_by == [[2 * MIB], [MIB, 30 * MIB]]


def test_a_gpu_is_set_by_what_selects_one():
    with gpus(2):
        torch.cuda.set_device(torch.cuda.device(1))
        assert torch.cuda.current_device() == 1
