"""Data classes of a finding and of the context that rules read, and the decorator that registers rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NamedTuple, TypeVar

from memprof.findings.edits import Edit
from memprof.findings.lifetimes import Lifetimes
from memprof.ledger.ledger import Ledger
from memprof.ledger.streams import StreamMemory
from memprof.spec import TargetSpec
from memprof.trace.events import Phase
from memprof.trace.json_values import json_name

_Result = TypeVar("_Result")


class Severity(StrEnum):
    """Severity of a finding."""

    ERROR = "error"  # a real run fails
    WARNING = "warning"  # a fix would reduce memory
    NOTE = "note"  # worth knowing


@dataclass(frozen=True, slots=True)
class Evidence:
    """One line of evidence for a finding, mostly about a tensor or operator; fields that do not apply are None."""

    text: str  # One line for display.
    num_bytes: int | None = field(default=None, metadata=json_name("bytes", last=True))
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    module: str | None = None
    op: str | None = None
    source: str | None = None  # `file:line function`.
    device: str | None = None
    # Reserved peak of the run with the change that this line is about; None: it is about none, or that is not known.
    required_bytes: int | None = field(default=None, metadata=json_name(None))


class Culprit(NamedTuple):
    """Name of the object that keeps the tensors which a finding is about, and these."""

    name: str  # such as "list `losses`"
    storages: frozenset[int]


@dataclass(frozen=True, slots=True)
class Suggestion:
    """A change of the program, and what a replay of the recorded run with this change needs."""

    text: str  # One line for display: the change and its effect.
    fix: str | None  # The fix that makes this change, NAME or NAME=VALUE; None: the program's code has to.
    required_bytes: int  # Reserved peak of the recorded run with this change.
    fits: bool | None  # Whether the recorded run then fits; None: no GPU is given.
    num_bytes: int = field(metadata=json_name("bytes", last=True))  # By which the reserved peak is lower.
    source: str | None = None  # `file:line function` that the change is about


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that costs memory or stops the run, with evidence and suggested fixes."""

    id: str
    severity: Severity
    title: str
    num_bytes: int | None = field(metadata=json_name("bytes", last=True))
    evidence: tuple[Evidence, ...]
    fixes: tuple[str, ...]  # Names of fixes, most helpful first.
    # Whether the run does not fit, and would without what was found: such a finding is shown first.
    is_decisive: bool = field(default=False, metadata=json_name("is_cause"))
    suggestions: tuple[Suggestion, ...] = ()  # Changes with their effect, which `fixes` has the names of, where known.
    # The change of one place in the program that takes the cause away; None: there is none, or it is not that local.
    edit: Edit | None = field(default=None, metadata=json_name(None))
    culprit: Culprit | None = field(default=None, metadata=json_name(None))  # None: it has no name

    @property
    def order(self) -> tuple[bool, int, int]:
        """Return a key that sorts findings: the cause of a run that does not fit first, then by severity and bytes."""
        return not self.is_decisive, list(Severity).index(self.severity), -(self.num_bytes or 0)


@dataclass(frozen=True, slots=True)
class Context:
    """Read-only input of all rules: the ledger of a run, and facts about the run and its GPU."""

    ledger: Ledger
    usable_bytes: int | None  # capacity of the GPU minus CUDA context; None if the GPU's size is not known
    gpu: str = ""
    spec: TargetSpec | None = None  # None when the trace is not of `memprof profile` (a script, a snapshot)
    fixes: tuple[str, ...] = ()  # fixes that the run of a script applies (`--fix`): NAME or NAME=VALUE
    vocab_size: int | None = None
    asked_vocab_size: int | None = None
    context_length: int | None = None
    max_positions: int | None = None
    streams: StreamMemory | None = None  # None: the run used one stream only
    # Shared by all rules: the lifetimes of the storages, and the phases as of `Trace.list_phase_begins`.
    lifetimes: Lifetimes = field(init=False, repr=False, compare=False)
    phases: list[tuple[int, Phase]] = field(init=False, repr=False, compare=False)

    # Cached results of functions with the decorator `cache_per_context`, by function.
    results: dict[Callable[[Context], Any], Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Compute what all rules share; `object.__setattr__` is needed because the dataclass is frozen."""
        object.__setattr__(self, "lifetimes", Lifetimes(self.ledger))
        object.__setattr__(self, "phases", self.ledger.trace.list_phase_begins())


def cache_per_context(function: Callable[[Context], _Result]) -> Callable[[Context], _Result]:
    """Return `function` with a cache: it runs once per context, and later calls return the same (shared) object."""

    @functools.wraps(function)
    def cached(context: Context) -> _Result:
        if function not in context.results:
            context.results[function] = function(context)
        result: _Result = context.results[function]
        return result

    return cached


Rule = Callable[[Context], list[Finding]]

RULES: dict[int, Rule] = {}  # order -> rule: rules are applied in ascending order
SEARCH_RULES: set[int] = set()  # orders of the rules that guide a search for fixes


def rule(order: int, *, guides_search: bool = False) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule; `order` sorts findings of equal severity and bytes.

    A search for fixes applies only rules with `guides_search`, whose findings determine the next fix to try. The
    decorator raises ValueError if another rule has the same `order`.
    """

    def register(find: Rule) -> Rule:
        if order in RULES:
            raise ValueError(f"{RULES[order].__module__} has place {order} among the rules: {find.__module__}")
        RULES[order] = find
        if guides_search:
            SEARCH_RULES.add(order)
        return find

    return register
