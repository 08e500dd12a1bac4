"""Findings, the context that rules read, and the registration of rules."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, TypeVar

from memprof.findings.lifetimes import Lifetimes
from memprof.ledger.ledger import Ledger
from memprof.ledger.streams import StreamMemory
from memprof.spec import TargetSpec
from memprof.trace.json_values import json_name

_Result = TypeVar("_Result")


class Severity(StrEnum):
    """The severity of a finding."""

    ERROR = "error"  # a real run dies
    WARNING = "warning"  # memory that a fix would release
    NOTE = "note"  # worth knowing


@dataclass(frozen=True, slots=True)
class Evidence:
    """One tensor or operator that shows the finding; fields that do not apply are None."""

    text: str  # One line for people.
    num_bytes: int | None = field(default=None, metadata=json_name("bytes", last=True))
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    module: str | None = None
    op: str | None = None
    source: str | None = None  # `file:line function`.
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that costs memory or stops the run, with evidence and suggested fixes."""

    id: str
    severity: Severity
    title: str
    num_bytes: int | None = field(metadata=json_name("bytes", last=True))
    evidence: tuple[Evidence, ...]
    fixes: tuple[str, ...]  # Names of fixes, most helpful first.


@dataclass(frozen=True, slots=True)
class Context:
    """The ledger and facts of a run that rules read and do not change."""

    ledger: Ledger
    usable_bytes: int | None  # capacity of the GPU minus CUDA context; None if there is none to judge by
    gpu: str = ""
    spec: TargetSpec | None = None  # None when the trace is not of `memprof profile` (a script, a snapshot)
    fixes: tuple[str, ...] = ()  # fixes that were switched on in a script from outside: names, or NAME=VALUE
    vocab_size: int | None = None
    asked_vocab_size: int | None = None
    context_length: int | None = None
    max_positions: int | None = None
    streams: StreamMemory | None = None  # None: the run stayed on one stream
    lives: Lifetimes = field(init=False, repr=False, compare=False)  # shared by all rules

    # Results of functions with `cache_per_context`.
    results: dict[Callable[[Context], Any], Any] = field(init=False, repr=False, compare=False, default_factory=dict)

    def __post_init__(self) -> None:
        """Compute the storages' lifetimes; `object.__setattr__`, since the dataclass is frozen."""
        object.__setattr__(self, "lives", Lifetimes(self.ledger))


def cache_per_context(function: Callable[[Context], _Result]) -> Callable[[Context], _Result]:
    """Return a function that computes `function` once per context; callers must not change the result."""

    @functools.wraps(function)
    def cached(context: Context) -> _Result:
        if function not in context.results:
            context.results[function] = function(context)
        result: _Result = context.results[function]
        return result

    return cached


Rule = Callable[[Context], list[Finding]]

RULES: dict[int, Rule] = {}  # all rules by their places: in this order they are asked
SEARCH_RULES: set[int] = set()  # the places of those that lead a search over many runs


def rule(order: int, *, guides_search: bool = False) -> Callable[[Rule], Rule]:
    """Return a decorator that registers a rule; findings of equal severity and bytes are in the order of `order`.

    A search applies only rules with `guides_search`, whose findings determine the next fix to try. Raises ValueError: another
    rule has the place.
    """

    def register(find: Rule) -> Rule:
        if order in RULES:
            raise ValueError(f"{RULES[order].__module__} has place {order} among the rules: {find.__module__}")
        RULES[order] = find
        if guides_search:
            SEARCH_RULES.add(order)
        return find

    return register
