"""Third-party code that builds models: a factory, or code that a configuration refers to (`auto_map`).

That code runs with the user's permissions, so memprof runs it only on request.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from memprof.errors import UsageError, first_line
from memprof.patching import PatchSet


def find_code_reference(config: Mapping[str, Any], architecture: str) -> str | None:
    """Return the model class in `config["auto_map"]`, such as "modeling_x.XForCausalLM"; None if there is none.

    The class named `architecture` is preferred.
    """
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, Mapping):
        return None
    models = {key: value for key, value in auto_map.items() if key.startswith("AutoModel") and isinstance(value, str)}
    matching = [value for value in models.values() if value.rpartition(".")[2] == architecture]
    return next(iter([*matching, *models.values()]), None)


@contextlib.contextmanager
def forbid_exit(code_name: str) -> Iterator[None]:
    """Context manager: raise UsageError if code inside ends the process, since exit code 0 would mean "it fits".
    `code_name` names that code in the error."""
    original_exit, own_pid = os._exit, os.getpid()

    def exit_now(status: int) -> NoReturn:
        if os.getpid() != own_pid:  # a process that the code started
            original_exit(status)
        raise SystemExit(status)

    with PatchSet() as patches:
        patches.set(os, "_exit", exit_now)
        try:
            yield
        except SystemExit as error:
            raise UsageError(
                f"{code_name} ends the program", value=f"exit code {error.code}", hint="let it return a model instead"
            ) from error


def check_trusted(reference: str, source: str, *, trusted: bool) -> str:
    """Return a note that class `reference` of folder or repository `source` was run; UsageError if not `trusted`."""
    if not trusted:
        raise UsageError(
            "the model's class is code of its own, which is not run unasked",
            value=f"{reference} of {source}",
            hint="read that code, then let it run with --trust-remote-code",
        )
    return f"Code of the model's own was run: {reference} of {source} (--trust-remote-code)."


def load_classes(config: Mapping[str, Any], reference: str, source: str, *, offline: bool) -> tuple[Any, Any]:
    """Import class `reference` from the repository or folder `source`; return (configuration class, model class).
    With `offline` only local files are used. Raises UsageError if the import fails."""
    from transformers import AutoConfig
    from transformers.dynamic_module_utils import get_class_from_dynamic_module

    def load(name: str) -> Any:
        return get_class_from_dynamic_module(name, source, local_files_only=offline)

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
            value=f"{reference} of {source}: {type(error).__name__}: {first_line(error)}",
            hint="mend it, install what it imports, or give a file.py:factory",
        ) from error
