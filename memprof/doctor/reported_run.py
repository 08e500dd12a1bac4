"""The failed run, as far as the user and the log describe it, and the commands of memprof that repeat it."""

from __future__ import annotations

import itertools
import re
import shlex
from dataclasses import dataclass

from memprof.command_line import make_profile_command
from memprof.errors import UsageError
from memprof.fixes.catalog import Fix
from memprof.fixes.chosen import ChosenFix, edit_spec
from memprof.spec import Mode, TargetSpec
from memprof.units import format_size_option
from memprof.workload.catalog import find_model, has_model

_WINDOWS_PATH = re.compile(r"[A-Za-z]:\\|.*\\")


@dataclass(frozen=True, slots=True)
class ReportedRun:
    """The options of a failed run as the user gives them; those that are None are searched for in the log."""

    model: str | None = None
    batch_size: int | None = None
    context_length: int | None = None
    npt: str | None = None
    gpu_bytes: int | None = None
    attention: str | None = None
    script: str | None = None  # Path of the user's script, as the traceback has it.
    arguments: str = ""  # The script's arguments, as a command line in the log has them.

    @property
    def spec(self) -> TargetSpec:
        """Return the options with which `memprof profile` reproduces the run."""
        return TargetSpec(
            model=self.model or "MODEL",
            batch_size=self.batch_size or 1,
            context_length=self.context_length,
            npt=self.npt,
            gpu_vram_bytes=self.gpu_bytes,
            attention=self.attention,
        )

    def build_command(self, fix: str = "") -> str:
        """Return the `memprof profile` command that reproduces the run, with the fix named `fix` unless it is empty."""
        return make_profile_command(self.spec.edit(fixes=(fix,) if fix else ()), names_gpu=False)

    def build_script_command(self, fix: str = "") -> str:
        """Return the `memprof run` command that runs the script, with the fix named `fix` unless it is empty.

        Raises ValueError: the script is not known.
        """
        if self.script is None:
            raise ValueError("the script is not known")
        gpu = [] if self.gpu_bytes is None else ["--gpu-vram", format_size_option(self.gpu_bytes)]
        words = ["memprof", "run", *gpu, *(["--fix", fix] if fix else []), _quote(self.script), self.arguments]
        return " ".join(filter(None, words))

    def build_command_with_fix(self, fix: Fix) -> str | None:
        """Return the command that runs with `fix`; None if the fix does not apply to the run.

        If the script is known and the model is not, the command runs the script; it is empty if `memprof run` cannot
        switch on the fix in a script.
        """
        if self.model is None and self.script is not None:
            return "" if fix.script_order is None else self.build_script_command(fix.name)
        dtype = None
        if self.model is not None and has_model(self.model):
            dtype = "float32" if find_model(self.model).checkpoint_dtype == "float32" else "bfloat16"
        # Some fixes need a batch of at least 2; an unknown batch may have it.
        specs = [self.spec] if self.batch_size else [self.spec, self.spec.edit(batch_size=2)]
        for mode, spec in itertools.product(Mode, specs):
            try:
                edit_spec(spec.edit(mode=mode), ChosenFix(fix), {"dtype": dtype})
            except UsageError:
                continue
            return make_profile_command(spec.edit(mode=mode, fixes=(fix.name,)), names_gpu=False)
        return None


def _quote(path: str) -> str:
    """Return `path` as a word of a command line: of a POSIX shell, or of Windows' if it is a path of Windows."""
    if _WINDOWS_PATH.match(path):
        return path if re.fullmatch(r"[\w.:\\/-]+", path) else f'"{path}"'
    return shlex.quote(path)


def find_arguments(script: str, log: str) -> str:
    """Return the arguments that a command line in `log` gives to `script`; empty without such a line.

    They are empty, too, if a shell would read more in them than words: the log may be anybody's.
    """
    name = re.escape(re.split(r"[/\\]", script)[-1])
    launchers = r"(?:python[\d.]*|torchrun|accelerate launch|deepspeed)"
    words, end = r"((?: +(?!\d?>)[\w./=:,@%+-]+)*)", r"(?=[ \t]*(?:[\r\n|&]|\d?>|$))"
    command = re.search(rf"{launchers}(?: [^\n|;&<>]*?)?[ /\\]{name}{words}{end}", log)
    return command[1].strip() if command else ""
