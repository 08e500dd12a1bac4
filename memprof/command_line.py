"""Shell commands that reproduce a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from memprof.errors import UsageError
from memprof.run_spec import RunSpec
from memprof.spec import TargetSpec, get_options
from memprof.units import format_size_option, parse_gib


def make_profile_command(spec: TargetSpec, *extra_words: str, names_gpu: bool = True) -> str:
    """Return the `memprof profile` command for `spec`: options that differ from the default, then `extra_words`.
    With `names_gpu`, `--gpu` is always included."""
    return shlex.join(["memprof", "profile", *format_options(spec, names_gpu=names_gpu), *extra_words])


def make_run_command(spec: RunSpec, program: Sequence[str], *extra_words: str) -> str:
    """Return the `memprof run` command for `program` (name and arguments): non-default options, then `extra_words`."""
    return shlex.join(["memprof", "run", *format_options(spec), *extra_words, *program])


def format_options(spec: TargetSpec | RunSpec, *, names_gpu: bool = True) -> list[str]:
    """Return the options of `spec` that differ from the default, and its fixes, as command-line arguments."""
    spec_class: Any = type(spec)
    options = get_options(spec_class)
    alternatives = {option.instead_of: (name, option) for name, option in options.items() if option.instead_of}
    arguments: list[str] = []
    for name, option in options.items():
        value = getattr(spec, name)
        alternative_name, alternative = alternatives.get(name, ("", None))
        if alternative is not None and getattr(spec, alternative_name):
            option, value = alternative, getattr(spec, alternative_name) if alternative.parse else value
        elif option.instead_of or (not (name == "gpu" and names_gpu) and _is_default(spec, name)):
            continue
        value = format_size_option(value) if option.parse is parse_gib else value
        arguments += [str(option.flag)] if isinstance(value, bool) else [str(option.flag), str(value)]
    return [*arguments, *(["--fix", ",".join(spec.fixes)] if spec.fixes else [])]


def _is_default(spec: TargetSpec | RunSpec, name: str) -> bool:
    default = type(spec).__dataclass_fields__[name].default
    try:
        return bool(getattr(spec, name) == default or spec.edit(**{name: default}) == spec)
    except UsageError:
        return False
