"""A run as the command that makes it, to paste."""

from __future__ import annotations

import shlex

from memprof.errors import UsageError
from memprof.spec import TargetSpec, options_of
from memprof.units import parse_gib, spell_size


def profile_command(spec: TargetSpec, *, names_card: bool = True) -> str:
    """`memprof profile` for `spec`: every option that it would not have anyway; with `names_card` the card as well."""
    about = options_of(TargetSpec)
    instead = {one.instead_of: (name, one) for name, one in about.items() if one.instead_of}
    words = ["memprof", "profile"]
    for name, one in about.items():
        value = getattr(spec, name)
        other, otherwise = instead.get(name, ("", None))
        if otherwise is not None and getattr(spec, other):
            one, value = otherwise, getattr(spec, other) if otherwise.parse else value
        elif one.instead_of or (not (name == "gpu" and names_card) and _is_so_anyway(spec, name)):
            continue
        value = spell_size(value) if one.parse is parse_gib else value
        words += [str(one.flag)] if isinstance(value, bool) else [str(one.flag), str(value)]
    words += ["--fix", ",".join(spec.fixes)] if spec.fixes else []
    return shlex.join(words)


def _is_so_anyway(spec: TargetSpec, name: str) -> bool:
    default = TargetSpec.__dataclass_fields__[name].default
    try:
        return getattr(spec, name) == default or spec.edit(**{name: default}) == spec
    except UsageError:
        return False
