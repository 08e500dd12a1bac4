"""The work of a run, counted on the virtual GPU, against torch's own counter on real tensors."""

from collections import Counter

import pytest
import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import memprof
from memprof.trace.events import GPU, HOST
from memprof.virtual.flops import _flop_formulas


def total(trace, name):
    return sum(getattr(work, name) * work.calls for work in trace.work)


def llama():
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=300, attn_implementation="eager",
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def convolutional():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3, stride=2), nn.Flatten(), nn.Linear(4 * 36, 5)
    )


def step_llama(model, device):
    ids = torch.arange(40, device=device).reshape(2, 20)
    model(input_ids=ids, labels=ids).loss.backward()


def step_convolutional(model, device):
    model(torch.zeros(2, 3, 16, 16, device=device)).sum().backward()


@pytest.mark.parametrize(
    ("build", "step"), [(llama, step_llama), (convolutional, step_convolutional)], ids=["llama", "convolutional"]
)
def test_operations_are_those_of_torchs_counter(build, step):
    with FlopCounterMode(display=False) as counter:
        step(build(), "cpu")
    with memprof.virtual_gpu() as gpu:
        step(build().to("cuda"), "cuda")
    assert total(gpu.trace, "operations") == counter.get_total_flops() > 0


def test_causal_attention_does_half_the_work():
    counts = []
    for causal in (False, True):
        with memprof.virtual_gpu() as gpu:
            q, k, v = (torch.zeros(1, 4, 256, 64, dtype=torch.bfloat16, device="cuda") for _ in range(3))
            nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        counts.append(total(gpu.trace, "operations"))
    assert counts == [4 * 4 * 256 * 256 * 64, 2 * 4 * 256 * 256 * 64]


def test_bytes_over_the_bus():
    megabytes = 3
    with memprof.virtual_gpu() as gpu:
        host = torch.zeros(megabytes << 20, dtype=torch.uint8)
        device = host.to("cuda")
        host.copy_(device)
        device.copy_(host)
        device.to("cpu")
        device.clone()
    assert total(gpu.trace, "to_device_bytes") == 2 * megabytes << 20
    assert total(gpu.trace, "to_host_bytes") == 2 * megabytes << 20


def test_bytes_read_and_written():
    with memprof.virtual_gpu() as gpu:
        a = torch.empty(1000, dtype=torch.float32, device="cuda")
        a + a.expand(1000)
        a.mul_(2)
        torch.empty(1, device="cuda").expand(1000) + a
    by_op = Counter()
    for work in gpu.trace.work:
        by_op[gpu.trace.ops[work.op]] += work.num_bytes * work.calls
    assert by_op["aten.mul_"] == 8000
    assert by_op["aten.add"] == 12_000 + 4 + 8000  # what is expanded is read once


def test_work_on_the_host_is_the_hosts():
    with memprof.virtual_gpu() as gpu:
        big = torch.zeros(1 << 20)
        big.mul_(2)
    assert any(work.device == HOST for work in gpu.trace.work)
    assert not any(work.device == GPU and work.num_bytes for work in gpu.trace.work)


def test_shared_heads_count_with_a_formula_that_knows_none(monkeypatch):
    """As torch's is before 2.12."""

    def formula(query, key, value, *rest, **options):
        shapes = [given if isinstance(given, torch.Size) else given.shape for given in (query, key, value)]
        assert shapes[0][:2] == shapes[1][:2] == shapes[2][:2]
        return 4 * shapes[0].numel() * shapes[1][-2]

    for name in ("flash", "efficient"):
        packet = getattr(torch.ops.aten, f"_scaled_dot_product_{name}_attention")
        monkeypatch.setitem(_flop_formulas(), packet, formula)
    with memprof.virtual_gpu("a100-80gb") as gpu:
        query = torch.zeros(2, 8, 64, 32, dtype=torch.bfloat16, device="cuda")
        key = torch.zeros(2, 2, 64, 32, dtype=torch.bfloat16, device="cuda")
        nn.functional.scaled_dot_product_attention(query, key, key, enable_gqa=True)
    assert total(gpu.trace, "operations") == 4 * query.numel() * 64


@pytest.mark.skipif(torch.__version__ < "2.9", reason="torch 2.8 takes this overload for another on meta tensors")
def test_an_overload_that_torch_has_no_formula_for_counts():
    with memprof.virtual_gpu() as gpu:
        left = torch.zeros(8, 16, dtype=torch.bfloat16, device="cuda")
        right = torch.zeros(16, 4, dtype=torch.bfloat16, device="cuda")
        total_sum = torch.zeros(8, 4, device="cuda")
        torch.addmm(total_sum, left, right, out_dtype=torch.float32)
    assert total(gpu.trace, "operations") == 2 * 8 * 16 * 4
    assert torch.ops.aten.addmm in _flop_formulas()


def test_collectives_that_are_operators_send_what_those_of_the_group_do():
    """DTensor's and context parallelism's, each against torch.distributed's own on the same tensors."""
    from torch.distributed import _functional_collectives as functional

    operators = torch.ops._c10d_functional
    with memprof.virtual_gpus(4, rank=1) as gpu:
        dist.init_process_group("nccl")
        group, part = dist.group.WORLD, torch.zeros(8, 16, device="cuda")
        whole = torch.zeros(32, 16, device="cuda")
        for of_both in (
            (lambda: functional.all_reduce(part, "sum", group), lambda: dist.all_reduce(part)),
            (
                lambda: operators.all_gather_into_tensor(part, 4, group.group_name),
                lambda: dist.all_gather_into_tensor(torch.empty_like(whole), part),
            ),
            (
                lambda: operators.reduce_scatter_tensor(whole, "sum", 4, group.group_name),
                lambda: dist.reduce_scatter_tensor(torch.empty_like(part), whole),
            ),
            (
                lambda: functional.all_to_all_single(whole, [8] * 4, [8] * 4, group),
                lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
            ),
        ):
            for call in of_both:
                call()
        functional.permute_tensor(part, [1, 2, 3, 0], group)  # all of it goes to the next
        dist.destroy_process_group()
    sent = Counter()
    for work in gpu.trace.work:
        sent[gpu.trace.ops[work.op].split(".")[0], work.link_bytes] += work.calls if work.link_bytes else 0
    one, all_of_it = 8 * 16 * 4, 32 * 16 * 4
    expected = [one * 6 // 4, 3 * one, all_of_it * 3 // 4, all_of_it * 3 // 4]
    ours = sorted(size for (kind, size), calls in sent.items() for _ in range(calls) if kind != "c10d")
    groups = sorted(size for (kind, size), calls in sent.items() for _ in range(calls) if kind == "c10d")
    assert ours == sorted([*expected, one]) and groups == sorted(expected)


def test_the_work_is_asked_for_while_another_thread_counts():
    class Counted(list):
        def __iter__(self):
            meter._counts[1000] = []  # a phase that another thread begins
            return super().__iter__()

    with memprof.virtual_gpu("a100-80gb") as gpu:
        torch.ones(4, device="cuda") * 2
        meter = gpu._virtual.dispatch_mode.meter
        for phase, counts in meter._counts.items():
            meter._counts[phase] = Counted(counts)
        assert meter.finish()
