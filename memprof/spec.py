"""What to profile: one frozen, validated description of model, workload and card; everything else follows from it."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass
from enum import StrEnum

from memprof.errors import UsageError, unknown_name

DTYPES = ("float32", "float16", "bfloat16")
AMP_DTYPES = ("float16", "bfloat16")
BITSANDBYTES_OPTIMIZERS = ("adamw-8bit", "paged-adamw-8bit")
TORCHAO_OPTIMIZERS = ("torchao-adamw-8bit", "torchao-adamw-4bit")
QUANTIZED_OPTIMIZERS = BITSANDBYTES_OPTIMIZERS + TORCHAO_OPTIMIZERS
"""Their state is quantized; each has one implementation, its library's."""
OPTIMIZERS = (
    "adamw", "adam", "sgd", "sgd-momentum", "adafactor", "adagrad", "rmsprop", *QUANTIZED_OPTIMIZERS, "none",
)  # fmt: skip
UNFUSED_OPTIMIZERS = ("adafactor", "adagrad", "rmsprop")
"""torch has no fused implementation of these for CUDA (of Adagrad it has one for the CPU)."""
ZERO_GRADS = ("none", "zero")
QUANTIZATIONS = ("int8", "nf4", "fp4")
ADAPTERS = ("lora",)
DEFAULT_LORA_RANK = 8
"""As in PEFT's LoraConfig."""
SDPA_BACKENDS = ("flash", "efficient", "math")
OPTIMIZER_IMPLS = ("foreach", "fused", "single")
NPT_MODES = ("dense", "per-token", "chunked", "low-rank")
NPT_COMBINES = ("sequential", "batched", "merged")
NPT_INITS = ("orthogonal", "fast")
NPT_DEFAULTS = {"npt_rank": 16, "npt_chunk": 16, "npt_init": "orthogonal"}
"""Of case study 1; with several rank-1 updates the initialisation is "fast"."""
DEVICES = ("virtual", "cpu", "cuda")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")


_COUNTS = (
    "context_length",
    "batch_size",
    "vocab_size",
    "new_tokens",
    "gradient_accumulation",
    "steps",
    "lora_rank",
    "npt_rank",
    "npt_num_ranks",
    "npt_chunk",
    "dataset_batches",
)


class Mode(StrEnum):
    """What is done with the model."""

    TRAIN = "train"
    INFERENCE = "inference"


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """What to profile. Sizes are counts of tokens, sequences and steps; memory is in bytes.

    Raises:
        UsageError: a value is unknown or out of range; the message names the flag.
    """

    model: str
    """A preset, a Hugging Face id, a path, or `file.py:factory` (see workload/models.py)."""
    model_is_size: bool = False
    """True if `model` is a size such as 4B, to be looked up among the documented geometries."""
    context_length: int | None = None
    """Tokens per sequence; None: 2,048, or what the model has positions for if that is less."""
    batch_size: int = 1
    """Sequences per micro-batch."""
    vocab_size: int | None = None
    """Replaces the model's vocabulary; None keeps it."""
    dtype: str | None = None
    """Of parameters and activations; None: the published checkpoint's (float16 is trained as bfloat16)."""
    amp: str | None = None
    """Autocast's dtype: forward and loss under torch.autocast, float32 weights; with float16, a GradScaler."""
    quantize: str | None = None
    """Weights of the linear layers but the head, by bitsandbytes: int8 (LLM.int8), nf4 or fp4."""
    double_quant: bool = True
    """With quantize nf4 or fp4: the scales are quantized in turn, as in QLoRA."""
    optimizer: str = "adamw"
    zero_grad: str = "none"
    """What zero_grad leaves behind: no gradients, or zeros (`set_to_none=False`)."""
    adapter: str | None = None
    """lora: PEFT's LoRA on a frozen model."""
    lora_rank: int | None = None
    """With adapter lora; None: 8."""
    lora_targets: str | None = None
    """Names of the modules to adapt, separated by commas, or all-linear; None: PEFT's choice for the architecture."""
    lora_dropout: float = 0.0
    npt: str | None = None
    """How NPT components beside the frozen model work (workload/npt.py): dense, per-token, chunked or low-rank."""
    npt_rank: int | None = None
    """With npt; None: 16."""
    npt_layers: str | None = None
    """Which layers have one: numbers and ranges separated by commas, such as 0,4-7 (-1 is the last); None: all."""
    npt_num_ranks: int | None = None
    """Each delta is a sum of so many rank-1 updates; None: a modulated matrix of low rank."""
    npt_combine: str | None = None
    """How the rank-1 updates are computed together: sequential, batched or merged; None: merged."""
    npt_chunk: int | None = None
    """Tokens of each sequence that are handled together with npt chunked; None: 16."""
    npt_init: str | None = None
    """orthogonal or fast; None: fast with npt_num_ranks, else orthogonal."""
    freeze: str | None = None
    """Glob patterns of parameter names, separated by commas: these are not trained."""
    evaluate: bool = False
    """Whether each optimizer step is followed by a forward without gradients, as in a validation loop."""
    mode: Mode = Mode.TRAIN
    new_tokens: int | None = None
    """In inference: tokens to generate after the prompt, through the model's own KV cache."""
    attention: str | None = None
    """transformers' attention implementation; None leaves the choice to the model."""
    sdpa_backend: str | None = None
    """The only backend that scaled_dot_product_attention may take; None: CUDA's choice."""
    optimizer_impl: str | None = None
    """How the optimizer steps: foreach, fused or single; None: torch's choice for CUDA (foreach)."""
    workspaces: bool = True
    """Whether memory that no tensor shows (workspaces, kernel temporaries) is counted."""
    activation_checkpointing: bool = False
    gradient_accumulation: int = 1
    """Micro-batches per optimizer step."""
    dataset_batches: int | None = None
    """Batches that are made before training and held in host memory; None: each is made when it is needed."""
    steps: int = 2
    """Optimizer steps; optimizer state appears in the first, so that the second is the steady state."""
    alloc_conf: str | None = None
    """Settings of torch's caching allocator, as in PYTORCH_CUDA_ALLOC_CONF; None: the environment's."""
    fixes: tuple[str, ...] = ()
    """Remedies that `memprof.apply` switches on in the built model: names, or NAME=VALUE (remedies/fixes.py)."""
    device: str = "virtual"
    """virtual: simulated on `gpu`; cpu or cuda: measured there."""
    detail: bool = False
    """Measured: record the line of every allocation, which takes time."""
    gpu: str = "h100-80gb"
    gpu_vram_bytes: int | None = None
    """Capacity of a card that is in no catalog; replaces `gpu`."""

    def __post_init__(self) -> None:
        if self.mode not in tuple(Mode):
            raise unknown_name("--mode", str(self.mode), [mode.value for mode in Mode])
        object.__setattr__(self, "mode", Mode(self.mode))
        object.__setattr__(self, "fixes", tuple(self.fixes))  # JSON makes a list of it
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} must be at least 1", value=value, hint="give a positive whole number")
        for name, choices in (
            ("dtype", DTYPES),
            ("amp", AMP_DTYPES),
            ("quantize", QUANTIZATIONS),
            ("optimizer", OPTIMIZERS),
            ("zero_grad", ZERO_GRADS),
            ("adapter", ADAPTERS),
            ("npt", NPT_MODES),
            ("npt_combine", NPT_COMBINES),
            ("npt_init", NPT_INITS),
            ("attention", ATTENTIONS),
            ("sdpa_backend", SDPA_BACKENDS),
            ("optimizer_impl", OPTIMIZER_IMPLS),
            ("device", DEVICES),
        ):
            value = getattr(self, name)
            if value is not None and value not in choices:
                raise unknown_name("--" + name.replace("_", "-"), value, choices)
        if self.optimizer_impl == "fused" and self.optimizer in UNFUSED_OPTIMIZERS:
            raise UsageError(f"{self.optimizer} has no fused implementation for CUDA", value="--optimizer-impl fused")
        if self.optimizer_impl is not None and self.optimizer in QUANTIZED_OPTIMIZERS:
            raise UsageError(
                f"{self.optimizer} has one implementation, its library's",
                value=f"--optimizer-impl {self.optimizer_impl}",
                hint="leave out --optimizer-impl",
            )
        self._check_what_is_trained()
        self._check_npt()
        self._check_quantize()
        if self.new_tokens is not None and self.mode is not Mode.INFERENCE:
            raise UsageError("--new-tokens is for inference", value=self.new_tokens, hint="add --mode inference")
        if self.amp is not None and self.dtype not in (None, "float32"):
            raise UsageError(
                "--amp keeps the weights in float32", value=f"--dtype {self.dtype}", hint="leave out --dtype"
            )
        if not self.model:
            raise UsageError("no model was named", hint="give --model NAME or --model-size 4B")

    def _check_what_is_trained(self) -> None:
        if self.adapter is None:
            for name, unset in (("lora_rank", None), ("lora_targets", None), ("lora_dropout", 0.0)):
                if getattr(self, name) != unset:
                    flag = "--" + name.replace("_", "-")
                    raise UsageError(f"{flag} needs an adapter", value=getattr(self, name), hint="add --adapter lora")
        elif self.lora_rank is None:
            object.__setattr__(self, "lora_rank", DEFAULT_LORA_RANK)
        if not 0 <= self.lora_dropout < 1:
            raise UsageError("--lora-dropout must be at least 0 and less than 1", value=self.lora_dropout)
        for name in ("lora_targets", "freeze"):
            value = getattr(self, name)
            if value is not None and not all(part.strip() for part in value.split(",")):
                flag = "--" + name.replace("_", "-")
                raise UsageError(f"{flag} has an empty name in it", value=repr(value), hint="separate names by commas")
        if self.freeze is not None and self.adapter is not None:
            raise UsageError("an adapter freezes the whole model already", value=f"--freeze {self.freeze}")
        if self.mode is Mode.INFERENCE:
            for flag, given in (("--freeze", self.freeze is not None), ("--evaluate", self.evaluate)):
                if given:
                    raise UsageError(f"{flag} is for training", value="--mode inference", hint=f"leave out {flag}")

    def _check_npt(self) -> None:
        if self.npt is None:
            for name in ("rank", "layers", "num_ranks", "combine", "chunk", "init"):
                value = getattr(self, f"npt_{name}")
                if value is not None:
                    flag = "--npt-" + name.replace("_", "-")
                    raise UsageError(f"{flag} needs --npt", value=value, hint=f"add --npt {'|'.join(NPT_MODES)}")
            return
        for flag, given in (("--adapter", self.adapter), ("--freeze", self.freeze)):
            if given is not None:
                raise UsageError("--npt freezes the whole model already", value=f"{flag} {given}")
        if self.npt_combine is not None and self.npt_num_ranks is None:
            raise UsageError(
                "--npt-combine needs several components", value=self.npt_combine, hint="add --npt-num-ranks"
            )
        if self.npt_layers is not None:
            parse_layers(self.npt_layers)
        defaults = dict(NPT_DEFAULTS)
        if self.npt_num_ranks is not None:
            defaults |= {"npt_init": "fast", "npt_combine": "merged"}
        for name, default in defaults.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, default)

    def _check_quantize(self) -> None:
        if not self.double_quant and self.quantize not in ("nf4", "fp4"):
            raise UsageError("--no-double-quant is for 4-bit weights", hint="add --quantize nf4 or fp4")
        if self.quantize is None:
            return
        if self.npt is not None:
            raise UsageError("--quantize does not go with --npt", value=self.quantize, hint="leave out one of them")
        if self.mode is Mode.TRAIN and self.adapter is None:
            raise UsageError(
                "quantized weights are not trained",
                value=f"--quantize {self.quantize}",
                hint="add --adapter lora, or --mode inference",
            )

    def edit(self, **changes: object) -> TargetSpec:
        """A copy with some fields replaced."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def parse_layers(text: str, count: int | None = None) -> list[int]:
    """The layers that a list such as "0,4-7,-1" names, in order and each once; negative ones count from the end.

    Without `count`, the number of layers, only the spelling is checked, and the answer has no meaning.

    Raises:
        UsageError: it is no such list, or the model has no such layer.
    """
    found: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*(-?\d+)(?:-(-?\d+))?\s*", part)
        if match is None:
            raise UsageError("--npt-layers has no layer in it", value=repr(part), hint="write 0,4-7 or -1 for the last")
        ends = [int(end) for end in match.groups() if end is not None]
        if count is not None:
            if not all(-count <= end < count for end in ends):
                raise UsageError("--npt-layers names no layer", value=part, hint=f"they are 0 to {count - 1}")
            ends = [end % count for end in ends]
            if ends[0] > ends[-1]:
                raise UsageError("--npt-layers has a range that is empty", value=part, hint="first-last")
        found.update(range(ends[0], ends[-1] + 1) if count is not None else ends)
    return sorted(found)
