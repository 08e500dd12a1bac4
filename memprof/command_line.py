"""Shell commands that reproduce a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from memprof.errors import UsageError
from memprof.run_spec import RunSpec
from memprof.spec import TargetSpec, options_of
from memprof.units import parse_gib, spell_size


def profile_command(spec: TargetSpec, *more: str, names_gpu: bool = True) -> str:
    """Return the `memprof profile` command for `spec`, with all options that differ from the default, and `more` words.

    With `names_gpu`, the command names the default GPU too.
    """
    return shlex.join(["memprof", "profile", *spell_options(spec, names_gpu=names_gpu), *more])


def run_command(spec: RunSpec, program: Sequence[str], *more: str) -> str:
    """Return the `memprof run` command for a program with its arguments, non-default options, and `more` words."""
    return shlex.join(["memprof", "run", *spell_options(spec), *more, *program])


def spell_options(spec: TargetSpec | RunSpec, *, names_gpu: bool = True) -> list[str]:
    """Return the options of `spec` that differ from the default, and its fixes, as words of a command."""
    kind: Any = type(spec)
    about = options_of(kind)
    instead = {one.instead_of: (name, one) for name, one in about.items() if one.instead_of}
    words: list[str] = []
    for name, one in about.items():
        value = getattr(spec, name)
        other, otherwise = instead.get(name, ("", None))
        if otherwise is not None and getattr(spec, other):
            one, value = otherwise, getattr(spec, other) if otherwise.parse else value
        elif one.instead_of or (not (name == "gpu" and names_gpu) and _is_default(spec, name)):
            continue
        value = spell_size(value) if one.parse is parse_gib else value
        words += [str(one.flag)] if isinstance(value, bool) else [str(one.flag), str(value)]
    return [*words, *(["--fix", ",".join(spec.fixes)] if spec.fixes else [])]


def _is_default(spec: TargetSpec | RunSpec, name: str) -> bool:
    default = type(spec).__dataclass_fields__[name].default
    try:
        return bool(getattr(spec, name) == default or spec.edit(**{name: default}) == spec)
    except UsageError:
        return False
