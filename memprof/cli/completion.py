"""`memprof --install-completion`: typer's scripts, put where bash, zsh and fish find them.

typer's own installation writes the whole of ~/.bashrc or ~/.zshrc anew, so that a full disk empties it, and its script
for zsh answers from the second press of the tab key on.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import shellingham
import typer
from typer import completion

from memprof.cli.streams import say
from memprof.errors import MemprofError

# Of each shell: where its script goes below the home folder, which file has a line for it, and that line.
_PLACES = {
    "bash": (".bash_completions/{}.sh", ".bashrc", "source '{}'"),
    "zsh": (".zfunc/_{}", ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
    "fish": (".config/fish/completions/{}.fish", None, ""),
}
# What zsh loads when it is first asked answers then, too.
_ZSH_ANSWER = '\nif [[ $zsh_eval_context[-1] == loadautofunc ]]; then\n  {} "$@"\nfi'


def names_of(option: str, choices: tuple[str, ...]) -> Callable[[], list[str]] | None:
    """Return what may follow an option, by its name; None: nothing that is known."""
    known = {"gpu": _gpus, "model": _models}.get(option)
    return (lambda: list(choices)) if choices else known


def _gpus() -> list[str]:
    from memprof.device.catalog import list_gpus

    return [gpu.key for gpu in list_gpus()]


def _models() -> list[str]:
    from memprof.workload.catalog.models import list_models

    return [model.key for model in list_models()]


def install_itself(command: Any) -> None:
    """Have typer's option of `command` install as it is said here."""
    for parameter in command.params:
        if parameter.name == "install_completion":
            parameter.callback = partial(_answer, parameter.callback)


def _answer(theirs: Callable[..., Any], context: Any, option: Any, value: Any) -> Any:
    """Answer `--install-completion`, whose value is the shell if it is not found out; `theirs` for another shell."""
    shell = value
    if value is True:
        with contextlib.suppress(shellingham.ShellDetectionFailure):
            shell = shellingham.detect_shell()[0]
    if context.resilient_parsing or shell not in _PLACES:
        return theirs(context, option, value)
    with contextlib.redirect_stdout(io.StringIO()) as shown, contextlib.suppress(SystemExit):
        completion.show_callback(context, option, shell)  # the script that --show-completion prints
    say(f"{shell} completion installed in {_install(shell, str(context.find_root().info_name), shown.getvalue())}")
    say("Completion will take effect once you restart the terminal")
    raise typer.Exit


def _install(shell: str, program: str, script: str) -> Path:
    place, started, line = _PLACES[shell]
    script = script.strip()
    if shell == "zsh":
        script += _ZSH_ANSWER.format(script.partition("()")[0].split()[-1])
    try:
        path = Path.home() / place.format(program)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{script}\n", encoding="utf-8")
        if started is not None:
            _append(Path.home() / started, line.format(path).encode())
    except (OSError, RuntimeError) as error:  # no home either
        hint = "memprof --show-completion prints it, to be put elsewhere"
        raise MemprofError("completion cannot be installed", value=error, hint=hint) from None
    return path


def _append(file: Path, line: bytes) -> None:
    """Add a line at the end of a file, if it is not there: nothing of the others is written anew."""
    with file.open("ab+") as opened:
        opened.seek(0)
        if line not in (lines := opened.read().split(b"\n")):
            opened.write((b"" if lines[-1] == b"" else b"\n") + line + b"\n")
