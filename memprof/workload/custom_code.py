"""Third-party code that builds models: referenced by a configuration (`auto_map`), on the hub or in a folder, or a
factory.

Loading such a model runs that code with the user's permissions: memprof does so only on request.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from memprof.errors import UsageError, first_line
from memprof.patching import PatchSet


def reference_of(config: Mapping[str, Any], architecture: str) -> str | None:
    """Return the code that a configuration names for its class, such as `modeling_x.XForCausalLM`, or None."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return None
    models = {key: value for key, value in auto_map.items() if key.startswith("AutoModel") and isinstance(value, str)}
    same = [value for value in models.values() if value.rpartition(".")[2] == architecture]
    return next(iter([*same, *models.values()]), None)


@contextlib.contextmanager
def forbid_exit(what: str) -> Iterator[None]:
    """Context manager: raise UsageError where third-party code ends the process: exit code 0 would be read as "it
    fits"."""
    leave, process = os._exit, os.getpid()

    def exit_now(status: int) -> NoReturn:
        if os.getpid() != process:  # a process that the code started
            leave(status)
        raise SystemExit(status)

    with PatchSet() as patches:
        patches.set(os, "_exit", exit_now)
        try:
            yield
        except SystemExit as end:
            raise UsageError(
                f"{what} ends the program", value=f"exit code {end.code}", hint="let it return a model instead"
            ) from end


def check_trusted(reference: str, where: str, *, trusted: bool) -> str:
    """Return a note on running this code; raise UsageError if running it was not requested."""
    if not trusted:
        raise UsageError(
            "the model's class is code of its own, which is not run unasked",
            value=f"{reference} of {where}",
            hint="read that code, then let it run with --trust-remote-code",
        )
    return f"Code of the model's own was run: {reference} of {where} (--trust-remote-code)."


def load_classes(config: Mapping[str, Any], reference: str, where: str, *, offline: bool) -> tuple[Any, Any]:
    """Run a model's own code and return the classes of configuration and model; raise UsageError if that fails."""
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    def load(name: str) -> Any:
        return get_class_from_dynamic_module(name, where, local_files_only=offline)

    config_reference = config["auto_map"].get("AutoConfig")
    try:
        with forbid_exit("the model's own code"):
            config_class = (
                load(config_reference) if config_reference else type(AutoConfig.for_model(config["model_type"]))
            )
            return config_class, load(reference)
    except UsageError:
        raise
    except Exception as error:  # the code may raise anything
        raise UsageError(
            "the model's own code cannot be loaded",
            value=f"{reference} of {where}: {type(error).__name__}: {first_line(error)}",
            hint="mend it, install what it imports, or give a file.py:factory",
        ) from error
