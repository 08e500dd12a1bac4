"""The command that adds a library to the environment of memprof, by the tool that made the environment."""

from __future__ import annotations

import sys
from pathlib import Path, PurePath

DISTRIBUTION = "torch-memprof"  # memprof's name where packages are installed from; `memprof` on PyPI is another program


def format_install_command(*requirements: str, prefix: str = sys.prefix) -> str:
    """Return the command that installs `requirements` ("plotly>=6") in the environment with the folder `prefix`."""
    names = " ".join(f"'{one}'" if any(character in one for character in "<>=[ ") else one for one in requirements)
    path = PurePath(prefix)
    if path.parent.name == "venvs" and "pipx" in path.parts:
        return f"pipx inject {path.name} {names}"
    if path.parent.name == "tools" and "uv" in path.parts:
        return f"uv pip install --python {prefix} {names}"
    return f"{'uv pip' if _is_made_by_uv(Path(prefix)) else 'pip'} install {names}"


def _is_made_by_uv(prefix: Path) -> bool:
    """Return whether uv made the virtual environment `prefix`, which has no pip then."""
    try:
        lines = (prefix / "pyvenv.cfg").read_text(encoding="utf-8").splitlines()
    except OSError:
        return False
    return any(line.partition("=")[0].strip() == "uv" for line in lines)
