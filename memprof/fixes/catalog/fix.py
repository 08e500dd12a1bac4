"""An entry of the table of fixes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeVar

from memprof.spec import TargetSpec


class Numerics(StrEnum):
    """The effect of a fix on the numbers of a run."""

    # The same mathematics: it differs from the original by rounding alone, and no more than the original does.
    EXACT = "exact"
    APPROXIMATE = "approximate"  # numbers of lower precision: deviations that `memprof verify` shows
    DIFFERENT = "different"  # another model is trained: fewer weights, or a smaller vocabulary


class Tier(StrEnum):
    """Kinds of sets among which `--fix auto` searches, in this order, and what each gives up."""

    EXACT = "the same numbers"
    CPU_OPTIMIZER = "the same numbers, the optimizer on the CPU"
    AUTOCAST = "products in bfloat16"
    QUANTIZED_STATES = "the same numbers but for the optimizer's states"
    HALF_WEIGHTS = "parameters in bfloat16"
    STREAMED_WEIGHTS = "the same numbers, weights streamed from host memory"
    ADAPTER = "an adapter on the frozen model"
    QUANTIZED_ADAPTER = "an adapter on the frozen model in 4 bits"


VALUE: Final = "{value}"  # in `Fix.edits`: the value of the main option
# What several entries say.
EVERY_TIER: Final = tuple(Tier)
BUT_STREAMED_WEIGHTS: Final = tuple(tier for tier in Tier if tier is not Tier.STREAMED_WEIGHTS)
SAME_UPDATES: Final = (Tier.EXACT, Tier.AUTOCAST, Tier.HALF_WEIGHTS)
WEIGHTS: Final = ("parameters", "gradients", "optimizer state")
ONE_OPTIMIZER: Final = "a parameter has one optimizer"
OPTIMIZER: Final = "a function from a list of parameters to an optimizer"
NO_OPTIMIZER: Final = {"optimizer": ("none", "there is no optimizer")}
ON_THE_GPU: Final = {"cpu-offload-weights": "quantized weights and their scales stay together on the GPU"}
FOUR_BITS: Final = {
    "quant_type": "'nf4' or 'fp4'; nf4 if not given",
    "double_quant": "whether the scales are quantized in turn; True if not given",
}
LORA: Final = {
    "lora_rank": "of the matrices; 8 if not given",
    "lora_targets": "names of the modules to adapt; PEFT's for the architecture if not given",
}
_Function = TypeVar("_Function", bound=Callable[..., Any])


@dataclass(frozen=True, kw_only=True)
class Fix:
    """One fix: it stands as a decorator above the function that changes a model, in a file of `memprof/fixes`.

    Places are numbers that order fixes; the smallest comes first.
    """

    name: str  # as the user writes it
    order: int  # its place among those that are switched on together
    changes: str  # what it does, in one line
    saves: tuple[str, ...]  # the categories of memory that shrink
    cost: str  # what is paid for it, in one line
    numerics: Numerics  # what it does to the numbers
    install: str = ""  # "module:function" that it stands above; the table fills it in
    # its options, name to meaning; the defaults are those of `memprof.apply`
    options: Mapping[str, str] = field(default_factory=dict)
    main_option: str = ""  # the option that the value of NAME=VALUE is for; none: it takes no value
    main_type: type[int | str] = int  # of this value: a whole number, or text in which "+" stands for a comma
    # words that NAME=VALUE takes too, each with the options that it stands for
    named_values: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    required: tuple[str, ...] = ()  # options without which it cannot be applied
    # fixes that it does not go with, each with the reason
    conflicts: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()  # what is needed beside torch: each of them, and of "one or other" either
    training_only: bool = False  # it is of no use where nothing is trained
    trains_another: bool = False  # what is learnt changes: it is asked only where nothing else is enough
    accumulates: bool = True  # whether it goes with gradients that add up over micro-batches
    for_float32: bool = False  # it is for parameters in float32
    makes_room_first: bool = False  # it is applied before the model is moved to the GPU, which need not hold all of it
    for_models: str = ""  # the models of `memprof verify` that it is for alone; empty: for all others
    bench: str = ""  # the table of `memprof verify` in which deviations from lower precision stand
    ladder: int | None = None  # its place in `--ladder`, if it is tried there
    outside: int | None = None  # its place among those that can be switched on from outside a script, if it is one
    search: int = 0  # its place in `--fix auto`
    tiers: tuple[Tier, ...] = ()  # the kinds of sets of that search that it belongs to
    ladder_against: tuple[str, ...] = ()  # categories against which it is tried beside those that it saves
    # what it is recommended against, with its place: categories of memory, findings, cases of the doctor
    helps: Mapping[str, int] = field(default_factory=dict)
    # what the doctor says of it in a case, where that is not `changes`
    words: Mapping[str, str] = field(default_factory=dict)
    alloc_conf: str = ""  # the setting of the caching allocator that it is
    edits: Mapping[str, object] = field(default_factory=dict)  # fields of the spec that it replaces, as data
    # `edits` are for models that memprof builds; a model of the user's own is changed by `install`
    built_so: bool = False
    # "module:function" that edits the spec where data cannot, in a module without torch. With neither, the spec names
    # the fix in `fixes`, and it is applied to the model
    edit: str = ""
    # whether a spec has it in force, where neither `fixes`, `edits` nor `alloc_conf` tell
    on: Callable[[TargetSpec], bool] | None = None
    compiles: bool = False  # it is torch.compile: how long that takes is told, and a run that compiles has it on
    # values of the spec's fields with which it does nothing, each with the reason
    useless_if: Mapping[str, tuple[object, str]] = field(default_factory=dict)

    def __call__(self, install: _Function) -> _Function:
        """Return the function as it is: what stands above it is read by the table, without running the file."""
        return install

    def is_on(self, spec: TargetSpec) -> bool:
        """Return whether `spec` has it in force."""
        if any(fix.partition("=")[0] == self.name for fix in spec.fixes):
            return True
        if self.on is not None:
            return self.on(spec)
        if self.alloc_conf:
            return self.alloc_conf.lower() in (spec.alloc_conf or "").lower()
        said = {name: value for name, value in self.edits.items() if value != VALUE}
        return bool(said) and all(getattr(spec, name) == value for name, value in said.items())
