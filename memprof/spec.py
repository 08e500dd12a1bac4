"""`TargetSpec`, the target of `memprof profile`: one frozen, validated description of model, workload and GPU.

A field defined by `option` is a command-line option too: cli/options.py and `check_options` read the field's metadata.
To add an option, add a field.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from memprof.errors import UsageError, unknown_name
from memprof.units import GIB, parse_gib, parse_integer

DTYPES = ("float32", "float16", "bfloat16")
AMP_DTYPES = ("float16", "bfloat16")
BITSANDBYTES_OPTIMIZERS = ("adamw-8bit", "paged-adamw-8bit")
TORCHAO_OPTIMIZERS = ("torchao-adamw-8bit", "torchao-adamw-4bit")
# Optimizers with quantized state; each has only its library's implementation.
QUANTIZED_OPTIMIZERS = BITSANDBYTES_OPTIMIZERS + TORCHAO_OPTIMIZERS
OPTIMIZERS = (
    "adamw", "adam", "sgd", "sgd-momentum", "adafactor", "adagrad", "rmsprop", *QUANTIZED_OPTIMIZERS, "none",
)  # fmt: skip
# torch has no fused implementation of these for CUDA (of Adagrad it has one for the CPU).
UNFUSED_OPTIMIZERS = ("adafactor", "adagrad", "rmsprop")
ZERO_GRADS = ("none", "zero")
BITSANDBYTES_FORMATS = ("int8", "nf4", "fp4")
GGUF_FORMATS = ("gguf-q4_0", "gguf-q4_k", "gguf-q5_k", "gguf-q6_k", "gguf-q8_0")
# Formats of quantized checkpoints; bitsandbytes quantizes while it loads instead.
STORED_FORMATS = ("fp8", "gptq-int8", "gptq-int4", "awq-int4", "mxfp4", *GGUF_FORMATS)
# Formats whose layers have a backward, so that adapters can be trained on them.
TRAINABLE_FORMATS = (*BITSANDBYTES_FORMATS, "fp8", "gptq-int8", "gptq-int4", "awq-int4")
QUANTIZATIONS = BITSANDBYTES_FORMATS + STORED_FORMATS
ADAPTERS = ("lora",)
DEFAULT_LORA_RANK = 8  # as in PEFT's LoraConfig
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune")
SDPA_BACKENDS = ("flash", "efficient", "math")
OPTIMIZER_IMPLS = ("foreach", "fused", "single")
NPT_MODES = ("dense", "per-token", "chunked", "low-rank")
NPT_COMBINES = ("sequential", "batched", "merged")
NPT_INITS = ("orthogonal", "fast")
# Defaults of case study 1; with several rank-1 updates the initialization is "fast".
NPT_DEFAULTS = {"npt_rank": 16, "npt_chunk": 16, "npt_init": "orthogonal"}
DEFAULT_GPU_TEXT = "the one that is here, else h100-80gb"
DEVICES = ("virtual", "cpu", "cuda")
# Host memory that a search assumes if none is given: a node with eight large GPUs has about 2 TiB.
HOST_BYTES = 256 * GIB
STEADY_STEPS = 2
# Default steps for varying lengths: the longest 1% are two batches, and reserved memory is stable (docs/lengths.md).
MANY_STEPS = 200
_DTYPE_ABBREVIATIONS = {
    "fp32": "float32", "f32": "float32", "float": "float32", "fp16": "float16", "f16": "float16", "half": "float16",
    "bf16": "bfloat16",
}  # fmt: skip
# Kinds of attention that transformers does not have (workload/attention).
OWN_ATTENTIONS = ("nsa", "nsa-eager", "sliding", "block-sparse", "linear")
ATTENTIONS = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention", *OWN_ATTENTIONS)

_T = TypeVar("_T")


def parse_dtype(text: str) -> str:
    """Return torch's dtype name for an abbreviation such as "bf16"; other text is returned unchanged."""
    return _DTYPE_ABBREVIATIONS.get(text.lower(), text)


class Mode(StrEnum):
    """The use of the model: training or inference."""

    TRAIN = "train"
    INFERENCE = "inference"


@dataclass(frozen=True, slots=True)
class Option:
    """Command-line option of a dataclass field, and the field's permitted values."""

    panel: str  # heading in --help; empty: not shown
    help: str  # {choices} is replaced by the choices
    metavar: str | None = None  # placeholder of the value in --help; None: from the type
    choices: tuple[str, ...] = ()  # permitted values; empty: any
    is_count: bool = False  # whether the value must be at least 1
    flag: str | None = None  # such as --gpu; None: the field's name, with --no- if the field is true by default
    unset: str | None = None  # description of the default in --help; None: the field's default
    # Field that this option replaces, so that both cannot be given. If this field is a bool, the option's value is
    # assigned to the replaced field, and this field is set to True.
    instead_of: str | None = None
    parse: Callable[[str], object] | None = None  # converts the argument's text to the value
    short: str | None = None  # one-letter flag


def option(default: _T, panel: str, help: str, **fields: Any) -> _T:
    """Return a dataclass field that is a command-line option; `fields` are further fields of `Option`."""
    if fields.get("is_count"):
        fields = {"parse": parse_integer, "metavar": "COUNT"} | fields
    return dataclasses.field(default=default, metadata={"option": Option(panel, help, **fields)})


@functools.cache
def get_options(cls: type) -> Mapping[str, Option]:
    """Return the options among the fields of dataclass `cls`, by field name, each with its flag."""
    result = {}
    for field in dataclasses.fields(cls):
        entry = field.metadata.get("option")
        if entry is not None:
            no = "no-" if field.default is True else ""
            result[field.name] = dataclasses.replace(entry, flag=entry.flag or f"--{no}{field.name.replace('_', '-')}")
    return result


def check_options(spec: Any) -> None:
    """Raise UsageError, which names the flag, if an option of `spec` has an unknown value or is out of range."""
    for name, option in get_options(spec.__class__).items():
        value = getattr(spec, name)
        if value is None:
            continue
        if option.is_count and value < 1:
            raise UsageError(f"{option.flag} must be at least 1", value=value, hint="give a positive whole number")
        if option.choices and value not in option.choices:
            raise unknown_name(str(option.flag), str(value), option.choices)


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetSpec:
    """Target of `memprof profile`: model, workload and GPU. Fields that end in `_bytes` are in bytes.

    Raises:
        UsageError: a value is unknown or out of range; the message names the flag.

    Example:
        spec = memprof.TargetSpec(model="gpt2", context_length=64, batch_size=2)
        trace, report = memprof.profile(spec)
        print(report.target.num_parameters, report.verdict.fits)
    """

    model: str = option(
        "", "Model", "A catalog name (gpt2), a Hugging Face id, a folder or config.json, or file.py:factory.",
        metavar="MODEL",
    )  # fmt: skip
    model_is_size: bool = option(
        False, "Model", "Instead of --model: a size such as 4B or 1.2B.", metavar="SIZE", flag="--model-size",
        instead_of="model",
    )  # fmt: skip
    context_length: int | None = option(
        None, "Batch", "Tokens per sequence.", metavar="TOKENS", is_count=True, unset="2048, or the model's limit"
    )
    batch_size: int = option(1, "Batch", "Sequences per micro-batch.", is_count=True)
    lengths: str | None = option(
        None, "Batch", "Samples of lengths that vary, padded to the longest of their batch: a file of lengths, "
        "lognormal:MEAN,SIGMA or alpaca (`memprof help lengths`).", metavar="LENGTHS",
        unset="all have the context length",
    )  # fmt: skip
    trust_remote_code: bool = option(
        False, "Model", "Run the code that a model of the hub, or of a folder, comes with (auto_map)."
    )
    vocab_size: int | None = option(None, "Model", "Replace the model's vocabulary.", is_count=True)
    # Of parameters and activations; None: the published checkpoint's (float16 is trained as bfloat16).
    dtype: str | None = option(
        None, "Precision", "Of parameters and activations: {choices}.", metavar="DTYPE", choices=DTYPES,
        unset="the checkpoint's", parse=parse_dtype,
    )  # fmt: skip
    # Forward and loss under torch.autocast; with float16, a GradScaler.
    amp: str | None = option(
        None, "Precision", "Autocast to {choices}, with float32 weights.", metavar="DTYPE", choices=AMP_DTYPES,
        parse=parse_dtype,
    )  # fmt: skip
    # The linear layers' but the head's: bitsandbytes' int8 (LLM.int8), nf4 or fp4, or a checkpoint's format.
    quantize: str | None = option(
        None, "Precision", "How weights are stored, if not as the model's configuration says: {choices}.",
        metavar="NAME", choices=QUANTIZATIONS,
    )  # fmt: skip
    # With quantize nf4 or fp4: the scales are quantized in turn, as in QLoRA.
    double_quant: bool = option(True, "Precision", "With 4-bit weights: leave their scales in float32.")
    optimizer: str = option("adamw", "Training", "{choices}.", choices=OPTIMIZERS)
    zero_grad: str = option(
        "none", "Training", "What zero_grad leaves of the gradients: {choices} (set_to_none=False).", choices=ZERO_GRADS
    )
    adapter: str | None = option(
        None, "Adapters", "Train an adapter of PEFT on the frozen model: {choices}.", metavar="NAME", choices=ADAPTERS
    )
    lora_rank: int | None = option(
        None, "Adapters", "Of LoRA's matrices.", metavar="RANK", is_count=True, unset=str(DEFAULT_LORA_RANK)
    )
    lora_targets: str | None = option(
        None, "Adapters", "Modules to adapt, such as q_proj,v_proj, or all-linear.", metavar="NAMES",
        unset="PEFT's for the architecture",
    )  # fmt: skip
    lora_dropout: float = option(0.0, "Adapters", "Before LoRA's matrices.")
    npt: str | None = option(
        None, "NPT", "Train NPT components, a weight delta for each token, on the frozen model: {choices}.",
        metavar="MODE", choices=NPT_MODES,
    )  # fmt: skip
    npt_rank: int | None = option(None, "NPT", "With --npt.", metavar="RANK", is_count=True, unset="16")
    npt_layers: str | None = option(
        None, "NPT", "Layers with a component, such as 0,4-7 or -1.", metavar="LAYERS", unset="all"
    )
    # None: a modulated matrix of low rank.
    npt_num_ranks: int | None = option(
        None, "NPT", "Make each delta a sum of this many rank-1 updates.", metavar="COUNT", is_count=True
    )
    npt_combine: str | None = option(
        None, "NPT", "How they are summed: {choices}.", metavar="NAME", choices=NPT_COMBINES, unset="merged"
    )
    npt_chunk: int | None = option(
        None, "NPT", "With --npt chunked: tokens at a time.", metavar="TOKENS", is_count=True, unset="16"
    )
    npt_init: str | None = option(
        None, "NPT", "{choices}.", metavar="NAME", choices=NPT_INITS, unset="orthogonal; fast with --npt-num-ranks"
    )
    freeze: str | None = option(
        None, "Training", "Parameters not to train, such as 'model.embed*,*.bias'.", metavar="PATTERNS"
    )
    evaluate: bool = option(False, "Training", "A forward without gradients after each optimizer step.")
    mode: Mode = option(Mode.TRAIN, "Training", "Train, or run the forward alone.", choices=tuple(Mode))
    new_tokens: int | None = option(
        None, "Batch", "In inference: generate this many tokens after the prompt.", metavar="TOKENS", is_count=True
    )
    attention: str | None = option(
        None, "Model", "{choices} (`memprof help attention`).", metavar="NAME", choices=ATTENTIONS, unset="the model's"
    )
    sdpa_backend: str | None = option(
        None, "Model", "Force an attention kernel: {choices}.", metavar="NAME", choices=SDPA_BACKENDS,
        unset="CUDA's choice",
    )  # fmt: skip
    compile: bool = option(False, "Compiling", "Compile the model with torch.compile.")
    compile_mode: str | None = option(
        None, "Compiling", "Of torch.compile: {choices}.", metavar="NAME", choices=COMPILE_MODES, unset="default"
    )
    compile_layers: bool = option(False, "Compiling", "Compile its layers one by one, and not the model as a whole.")
    # How the optimizer steps; torch's choice for CUDA is foreach.
    optimizer_impl: str | None = option(
        None, "Training", "{choices}.", metavar="NAME", choices=OPTIMIZER_IMPLS, unset="torch's choice"
    )
    workspaces: bool = option(True, "Memory", "Count tensors alone, not what kernels and libraries take beside.")
    activation_checkpointing: bool = option(False, "Memory", "Recompute each layer's activations in the backward.")
    gradient_accumulation: int = option(1, "Batch", "Micro-batches per step.", is_count=True)
    dataset_batches: int | None = option(
        None, "Batch", "Hold so many batches in host memory, made before training.", metavar="COUNT", is_count=True,
        unset="none, they are streamed",
    )  # fmt: skip
    # Optimizer state appears in the first, so that the second is the steady state.
    steps: int = option(
        None, "Training", "Optimizer steps to run.", is_count=True, unset=f"{STEADY_STEPS}; {MANY_STEPS} with --lengths"
    )  # type: ignore[assignment]  # fmt: skip
    alloc_conf: str | None = option(
        None, "Memory", "The caching allocator's, such as expandable_segments:True.", metavar="SETTINGS",
        unset="the environment's",
    )  # fmt: skip
    # The rules of memprof/allocator/releases.py; None: those of the installed torch.
    torch_release: str | None = option(
        None, "Memory", "Simulate the allocator, CUDA libraries and workspaces of this torch, such as 2.9.",
        metavar="VERSION", unset="the installed one",
    )  # fmt: skip
    # Fixes that `memprof.apply` switches on in the built model: names, or NAME=VALUE (fixes/chosen.py).
    fixes: tuple[str, ...] = ()
    device: str = option("virtual", "GPU", "virtual: simulate; cuda or cpu: measure there.", choices=DEVICES)
    detail: bool = option(False, "GPU", "Measured: the line of every allocation as well, which makes steps longer.")
    gpu: str = option("h100-80gb", "GPU", "The GPU (`memprof gpus` lists them).", unset=DEFAULT_GPU_TEXT)
    gpu_vram_bytes: int | None = option(
        None, "GPU", "Instead of --gpu: a capacity, in GiB or as 24GB.", metavar="GIB", flag="--gpu-vram",
        instead_of="gpu", parse=parse_gib,
    )  # fmt: skip
    gpus: int = option(1, "GPU", "How many such GPUs.", is_count=True)
    # See workload/plan.py; batch size and context length are those of one rank's batch, before it is spread.
    parallel: str | None = option(
        None, "GPU", "How the model and its work are spread over them: ddp, fsdp, fsdp:shard_grad_op, "
        "hsdp:2x4, tp=2,fsdp=4, cp=2, ulysses=2 or pp=4:1f1b:microbatches=8; in inference also device-map.",
        metavar="PLAN",
    )  # fmt: skip
    rank: int | None = option(
        None, "GPU", "Of a program of several processes (torchrun, accelerate, mp.spawn), the one to show in full.",
        unset="the one that decides",
    )  # fmt: skip
    host_memory_bytes: int | None = option(
        None, "GPU", "Of the machine, in GiB or as 64GB: a run that keeps more than this in it does not fit.",
        metavar="GIB", flag="--host-memory", unset="256 for what is searched; else it is not asked", parse=parse_gib,
    )  # fmt: skip

    def __post_init__(self) -> None:
        if not self.model:
            hint = "for instance: memprof profile --model-size 4B --context-length 4096"
            raise UsageError("give --model or --model-size", hint=hint)
        check_options(self)
        if self.steps is None:
            object.__setattr__(self, "steps", STEADY_STEPS if self.lengths is None else MANY_STEPS)
        object.__setattr__(self, "mode", Mode(self.mode))
        object.__setattr__(self, "fixes", tuple(self.fixes))  # JSON makes a list of it
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
        if not self.double_quant and self.quantize not in ("nf4", "fp4"):
            raise UsageError("--no-double-quant is for 4-bit weights", hint="add --quantize nf4 or fp4")
        if self.quantize is not None:
            check_quantized(self.quantize, self)
        if self.lengths is not None and self.dataset_batches is not None:
            hint = "leave out one of them"
            raise UsageError("--dataset-batches are all of one length", value=f"--lengths {self.lengths}", hint=hint)
        if self.rank is not None and not 0 <= self.rank < self.gpus:
            raise UsageError("there is no such rank", value=f"--rank {self.rank}", hint=f"0 to {self.gpus - 1}")
        if self.parallel is not None and self.device != "virtual":
            raise UsageError("ranks are virtual ones", value=f"--device {self.device}", hint="leave out --device")
        for flag, given in (("--compile-mode", self.compile_mode), ("--compile-layers", self.compile_layers)):
            if given and not self.compile:
                raise UsageError("nothing is to be compiled", value=flag, hint="add --compile")
        if self.compile and self.parallel is not None:
            raise UsageError(
                "a model that is spread over GPUs is not compiled here",
                value=f"--parallel {self.parallel}",
                hint="leave out --compile; a script of your own may do both under memprof run",
            )
        if self.new_tokens is not None and self.mode is not Mode.INFERENCE:
            raise UsageError("--new-tokens is for inference", value=self.new_tokens, hint="add --mode inference")
        if self.amp is not None and self.dtype not in (None, "float32"):
            raise UsageError(
                "--amp keeps the weights in float32", value=f"--dtype {self.dtype}", hint="leave out --dtype"
            )

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

    def edit(self, **changes: object) -> TargetSpec:
        """Return a copy with some fields replaced."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]


def repeat_option(
    name: str, *, cls: type = TargetSpec, default: object = dataclasses.MISSING, note: str = "", **changes: Any
) -> Any:
    """Return a dataclass field with the option `name` of dataclass `cls`, for use in another dataclass.
    `note` is appended to the option's help; `changes` replaces fields of the `Option`, such as `unset`."""
    field: dataclasses.Field[Any] = cls.__dataclass_fields__[name]  # type: ignore[attr-defined]
    option: Option = field.metadata["option"]
    option = dataclasses.replace(option, help=f"{option.help} {note}".strip(), **changes)
    default = field.default if default is dataclasses.MISSING else default
    return dataclasses.field(default=default, metadata={"option": option})


def parse_layers(text: str, count: int | None = None) -> list[int]:
    """Return the sorted, unique layer indices in `text`, such as "0,4-7,-1"; negative indices count from the end.

    `count` is the number of layers; if None, only the syntax is checked. Raises UsageError if a layer does not exist.
    """
    indices: set[int] = set()
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
        indices.update(range(ends[0], ends[-1] + 1) if count is not None else ends)
    return sorted(indices)


def check_quantized(name: str, spec: TargetSpec) -> None:
    """Raise UsageError if `spec` cannot be run with weights in the format `name`, for instance trains them."""
    value = f"--quantize {name}"
    if spec.mode is Mode.TRAIN and spec.adapter is None and spec.npt is None:
        hint = "add --adapter lora, --npt low-rank or --mode inference"
        raise UsageError("quantized weights are not trained", value=value, hint=hint)
    if spec.npt is not None and name not in BITSANDBYTES_FORMATS:
        hint = f"--quantize {'|'.join(BITSANDBYTES_FORMATS)}"
        raise UsageError("NPT components stand beside bitsandbytes' layers alone", value=value, hint=hint)
    if spec.mode is Mode.TRAIN and name not in TRAINABLE_FORMATS:
        raise UsageError(
            "transformers has no backward through weights stored like this",
            value=value,
            hint=f"add --mode inference; adapters are trained on {', '.join(TRAINABLE_FORMATS)}",
        )
    if name in STORED_FORMATS and spec.device != "virtual":
        raise UsageError(
            "stored weights are simulated, and not measured",
            value=f"{value} --device {spec.device}",
            hint="leave out --device, or measure your own script: memprof run --device cuda",
        )
