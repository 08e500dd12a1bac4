"""`memprof --install-completion`: installation of typer's scripts for bash, zsh and fish.

typer's own installation rewrites all of ~/.bashrc or ~/.zshrc, so that a full disk empties the file, and typer's
script for zsh does not complete at the first press of the tab key.
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

from memprof.cli.streams import echo
from memprof.errors import MemprofError

# Shell -> path of the script below the home folder, startup file, and the line added to the startup file.
_SHELL_FILES = {
    "bash": (".bash_completions/{}.sh", ".bashrc", "source '{}'"),
    "zsh": (".zfunc/_{}", ".zshrc", "fpath+=~/.zfunc; autoload -Uz compinit; compinit"),
    "fish": (".config/fish/completions/{}.fish", None, ""),
}
# Appended to the script of zsh, so that the first completion, which loads the script, completes too.
_ZSH_FIRST_CALL = '\nif [[ $zsh_eval_context[-1] == loadautofunc ]]; then\n  {} "$@"\nfi'


def get_completer(option: str, choices: tuple[str, ...]) -> Callable[[], list[str]] | None:
    """Return a function that lists the values of an option for shell completion; None if the values are unknown."""
    if choices or option not in ("gpu", "model"):
        return (lambda: list(choices)) if choices else None

    def list_keys() -> list[str]:
        from memprof.device.catalog import list_gpus
        from memprof.workload.catalog.models import list_models

        return [entry.key for entry in (list_gpus() if option == "gpu" else list_models())]

    return list_keys


def replace_install_callback(command: Any) -> None:
    """Replace the callback of `--install-completion` of `command` by this module's installation."""
    for parameter in command.params:
        if parameter.name == "install_completion":
            parameter.callback = partial(_install_completion, parameter.callback)


def _install_completion(typer_callback: Callable[..., Any], context: Any, option: Any, value: Any) -> Any:
    """Run `--install-completion`; `value` is the shell, or True to detect it; `typer_callback` handles other shells."""
    shell = value
    if value is True:
        with contextlib.suppress(shellingham.ShellDetectionFailure):
            shell = shellingham.detect_shell()[0]
    if context.resilient_parsing or shell not in _SHELL_FILES:
        return typer_callback(context, option, value)
    with contextlib.redirect_stdout(io.StringIO()) as script, contextlib.suppress(SystemExit):
        completion.show_callback(context, option, shell)  # the script that --show-completion prints
    path = _install_script(shell, str(context.find_root().info_name), script.getvalue())
    echo(f"{shell} completion installed in {path}")
    echo("Completion will take effect once you restart the terminal")
    raise typer.Exit


def _install_script(shell: str, program: str, script: str) -> Path:
    script_path, startup_file, line = _SHELL_FILES[shell]
    script = script.strip()
    if shell == "zsh":
        script += _ZSH_FIRST_CALL.format(script.partition("()")[0].split()[-1])
    try:
        path = Path.home() / script_path.format(program)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{script}\n", encoding="utf-8")
        if startup_file is not None:
            _append_line(Path.home() / startup_file, line.format(path).encode())
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        hint = "memprof --show-completion prints it, to be put elsewhere"
        raise MemprofError("completion cannot be installed", value=error, hint=hint) from None
    return path


def _append_line(file: Path, line: bytes) -> None:
    """Append a line to a file unless the file has the line; the rest of the file is not rewritten."""
    with file.open("ab+") as stream:
        stream.seek(0)
        if line not in (lines := stream.read().split(b"\n")):
            stream.write((b"" if lines[-1] == b"" else b"\n") + line + b"\n")
