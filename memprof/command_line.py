"""A run as the command that makes it, to paste."""

from __future__ import annotations

import shlex

from memprof.spec import TargetSpec, options_of
from memprof.units import spell_size


def profile_command(spec: TargetSpec) -> str:
    """`memprof profile` for `spec`: every option that is not at its default, and the card in any case."""
    about = options_of(TargetSpec)
    fields = TargetSpec.__dataclass_fields__
    flags = {one.instead_of: (name, one) for name, one in about.items() if one.instead_of}
    words = ["memprof", "profile"]
    for name, one in about.items():
        value = getattr(spec, name)
        other, instead = flags.get(name, ("", None))
        if one.instead_of or (name != "gpu" and value == fields[name].default):
            continue
        if instead is not None and getattr(spec, other):
            one = instead
            value = spell_size(getattr(spec, other)) if one.parse else value
        words += [str(one.flag)] if isinstance(value, bool) else [str(one.flag), str(value)]
    words += ["--fix", ",".join(spec.fixes)] if spec.fixes else []
    return shlex.join(words)
