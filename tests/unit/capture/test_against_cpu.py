"""Ground truth without a GPU: what the virtual GPU allocates is what the same step, really run on the CPU, allocates.

torch's profiler sees every allocation of the CPU allocator, with no mode active. Eager attention and no dropout make
the CPU run the same operators as CUDA. Left out on both sides: blocks below 1 KiB (scalars), and on the CPU the scratch
memory of kernels that have no CUDA counterpart (an allocation made and given back inside one convolution).
"""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from memprof.capture.virtual import VirtualGpu
from memprof.catalog import find_gpu
from memprof.trace.events import GPU, EventKind

SMALLEST = 1024
CPU_KERNELS = frozenset(
    {
        "aten::mkldnn_convolution",
        "aten::convolution_backward",
        "aten::_slow_conv2d_forward",
        "aten::native_layer_norm_backward",
        "aten::native_batch_norm_backward",
    }
)
Batch = dict[str, torch.Tensor]


class Change(NamedTuple):
    """One allocation (positive bytes) or free (negative), and the operator behind an allocation."""

    num_bytes: int
    op: str


class Case(NamedTuple):
    """A model, its batch, and the worst that is tolerated."""

    build: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    allocations: float
    """Least share of allocations that match, as a sequence."""
    changes: float
    """The same of allocations and frees together."""


def train(model: nn.Module, batch: Batch, steps: int = 2) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=True)
    for _ in range(steps):
        output = model(**batch)
        loss = output["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        del output, loss


def on_virtual_gpu(case: Case) -> list[Change]:
    collects = gc.isenabled()
    gc.disable()
    try:
        with VirtualGpu(find_gpu("a100-80gb"), workspaces=False) as gpu:
            with torch.device("cuda"):
                model = case.build().train()
            batch = {name: value.to("cuda") for name, value in case.batch().items()}
            begin = len(gpu.trace.events)
            train(model, batch)
            end = len(gpu.trace.events)
    finally:
        if collects:
            gc.enable()
    trace = gpu.trace
    changes = []
    for event in trace.events[begin:end]:
        if event.kind in (EventKind.ALLOC, EventKind.FREE):
            storage = trace.storages[event.ref]
            if storage.device == GPU and not storage.hidden and storage.num_bytes >= SMALLEST:
                sign = 1 if event.kind is EventKind.ALLOC else -1
                changes.append(Change(sign * storage.num_bytes, trace.op(storage)))
    return changes


def on_cpu(case: Case) -> list[Change]:
    model, batch = case.build().train(), case.batch()
    gc.collect()
    collects = gc.isenabled()
    gc.disable()
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
            train(model, batch)
    finally:
        if collects:
            gc.enable()
    assert recorded.profiler is not None and recorded.profiler.kineto_results is not None
    found: list[
        tuple[int, int, int, str, int]
    ] = []  # time, bytes, address, operator, the kernel call that it is inside

    def walk(node: Any, op: str, kernel: int) -> None:
        if node.typed[0].name == "Allocation":
            found.append((node.start_time_ns, node.extra_fields.alloc_size, node.extra_fields.ptr, op, kernel))
        elif node.name.startswith("aten::"):
            op = node.name
            if kernel == 0 and op in CPU_KERNELS:
                kernel = id(node)
        for child in node.children:
            walk(child, op, kernel)

    roots = recorded.profiler.kineto_results.experimental_event_tree()
    for root in roots:
        walk(root, "", 0)
    found.sort(key=lambda change: change[0])
    scratch: set[int] = set()
    born: dict[int, int] = {}
    for index, (_, num_bytes, address, _, kernel) in enumerate(found):
        if num_bytes > 0:
            born[address] = index
        else:
            birth = born.pop(address, None)
            if birth is not None and kernel and found[birth][4] == kernel:
                scratch |= {birth, index}
    return [
        Change(num_bytes, op)
        for index, (_, num_bytes, _, op, _) in enumerate(found)
        if index not in scratch and abs(num_bytes) >= SMALLEST
    ]


def matched(first: list[int], second: list[int]) -> float:
    """Share of two sequences that their longest common subsequence covers."""
    previous = [0] * (len(second) + 1)
    for value in first:
        row = [0]
        for column, other in enumerate(second):
            row.append(previous[column] + 1 if value == other else max(previous[column + 1], row[column]))
        previous = row
    return 2 * previous[-1] / (len(first) + len(second))


def differences(first: list[Change], second: list[Change]) -> str:
    """Allocations that only one side makes, by size."""
    ours, theirs = (Counter(c.num_bytes for c in side if c.num_bytes > 0) for side in (first, second))
    lines = []
    for title, surplus, side in (("virtual", ours - theirs, first), ("CPU", theirs - ours, second)):
        for num_bytes, count in surplus.items():
            ops = Counter(change.op for change in side if change.num_bytes == num_bytes)
            lines.append(f"only {title}: {count} x {num_bytes} bytes, made by one of {dict(ops)}")
    return "\n".join(lines)


# -- models ---------------------------------------------------------------------------------------------------------


def tokens(length: int = 64) -> Batch:
    ids = torch.arange(2 * length).reshape(2, length) % 1000
    return {"input_ids": ids, "labels": ids.clone()}


def images() -> Batch:
    return {"pixel_values": torch.zeros(4, 3, 32, 32), "labels": torch.zeros(4, dtype=torch.int64)}


def transformer(architecture: str, configuration: str, **settings: Any) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        transformers = pytest.importorskip("transformers")
        config = getattr(transformers, configuration)(**settings)
        model: nn.Module = getattr(transformers, architecture)._from_config(config, attn_implementation="eager")
        if hasattr(model.config, "use_cache"):
            model.config.use_cache = False  # type: ignore[union-attr]
        return model

    return build


GPT2 = transformer(
    "GPT2LMHeadModel", "GPT2Config", vocab_size=1000, n_embd=64, n_layer=2, n_head=4, n_positions=128,
    resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=None, eos_token_id=None,
)  # fmt: skip
LLAMA_SIZES: dict[str, Any] = {
    "vocab_size": 1000, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128,
}  # fmt: skip
LLAMA = transformer("LlamaForCausalLM", "LlamaConfig", **LLAMA_SIZES)
QWEN3 = transformer("Qwen3ForCausalLM", "Qwen3Config", **LLAMA_SIZES, head_dim=16, tie_word_embeddings=True)
BERT = transformer(
    "BertForMaskedLM", "BertConfig", vocab_size=1000, hidden_size=64, intermediate_size=256, num_hidden_layers=2,
    num_attention_heads=4, max_position_embeddings=128, hidden_dropout_prob=0, attention_probs_dropout_prob=0,
)  # fmt: skip
VIT = transformer(
    "ViTForImageClassification", "ViTConfig", hidden_size=64, intermediate_size=128, num_hidden_layers=2,
    num_attention_heads=4, image_size=32, patch_size=8, num_labels=10, hidden_dropout_prob=0,
    attention_probs_dropout_prob=0,
)  # fmt: skip

T5 = transformer(
    "T5ForConditionalGeneration", "T5Config", vocab_size=1000, d_model=64, d_kv=16, d_ff=128, num_layers=2,
    num_heads=4, dropout_rate=0, decoder_start_token_id=0,
)  # fmt: skip


def lora() -> nn.Module:
    """A frozen GPT-2 with PEFT's matrices beside its transposed layers."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(r=4, target_modules=["c_attn", "c_proj"], fan_in_fan_out=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return peft.get_peft_model(GPT2(), config)


class ConvNet(nn.Module):
    """Convolutions, batch norm, a shortcut and pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.first_norm = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16)
        self.second, self.second_norm = nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.BatchNorm2d(32)
        self.shortcut = nn.Conv2d(16, 32, 1, stride=2)
        self.head = nn.Linear(32, 10)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        states = torch.relu(self.first_norm(self.first(pixel_values)))
        states = torch.relu(self.second_norm(self.second(states))) + self.shortcut(states)
        states = nn.functional.max_pool2d(states, 2).mean((2, 3))
        return {"loss": nn.functional.cross_entropy(self.head(states), labels)}


class Perceptron(nn.Module):
    """Fan-out and fan-in in front of the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.LayerNorm(256), nn.Linear(256, 256), nn.SiLU())
        self.head = nn.Linear(256, 64)

    def forward(self, features: torch.Tensor) -> dict[str, torch.Tensor]:
        states = self.head(self.layers(features))
        return {"loss": ((states + features) - features * states.tanh()).pow(2).mean()}


class Recurrent(nn.Module):
    """A cell unrolled in Python, so that its weights are used in every time step."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.cell, self.head = nn.Embedding(1000, 64), nn.RNNCell(64, 64), nn.Linear(64, 1000)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        inputs, state, states = self.embedding(input_ids), None, []
        for step in range(inputs.shape[1]):
            state = self.cell(inputs[:, step], state)
            states.append(state)
        logits = self.head(torch.stack(states, 1))
        return {"loss": nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())}


# What is missing from 1.0 is memory that the CPU and CUDA take inside an operator, where no mode sees it: the cast of a
# boolean cumsum's input (numel x 8 bytes; the check for packed sequences) and a copy of expanded embedding indices.
CASES = {
    "gpt2": Case(GPT2, tokens, 0.996, 0.996),
    "llama": Case(LLAMA, tokens, 0.997, 0.997),
    "qwen3": Case(QWEN3, tokens, 0.998, 0.998),
    "lora": Case(lora, tokens, 0.997, 0.997),
    "bert": Case(BERT, tokens, 0.993, 0.993),
    "t5": Case(T5, tokens, 0.995, 0.995),
    "vit": Case(VIT, images, 1.0, 1.0),
    "conv": Case(ConvNet, images, 1.0, 1.0),
    "mlp": Case(Perceptron, lambda: {"features": torch.zeros(32, 64)}, 1.0, 1.0),
    "rnn": Case(Recurrent, lambda: tokens(16), 1.0, 1.0),
}


@pytest.mark.parametrize("name", CASES)
def test_same_allocations_as_on_cpu(name: str) -> None:
    case = CASES[name]
    ours, theirs = on_virtual_gpu(case), on_cpu(case)
    first, second = ([change.num_bytes for change in side] for side in (ours, theirs))
    allocations = matched([n for n in first if n > 0], [n for n in second if n > 0])
    changes = matched(first, second)
    print(f"{name}: allocations {allocations:.4f}, allocations and frees {changes:.4f}\n{differences(ours, theirs)}")
    assert allocations >= case.allocations, differences(ours, theirs)
    assert changes >= case.changes, differences(ours, theirs)
