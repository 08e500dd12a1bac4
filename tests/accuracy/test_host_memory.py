"""Host memory: offloaded bytes are counted exactly, and the machine's own memory stays small.

Each program runs in a process of its own, whose peak of resident memory is the kernel's (`VmHWM`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.processes import python

GIB = 1 << 30

PRELUDE = """
import json, re, sys
import torch
from torch import nn
import memprof
from memprof.ledger.ledger import build_ledger


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = self.qkv(self.norm(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(x)))


def report(gpu, **facts):
    trace = gpu.trace
    document = gpu.report()
    host = [s for s in trace.storages if s.device == "cpu"]
    print(json.dumps({
        # Not getrusage: that has the most of the process that forked this one as well.
        "rss": 1024 * int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]),
        "peak": document.peak.allocated_bytes,
        "host_peak": document.host_peak_bytes,
        "stages": [[s.name, s.allocated_bytes, s.host_allocated_bytes, s.peak_host_bytes] for s in document.stages],
        "host": [s.num_bytes for s in host],
        "mismatches": len(trace.mismatches),
        "text": str(document),
        **facts,
    }))
"""


def run(program: str) -> dict[str, Any]:
    [result] = reports(program)
    return result


def reports(program: str) -> list[dict[str, Any]]:
    """What `program` reports of each virtual GPU in turn."""
    done = python("-c", PRELUDE + program)
    assert done.exit_code == 0, done.stderr[-2000:]
    results = [json.loads(line) for line in done.stdout.splitlines()]
    for result in results:
        assert result["rss"] < 2 * GIB
        assert result["mismatches"] == 0
    return results


def test_an_8b_model_is_built_on_the_host_and_moved() -> None:
    result = run("""
from transformers import AutoConfig, AutoModelForCausalLM

config = AutoConfig.for_model(
    "llama", hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
    num_key_value_heads=8, vocab_size=128256, tie_word_embeddings=False,
)
with memprof.virtual_gpu("h100-80gb") as gpu:
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    parameters = sum(p.numel() for p in model.parameters())
    before = gpu.allocated_bytes
    model.to("cuda")
    after = gpu.allocated_bytes
report(gpu, parameters=parameters, before=before, after=after)
""")
    weights = 2 * result["parameters"]
    assert result["parameters"] == 8_030_261_248
    # On the host first, then on the GPU (with the buffers of the rotary embedding: 64 frequencies, twice).
    assert result["before"] == 0
    assert weights <= result["after"] < weights + 4096
    # Parameters move one by one, so that the host is full when the first arrives; norms are 8 KiB each and counted.
    assert weights <= result["host_peak"] < 1.01 * weights
    assert "host peak" in result["text"]


@pytest.mark.parametrize("fused", [False, True])
def test_an_optimizer_on_the_host(fused: bool) -> None:
    """Gradients are copied down, the step runs on the host in float32, parameters are copied back."""
    program = """
with memprof.virtual_gpu("h100-80gb") as gpu:
    model = nn.Sequential(*[Layer(2048, 16) for _ in range(8)]).to("cuda", torch.bfloat16)
    masters = [p.detach().to("cpu", torch.float32) for p in model.parameters()]
    for master in masters:
        master.requires_grad_(True)
    optimizer = torch.optim.AdamW(masters, lr=1e-4, fused=FUSED)
    weights = gpu.allocated_bytes
    for step in range(2):
        model(torch.randn(1, 512, 2048, device="cuda", dtype=torch.bfloat16)).float().sum().backward()
        for parameter, master in zip(model.parameters(), masters):
            master.grad = parameter.grad.to("cpu", torch.float32)
            parameter.grad = None
        optimizer.step()
        optimizer.zero_grad()
        for parameter, master in zip(model.parameters(), masters):
            parameter.data.copy_(master.data)
    left = gpu.allocated_bytes
    on_host = {str(v.device) for state in optimizer.state.values() for v in state.values()}
report(gpu, sizes=[p.numel() for p in masters], weights=weights, left=left, on_host=sorted(on_host))
"""
    result = run(program.replace("FUSED", str(fused)))
    sizes = result["sizes"]
    assert result["on_host"] == ["cpu"]
    # Master weights, gradients and two moments, float32. A step that is not fused takes beside them, for its largest
    # tensor (down.weight), a root and a quotient, while the denominator of the one before (up.bias) still lives.
    temporary = 0 if fused else 2 * 4 * max(sizes) + 4 * 8192
    assert result["host_peak"] == 4 * 4 * sum(sizes) + temporary
    # On the GPU: bfloat16 weights alone between steps, their gradients beside them, and never optimizer state.
    assert result["weights"] == 2 * sum(sizes)
    workspace = 2 * (32 << 20)
    assert result["left"] <= result["weights"] + workspace + (8 << 20)
    assert result["peak"] < 3.5 * result["weights"]


KINDS = ("none", "pinned", "pageable", "wrapper")


def decoders() -> dict[str, dict[str, Any]]:
    """A decoder's step, with what autograd saves on the GPU and in three ways on the host."""
    found = reports(f"""
from contextlib import nullcontext
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper


def decoder(offload):
    seen = []

    def pack(tensor):
        seen.append(tensor.numel() * tensor.element_size())
        return tensor

    with memprof.virtual_gpu("h100-80gb") as gpu:
        layers = [Layer(1024, 8) for _ in range(6)]
        if offload == "wrapper":
            layers = [offload_wrapper(layer) for layer in layers]
        model = nn.Sequential(*layers).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        context = nullcontext()
        if offload in ("pinned", "pageable"):
            context = torch.autograd.graph.save_on_cpu(pin_memory=offload == "pinned")
        if offload == "none":
            context = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
        x = torch.randn(2, 2048, 1024, device="cuda", requires_grad=True)
        with context:
            loss = model(x).sum()
        after_forward = gpu.allocated_bytes
        loss.backward()
        del loss
        after_backward = gpu.allocated_bytes
        optimizer.step()
    report(gpu, seen=sum(s for s in seen if s >= 4096), after_forward=after_forward, after_backward=after_backward)


for kind in {KINDS!r}:
    decoder(kind)
""")
    return dict(zip(KINDS, found, strict=True))


@pytest.mark.nightly
def test_saved_tensors_on_the_host() -> None:
    """What autograd saves leaves the GPU and is found on the host, byte for byte."""
    found = decoders()
    plain = found.pop("none")
    for kind, offloaded in found.items():
        # The model was built on the host too, and has left it before the forward begins.
        saved = max(peak for name, _, _, peak in offloaded["stages"] if name not in ("context", "other"))
        assert saved == plain["seen"], kind
        # The GPU keeps less after the forward, and the same after the backward.
        assert offloaded["after_forward"] < 0.35 * plain["after_forward"], kind
        assert offloaded["after_backward"] == plain["after_backward"], kind
        assert offloaded["peak"] < 0.6 * plain["peak"], kind
        assert offloaded["stages"][-1][2] == 0, kind
