"""The axes of a sweep, and the grid of cells that they span."""

from __future__ import annotations

import itertools
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from memprof.errors import MemprofError, UsageError, unknown_name
from memprof.fixes.catalog import ALL_FIXES, script_fix_names
from memprof.fixes.chosen import parse_fixes
from memprof.flows.gpus import find_spec_gpu, resolve_settings
from memprof.flows.profile import check_inputs
from memprof.flows.sweep.questions import NO_FIX, SEARCH, Question, hash_code
from memprof.report.documents.sweep import SIZE_AXES, SweepAxis
from memprof.run_spec import RunSpec
from memprof.script import Program
from memprof.spec import TargetSpec, get_options
from memprof.units import format_size_option, parse_gib

MAX_CELLS = 200_000
# Options that may have several values, in the order of the table's columns. No value of these has a comma.
AXES = (
    "model", "gpu", "gpu_vram_bytes", "gpus", "mode", "dtype", "amp", "quantize", "optimizer", "adapter", "lora_rank",
    "attention", "gradient_accumulation", "steps", "new_tokens", "fix", *SIZE_AXES,
)  # fmt: skip
SCRIPT_AXES = ("gpu", "gpu_vram_bytes", "fix")
_UNSET = "none"
_PLACE = re.compile(r"\{([A-Za-z_]\w*)\}")


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of the grid: its values as text, those of the size axes as numbers, and what it asks."""

    values: tuple[str, ...]
    sizes: tuple[int, ...]
    question: Question | None
    error: str = ""  # why there is no question: the options do not go together


@dataclass(frozen=True, slots=True)
class Grid:
    """The axes, and a cell for each combination of their values, in the order of the axes."""

    axes: tuple[SweepAxis, ...]
    cells: tuple[Cell, ...]

    def make_line_key(self, cell: Cell) -> tuple[str, ...]:
        """Return the values of a cell on the axes that are no sizes."""
        return tuple(value for axis, value in zip(self.axes, cell.values, strict=True) if not axis.is_size)


def build_spec_grid(options: Mapping[str, Any]) -> Grid:
    """Return the grid of `memprof profile` with `options`: fields of `TargetSpec` and `fix`. Those in `AXES` may have
    several values: a list, or a text with commas. Raises UsageError: a value is unknown, or goes with no other."""
    known = get_options(TargetSpec).keys() | {"fix"}
    for name in options:
        if name not in known:
            raise unknown_name("option of a sweep", name, known)
    if not options.get("model"):
        hint = "for instance: memprof sweep --model gpt2 --batch-size 1,2,4 --gpu t4"
        raise UsageError("give --model, --model-size or a script", hint=hint)
    constants = {name: value for name, value in options.items() if name not in AXES}
    values = {name: parse_values(name, options[name]) for name in AXES if options.get(name) is not None}
    values |= {} if {"gpu", "gpu_vram_bytes"} & values.keys() else {"gpu": ["h100-80gb"]}
    values = {name: values[name] for name in AXES if name in values}
    _check_count(values)
    # What the environment says here is to hold on every worker.
    constants["alloc_conf"] = constants.get("alloc_conf") or resolve_settings(None).alloc_conf or None
    codes: dict[str, str] = {}
    checked: dict[tuple[Any, ...], str] = {}

    def ask(cell: Mapping[str, Any]) -> Question:
        spec = TargetSpec(**constants, **{name: value for name, value in cell.items() if name != "fix"})
        names = (spec.model, spec.model_is_size, spec.gpu, spec.gpu_vram_bytes)
        if names not in checked:
            checked[names] = ""
            try:
                check_inputs(spec)
            except MemprofError as error:
                checked[names] = error.line
                raise
        if checked[names]:
            raise UsageError(checked[names])
        if spec.model not in codes:
            codes[spec.model] = "" if spec.model_is_size else hash_code(spec.model)
        return Question(spec=spec, fix=cell.get("fix", NO_FIX), code=codes[spec.model])

    return _build_grid(values, ask)


def build_script_grid(words: Sequence[str], axes: Mapping[str, Any], options: Mapping[str, Any]) -> Grid:
    """Return the grid of `memprof run` with a script's command `words`, in which `{NAME}` stands for a value of the
    axis NAME in `axes`. `options` are fields of `RunSpec` and `fix`, of which `SCRIPT_AXES` may have several values.
    Raises UsageError: there is no such script, no place for an axis, or no axis for a place."""
    is_module = words[:1] == ["-m"]
    Program(words[is_module], tuple(words[1 + is_module :]), is_module).check()
    for name in axes:
        if not any(f"{{{name}}}" in word for word in words):
            value, hint = " ".join(words), f"write {{{name}}} where its value belongs"
            raise UsageError(f"no place for {name} in the script's arguments", value=value, hint=hint)
    for name in (found for word in words for found in _PLACE.findall(word)):
        if name not in axes:
            raise UsageError("this place has no values", value=f"{{{name}}}", hint=f"add -- {name}=VALUE,VALUE")
    constants = {name: value for name, value in options.items() if name not in SCRIPT_AXES}
    own = {name: parse_values(name, options[name]) for name in SCRIPT_AXES if options.get(name) is not None}
    own |= {} if {"gpu", "gpu_vram_bytes"} & own.keys() else {"gpu": ["h100-80gb"]}
    for fix in own.get("fix", ()):
        names = [chosen.fix.name for chosen in parse_fixes(fix, ALL_FIXES)] if fix not in (NO_FIX, SEARCH) else []
        for name in names:
            if name not in script_fix_names():
                raise UsageError("this fix cannot be switched on from outside a script", value=name)
    clash = next((name for name in axes if name in own), None)
    if clash is not None:
        raise UsageError("this axis is an option", value=clash, hint="give the placeholder another name")
    values = own | {name: _split(name, value) for name, value in axes.items()}
    _check_count(values)
    constants["alloc_conf"] = constants.get("alloc_conf") or resolve_settings(None).alloc_conf or None
    folder, code = os.getcwd(), hash_code(words[is_module])

    def ask(cell: Mapping[str, Any]) -> Question:
        spec = RunSpec(
            **constants, **{name: value for name, value in cell.items() if name in ("gpu", "gpu_vram_bytes")}
        )
        find_spec_gpu(spec)
        program = list(words)
        for name in axes:
            program = [word.replace(f"{{{name}}}", str(cell[name])) for word in program]
        return Question(run=spec, program=tuple(program), fix=cell.get("fix", NO_FIX), folder=folder, code=code)

    return _build_grid(values, ask)


def parse_values(name: str, value: Any) -> list[Any]:
    """Return the values of the axis `name`, each once, from a list or a text with commas, as the option parses them;
    None for "none" where the option has no default. Raises UsageError, which names the option."""
    if name == "fix":
        return [_parse_fix(str(item)) for item in _split(name, value)]
    option = get_options(TargetSpec)[name]
    is_optional = TargetSpec.__dataclass_fields__[name].default is None
    values: list[Any] = []
    for item in _split(name, value):
        if is_optional and item in (None, _UNSET):
            values.append(None)
            continue
        try:
            parsed = item if option.parse is None else option.parse(item if option.parse is parse_gib else str(item))
        except UsageError as error:
            raise UsageError(f"{option.flag}: {error.problem}", value=error.value, hint=error.hint) from error
        if option.choices and parsed not in option.choices:
            raise unknown_name(str(option.flag), str(parsed), option.choices)
        values.append(parsed)
    return list(dict.fromkeys(values))


def _split(name: str, value: Any) -> list[Any]:
    """Return the items of a list, or of a text with commas, without repetitions. Raises UsageError: one is empty."""
    if isinstance(value, str):
        items: list[Any] = [item.strip() for item in value.split(",")]
    else:
        items = list(value) if isinstance(value, Iterable) else [value]
        nested = [item for item in items if isinstance(item, Iterable) and not isinstance(item, str)]
        if nested or isinstance(value, Mapping | bytes):
            raise UsageError(f"an axis has a value with parts: {name}", value=repr(value), hint="give a list of values")
    if not items or "" in items:
        raise UsageError(f"an axis has an empty value: {name}", value=repr(value), hint="separate values by commas")
    return list(dict.fromkeys(items))


def _parse_fix(text: str) -> str:
    """Return one value of `--fix` in a sweep (none, auto, or names joined by +) as `memprof profile` takes it."""
    if text in (NO_FIX, SEARCH):
        return text
    parts: list[str] = []
    for part in text.split("+"):
        if parts and part.partition("=")[0].strip() not in ALL_FIXES and _has_text_value(parts[-1]):
            parts[-1] += f"+{part}"  # such a value has a + where `memprof profile` has one
        else:
            parts.append(part)
    if not all(map(str.strip, parts)):
        raise UsageError("a name of a fix is missing", value=repr(text), hint="join fixes by one +")
    names = ",".join(parts)
    parse_fixes(names, ALL_FIXES)
    return names


def _has_text_value(part: str) -> bool:
    name, separator, _ = part.partition("=")
    return bool(separator) and name.strip() in ALL_FIXES and ALL_FIXES[name.strip()].main_type is str


def _check_count(values: Mapping[str, Sequence[Any]]) -> None:
    count = math.prod(map(len, values.values()))
    if count > MAX_CELLS:
        hint = f"at most {MAX_CELLS:,}: leave out values, or sweep one part after another"
        raise UsageError("the sweep has too many cells", value=f"{count:,}", hint=hint)


def _build_grid(values: Mapping[str, Sequence[Any]], ask: Any) -> Grid:
    """Return the grid of `values`; `ask` returns the question of one combination, or raises MemprofError."""
    axes = tuple(
        SweepAxis(name, tuple(_format_value(name, one) for one in of), _is_size(name, of))
        for name, of in values.items()
    )
    cells = list[Cell]()
    good: set[tuple[str, Any]] = set()
    bad: dict[tuple[str, Any], MemprofError] = {}
    for combination in itertools.product(*values.values()):
        cell = dict(zip(values, combination, strict=True))
        texts = tuple(itertools.starmap(_format_value, cell.items()))
        sizes = tuple(int(value) for axis, value in zip(axes, texts, strict=True) if axis.is_size)
        try:
            cells.append(Cell(texts, sizes, ask(cell)))
            good.update(cell.items())
        except MemprofError as error:
            cells.append(Cell(texts, sizes, None, error.line))
            bad |= {item: error for item in cell.items() if item not in bad}
    # A value with which nothing can be asked is an error of the whole: a name misspelt, for instance.
    for item, reason in bad.items():
        if item not in good:
            raise reason
    return Grid(axes, tuple(cells))


def _is_size(name: str, values: Sequence[Any]) -> bool:
    is_numeric = all(str(value).isdecimal() for value in values)
    return is_numeric and (name in SIZE_AXES or name not in (*AXES, *SCRIPT_AXES))


def _format_value(name: str, value: Any) -> str:
    if name == "gpu_vram_bytes":
        return f"{format_size_option(value)}"
    return _UNSET if value is None else str(value)
