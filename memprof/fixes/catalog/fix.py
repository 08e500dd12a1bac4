"""`Fix`, an entry of the table of fixes, and constants for entries."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeVar

from memprof.spec import TargetSpec


class Numerics(StrEnum):
    """Effect of a fix on the numeric results of a run."""

    # The same mathematics: results differ by rounding only, by no more than the original differs from exact results.
    EXACT = "exact"
    APPROXIMATE = "approximate"  # numbers of lower precision, whose deviations `memprof verify` shows
    DIFFERENT = "different"  # another model is trained: fewer weights, or a smaller vocabulary


class Tier(StrEnum):
    """Sets of fixes that `--fix auto` tries in this order; a value says what the set preserves, or what it changes."""

    EXACT = "the same numbers"
    CPU_OPTIMIZER = "the same numbers, the optimizer on the CPU"
    AUTOCAST = "products in half precision"
    QUANTIZED_STATES = "the same numbers but for the optimizer's states"
    HALF_WEIGHTS = "parameters in half precision"
    STREAMED_WEIGHTS = "the same numbers, weights streamed from host memory"
    ADAPTER = "an adapter on the frozen model"
    QUANTIZED_ADAPTER = "an adapter on the frozen model in 4 bits"


VALUE: Final = "{value}"  # in `Fix.edits`: the value of the main option
# Values that several entries have.
ALL_TIERS: Final = tuple(Tier)
NOT_STREAMED_TIERS: Final = tuple(tier for tier in Tier if tier is not Tier.STREAMED_WEIGHTS)
EXACT_UPDATE_TIERS: Final = (Tier.EXACT, Tier.AUTOCAST, Tier.HALF_WEIGHTS)
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
    """A fix and its properties; used as a decorator of the function that changes a model, in `memprof/fixes`.
    Fixes are sorted by `order`, `ladder_order`, `script_order` and `search_order`, smallest first."""

    name: str  # as the user writes it
    order: int  # position among fixes that are applied together
    changes: str  # effect on the model, in one line
    saves: tuple[str, ...]  # the categories of memory that shrink
    cost: str  # disadvantages, in one line
    numerics: Numerics  # effect on the numbers of a run
    install: str = ""  # "module:function" of the decorated function, filled in by the table
    # meanings of options by name; the defaults are the decorated function's
    options: Mapping[str, str] = field(default_factory=dict)
    main_option: str = ""  # the option that NAME=VALUE sets; "": the fix takes no value
    main_type: type[int | str] = int  # type of VALUE: an integer, or text in which "+" stands for a comma
    # words that VALUE may be, each with the options that the word sets
    named_values: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    required: tuple[str, ...] = ()  # options without which it cannot be applied
    # conflicting fixes by name, each with the reason
    conflicts: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()  # required packages other than torch; "one or other" requires either
    training_only: bool = False  # the fix has no effect in inference
    trains_another: bool = False  # the trained model changes, so that the fix is tried only if no other is enough
    accumulates: bool = True  # the fix works with gradient accumulation
    moves_to_host: bool = False  # what leaves the GPU is in host memory instead
    is_checkpointing: bool = False  # programs may have it on themselves (`Trace.checkpoints`)
    for_float32: bool = False  # the fix is for parameters in float32
    half_precision: str = ""  # the dtype, bfloat16 or float16, that it brings: searches take that of the GPU
    updates_vanish: bool = False  # a model does not train with it, so that searches take it in inference alone
    before_move: bool = False  # whether to apply the fix before the model is moved to the GPU, which may be too small
    for_models: str = ""  # the only models of `memprof verify` for the fix; "": all others
    bench: str = ""  # the table of `memprof verify` with the fix's deviations from lower precision
    ladder_order: int | None = None  # position in `--ladder`; None: not tried there
    script_order: int | None = None  # position in `memprof run --fix`; None: the fix needs a changed script
    # what the user writes in a script that has to be changed, where `changes` does not tell; VALUE: the main option's
    in_code: str = ""
    search_order: int = 0  # position in `--fix auto`
    tiers: tuple[Tier, ...] = ()  # tiers of `--fix auto` that include the fix
    # position among the fixes that leave more of the GPU and slow no step down; None: it is none of them
    headroom_order: int | None = None
    ladder_against: tuple[str, ...] = ()  # categories other than `saves` against which the ladder tries the fix
    # problems against which the fix is recommended (categories of memory, findings, doctor's cases), with its rank
    helps: Mapping[str, int] = field(default_factory=dict)
    # the doctor's description of the fix in a case, where `changes` does not fit
    doctor_texts: Mapping[str, str] = field(default_factory=dict)
    alloc_conf: str = ""  # the caching allocator's setting, if the fix is one
    edits: Mapping[str, object] = field(default_factory=dict)  # fields of the spec to replace, with their new values
    # `edits` are only for models that memprof builds; `install` changes a user's model
    catalog_only: bool = False
    # "module:function" that edits the spec where `edits` cannot, in a module without torch. Without both, the spec has
    # the fix in `fixes`, and `install` changes the model
    edit: str = ""
    # whether the fix is on in a spec, where `fixes`, `edits` and `alloc_conf` do not show this
    detect: Callable[[TargetSpec], bool] | None = None
    compiles: bool = False  # the fix is torch.compile: reports show the compile time
    # values of the spec's fields with which the fix has no effect, each with the reason
    useless_if: Mapping[str, tuple[object, str]] = field(default_factory=dict)

    def __call__(self, install: _Function) -> _Function:
        """Return the decorated function `install` unchanged; the table reads the decorator from the source text."""
        return install

    def describe_in_code(self, value: str = "") -> str:
        """Return what the user changes in a script that has no other way to this fix; `value` is its main option's."""
        return (self.in_code or self.changes).replace(VALUE, value or "some")

    def is_on(self, spec: TargetSpec) -> bool:
        """Return whether the fix is on in `spec`."""
        if any(fix.partition("=")[0] == self.name for fix in spec.fixes):
            return True
        if self.detect is not None:
            return self.detect(spec)
        if self.alloc_conf:
            return self.alloc_conf.lower() in (spec.alloc_conf or "").lower()
        edits = {name: value for name, value in self.edits.items() if value != VALUE}
        return bool(edits) and all(getattr(spec, name) == value for name, value in edits.items())
