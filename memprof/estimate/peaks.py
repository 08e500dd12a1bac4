"""The moments at which a run can be at its highest, and what is alive at each: the closed form itself.

Each moment is a sum of terms; the estimate is the moment with the largest sum. Names are those of the ledger's
categories, so that they can be laid beside the virtual GPU's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from memprof.estimate.geometry import Geometry, Subject
from memprof.estimate.layers import Layer, kept_per_layer
from memprof.estimate.methods import FORMATS, Plan
from memprof.estimate.projections import Setting
from memprof.estimate.tape import FLOAT32, Tape
from memprof.units import KIB

CUBLAS_WORKSPACE = (4096 * 2 + 16 * 8) * KIB
CUBLAS_WORKSPACE_HOPPER = 4096 * 8 * KIB
"""Per thread that multiplies matrices (aten/src/ATen/cuda/CublasHandlePool.cpp); on compute capability 9.0 the larger
one. A training step has two such threads, the program's and autograd's."""
BLOCK = 512
"""The caching allocator rounds to it (c10/cuda/CUDACachingAllocator.cpp, kMinBlockSize)."""
NF4_BLOCK = 64
NF4_SCALE_BLOCK = 256
"""Weights per scale, and scales per scale of theirs (bitsandbytes/functional.py, quantize_4bit)."""
STATE_BLOCK = 256
SMALLEST_8BIT = 4096
"""8-bit AdamW: elements per scale, and below how many a tensor's state stays float32 (bitsandbytes/optim)."""
FORMAT_GROUP = 128
"""Rows per scale of GPTQ's and AWQ's weights, and the side of a block of float8 ones (their checkpoints'
quantization_config)."""
STATES = {
    "adamw": (2, 1), "adam": (2, 1), "sgd": (0, 0), "sgd-momentum": (1, 0), "adagrad": (1, 2), "rmsprop": (1, 1),
    "none": (0, 0),
}  # fmt: skip
"""Elements of state that an optimizer has per parameter, and of temporaries in its step over all at once
(torch/optim/*.py, the _multi_tensor functions)."""
QUANTIZED_STATES = {
    "adamw-8bit": 2 + 2 * FLOAT32 / STATE_BLOCK, "torchao-adamw-8bit": 2 + 2 * FLOAT32 / STATE_BLOCK,
    "torchao-adamw-4bit": 1 + 2 * FLOAT32 / 128, "paged-adamw-8bit": 0.0,
}  # fmt: skip
"""Bytes of state per parameter, scales included; paged state is in managed memory, which torch does not count."""

Terms = dict[str, int]


@dataclass(frozen=True, slots=True)
class Shards:
    """Over how many cards each part of the state is spread."""

    parameters: int = 1
    gradients: int = 1
    optimizer: int = 1
    replicas: int = 1
    """Cards, each with its own micro-batch."""


@dataclass(frozen=True, slots=True)
class Moment:
    """What is alive at one moment."""

    name: str
    terms: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """Their sum."""
        return sum(self.terms.values())


@dataclass(frozen=True, slots=True)
class State:
    """Bytes that do not depend on tokens."""

    parameters: int
    trained: int
    """Elements that are trained."""
    gradients: int
    optimizer: int
    temporaries: int
    """Of the optimizer step."""


def state(subject: Subject, plan: Plan) -> State:
    """Weights, gradients and optimizer state.

    With a geometry, every matrix is counted; else what is known is the number of parameters, and a quantized model
    cannot be told from it.
    """
    g = subject.geometry
    count = subject.num_parameters
    # Where only the number was given, the shape comes near it.
    parameters = count * plan.item if g is None else round(_weights(g, plan) * count / g.num_parameters)
    kind = plan.method.kind
    if not plan.method.trains:
        return State(parameters, 0, 0, 0, 0)
    if kind == "lora":
        trained = _adapter(g, plan) if g is not None else 0
        return _with_optimizer(plan, parameters + FLOAT32 * trained, trained, FLOAT32)
    item = plan.item
    if kind == "adamw-8bit":
        optimizer = 2 * count + 2 * FLOAT32 * count // STATE_BLOCK
        if g is not None:  # what is small
            small = g.norm_parameters if max(g.hidden, g.head_dim) < SMALLEST_8BIT else 0
            optimizer += (2 * FLOAT32 - 2) * small
        return State(parameters, count, item * count, optimizer, 0)
    return _with_optimizer(plan, parameters, count, item)


def _with_optimizer(plan: Plan, parameters: int, trained: int, item: int) -> State:
    each = item * trained
    if plan.optimizer in QUANTIZED_STATES:
        return State(parameters, trained, each, round(QUANTIZED_STATES[plan.optimizer] * trained), 0)
    elements, temporaries = STATES[plan.optimizer]
    return State(parameters, trained, each, elements * each, 0 if plan.fused else temporaries * each)


def _weights(g: Geometry, plan: Plan) -> int:
    if not plan.quantized:
        return g.num_parameters * plan.item
    matrices = [(rows * columns, columns, bias) for rows, columns, bias in g.matrices().values()]
    quantized = g.layers * sum(size for size, _, _ in matrices)
    rest = (g.num_parameters - quantized) * plan.item
    if plan.quantized == "fp8":
        return rest + quantized + FLOAT32 * quantized // FORMAT_GROUP**2
    if plan.quantized in FORMATS:
        # Packed integers; per group and column a scale in half precision and a zero; GPTQ's group of each row.
        bits = 8 if plan.quantized.endswith("8") else 4
        packed = quantized * bits // 8 + quantized // FORMAT_GROUP * (16 + bits) // 8
        rows = sum(rows for rows, _, _ in g.matrices().values()) if plan.quantized.startswith("gptq") else 0
        return rest + packed + FLOAT32 * g.layers * rows
    if plan.quantized == "int8":
        # A byte each, and a float32 scale per row.
        return rest + quantized + g.layers * FLOAT32 * sum(columns for _, columns, _ in matrices)
    each = sum(
        size // 2 + size // NF4_BLOCK + FLOAT32 * size // NF4_BLOCK // NF4_SCALE_BLOCK for size, _, _ in matrices
    )
    # Two tables and an offset for each matrix.
    return rest + g.layers * (each + len(matrices) * 4 * BLOCK)


def _adapter(g: Geometry, plan: Plan) -> int:
    matrices = g.matrices()
    return g.layers * plan.lora_rank * sum(sum(matrices[name][:2]) for name in g.lora_targets(plan.lora_targets))


def setting_of(g: Geometry, plan: Plan, batch_size: int, context_length: int) -> Setting:
    """What the layers need to know."""
    lora = plan.method.kind == "lora"
    return Setting(
        g,
        batch_size,
        context_length,
        plan.item,
        training=plan.method.trains,
        trains_weights=plan.method.trains and not lora,
        amp=plan.amp,
        quantize=plan.quantized,
        lora_rank=plan.lora_rank if lora else 0,
        lora_targets=g.lora_targets(plan.lora_targets) if lora else (),
        padded=plan.padded,
        cache=plan.method.kind == "inference",
    )


def moments(subject: Subject, plan: Plan, batch_size: int, context_length: int, shards: Shards) -> tuple[Moment, ...]:
    """Every moment at which the run may be at its highest. A model without a geometry has its weights alone."""
    held = state(subject, plan)
    if plan.method.kind == "weights":
        return (Moment("loaded", {"parameters": held.parameters}),)
    assert subject.geometry is not None
    setting = setting_of(subject.geometry, plan, batch_size, context_length)
    if plan.method.kind == "inference":
        return (_prompt(setting, held), _decoding(setting, held, plan.new_tokens))
    return tuple(_Training(setting, plan, held, shards).moments())


def _prompt(setting: Setting, held: State) -> Moment:
    """The last layer of the prompt's forward: the cache is full, and the layer's tensors are alive."""
    g = setting.geometry
    tape = Tape(setting.tokens, training=False)
    hidden = tape.given(g.hidden, setting.stream_item, needs_grad=False, name="hidden states")
    Layer(tape, setting).forward(hidden)
    # The model's forward holds on to the embedding's output and to the layer's input.
    around = 2 * hidden.num_bytes + _positions(setting)
    return Moment(
        "last layer of the prompt",
        {
            "parameters": held.parameters,
            "KV cache": kv_cache(setting),
            "activations": tape.peak + around,
            "library workspace": CUBLAS_WORKSPACE,
        },
    )


def _decoding(setting: Setting, held: State, new_tokens: int) -> Moment:
    """The last token: the cache is at its longest, and one layer's keys are there twice, as they are joined to it."""
    g = setting.geometry
    last = dataclasses.replace(setting, context_length=setting.context_length + new_tokens - 1)
    copy = g.kv_width * last.tokens * setting.compute_item
    of_token = setting.batch_size * (g.vocab + 4 * g.hidden + 3 * g.intermediate) * setting.compute_item
    return Moment(
        "last token",
        {
            "parameters": held.parameters,
            "KV cache": kv_cache(last),
            "activations": copy + of_token,
            "library workspace": CUBLAS_WORKSPACE,
        },
    )


def kv_cache(setting: Setting) -> int:
    """Keys and values of every token in every layer; right after a prompt, a window does not make them fewer."""
    g = setting.geometry
    return 2 * g.layers * g.kv_width * setting.tokens * setting.compute_item


def _positions(setting: Setting) -> int:
    """Cosines and sines, and the mask where a window is shorter than the context."""
    g = setting.geometry
    rotary = 2 * setting.context_length * int(g.head_dim * g.rotary) * setting.stream_item
    both = 2 if g.family == "gemma3_text" else 1  # one for each kind of layer
    length = setting.context_length
    masks = 2 if g.family.startswith("gemma") else 1
    mask = masks * length * length if setting.masked else 0
    if setting.padded:
        mask *= setting.batch_size
    return both * rotary + mask


class _Training:
    """The moments of a training step in its steady state: optimizer state is there, gradients are not."""

    def __init__(self, setting: Setting, plan: Plan, held: State, shards: Shards) -> None:
        self.setting, self.plan, self.held, self.shards = setting, plan, held, shards
        self.g = g = setting.geometry
        self.tokens = setting.tokens
        self.trains_weights = setting.trains_weights
        self.layer_parameters = (g.linear_parameters + g.norm_parameters) // g.layers
        self.static: Terms = {
            "parameters": held.parameters // shards.parameters,
            "optimizer state": held.optimizer // shards.optimizer,
            "library workspace": 2 * CUBLAS_WORKSPACE,
        }
        self.communication = self._communication()
        self.logits_item = setting.compute_item
        self.vocab_tokens = g.vocab * self.tokens
        self.logits_bytes = self.logits_item * self.vocab_tokens
        self.hidden_bytes = g.hidden * setting.stream_item * self.tokens
        self.final = self._final_norm()
        self.kept = self._kept()

    def _communication(self) -> int:
        shards, held = self.shards, self.held
        if shards.replicas == 1 or not self.trains_weights:
            return 0
        if shards.parameters > 1:
            # FSDP2: the layer at work and the one fetched before it, whole, and the gradients of one, whole.
            return 3 * self.layer_parameters * (2 if self.plan.amp else self.plan.item)
        if shards.gradients == 1:
            return held.gradients  # DistributedDataParallel's buckets, a second copy of the gradients
        return 2 * self.layer_parameters * self.plan.item

    def _final_norm(self) -> int:
        tape = Tape(self.tokens, training=True)
        layer = Layer(tape, self.setting)
        hidden = tape.given(self.g.hidden, self.setting.stream_item, needs_grad=True, name="hidden states")
        out = layer.norm(hidden, "input of the head")
        tape.drop(out)
        kept = tape.kept_bytes + (hidden.num_bytes if hidden.holders > 1 else 0)
        if self.trains_weights:
            kept += self.g.hidden * self.tokens * self.setting.compute_item
        return kept

    def _cast_weights(self) -> int:
        """Half-precision copies of a layer's weights under autocast."""
        if not self.plan.amp or self.plan.quantized:
            return 0
        return 2 * self.g.linear_parameters // self.g.layers

    def _kept(self) -> list[int]:
        """Bytes that each layer keeps until its backward."""
        g = self.g
        if self.plan.method.checkpointing:
            return [self.hidden_bytes] * g.layers
        each = kept_per_layer(self.setting)[1] + self._cast_weights()
        first = kept_per_layer(self.setting, hidden_needs_grad=self.trains_weights)[1] + self._cast_weights()
        kept = [first] + [each] * (g.layers - 1)
        if g.global_every and self.setting.masked:
            without = dataclasses.replace(self.setting, geometry=dataclasses.replace(g, window=0))
            each = kept_per_layer(without)[1] + self._cast_weights()
            kept[g.global_every - 1 :: g.global_every] = [each] * (g.layers // g.global_every)
        return kept

    def _head_copy(self) -> int:
        return 2 * self.g.vocab * self.g.hidden if self.plan.amp else 0

    def _logits(self) -> int:
        """The logits, which the caller holds, with what a cap on them keeps."""
        return self.logits_bytes * (2 if self.g.softcap else 1) + self._head_copy()

    def _moment(
        self, name: str, *, activations: int = 0, gradients: int = 0, logits: int = 0, temporaries: int = 0
    ) -> Moment:
        terms = {
            **self.static,
            "gradients": gradients // self.shards.gradients,
            "activations": activations,
            "logits and loss": logits,
            "temporaries": temporaries,
        }
        return Moment(name, terms | ({"communication": self.communication} if self.communication else {}))

    def moments(self) -> Iterator[Moment]:
        """In the order in which a step has them."""
        around = _positions(self.setting) + 16 * self.tokens  # token ids and labels, int64
        activations = sum(self.kept) + self.final + around
        # transformers' loss works in float32 (loss/loss_utils.py): a copy of the logits, its log-softmax, and in the
        # backward the gradients of both.
        loss = FLOAT32 * self.vocab_tokens
        upcast = loss if self.logits_item < FLOAT32 else 0
        cached = self._cast_weights() * self.g.layers if self.plan.method.checkpointing else 0
        yield self._moment(
            "loss, forward",
            activations=activations + cached + 2 * self.hidden_bytes,
            logits=self._logits() + upcast + loss,
        )
        yield self._moment("loss, backward", activations=activations, logits=self._logits() + 3 * loss)
        head = self.g.vocab * self.g.hidden
        head_grad = self.held.gradients * head // max(self.held.trained, 1) if self.trains_weights else 0
        yield self._moment(
            "head, backward",
            activations=activations + self.hidden_bytes,
            gradients=head_grad,
            logits=self._logits() + self.logits_bytes + self._head_copy() * self.trains_weights,
        )
        yield from self._layers(around, head_grad)
        if self.trains_weights:
            # The embedding's gradient is added to the head's, out of place, where they are one matrix.
            extra = 2 * head_grad if self.g.tied else 0
            yield self._moment(
                "embedding, backward",
                activations=around + self.hidden_bytes,
                gradients=self.held.gradients + extra,
                logits=self.logits_bytes,
            )
        temporaries = self.held.temporaries // self.shards.optimizer
        yield self._moment("optimizer step", gradients=self.held.gradients, temporaries=temporaries)

    def _layers(self, around: int, head_grad: int) -> Iterator[Moment]:
        """The backward of the last layer, when all activations are there, and of the first, when gradients are."""
        tape = Tape(self.tokens, training=True)
        hidden = tape.given(self.g.hidden, self.setting.stream_item, needs_grad=True, name="hidden states")
        output = Layer(tape, self.setting).forward(hidden)
        tape.drop(output)
        kept = tape.live
        recomputed = kept + self._cast_weights() if self.plan.method.checkpointing else 0
        forward_peak = tape.peak
        tape.peak = tape.live
        grads = tape.backward(output)
        above = max(tape.peak, forward_peak if recomputed else 0) - kept
        layer_grads = grads if self.trains_weights else 0
        for name, done in (("last layer, backward", 0), ("first layer, backward", self.g.layers - 1)):
            left = sum(self.kept[: self.g.layers - done])
            yield self._moment(
                name,
                activations=left + around + recomputed + above,
                gradients=head_grad + done * layer_grads,
                logits=self.logits_bytes,
            )
