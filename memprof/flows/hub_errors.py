"""What to do where a program cannot reach Hugging Face's hub, nor has a model in its cache."""

from __future__ import annotations

import os
import sys

# Errors of huggingface_hub (errors.py) for a file that is neither here nor can be asked for; what libraries raise
# themselves has one of them as its cause.
_ERRORS = ("LocalEntryNotFoundError", "OfflineModeIsEnabled")
_ENGINES = ("vllm", "sglang")
_FOLDER = "the hub cannot be reached, and the model is not cached here: give its folder in place of its name"
_ENGINE_FOLDER = ", in which config.json is enough"
_RETRIES = "; HF_HUB_OFFLINE=1 saves the attempts to connect"


def suggest_folder(error: BaseException | None) -> str:
    """Return a hint to give a folder, if `error` was caused by a hub that cannot be reached; else empty."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if type(error).__name__ in _ERRORS:
            engine = _ENGINE_FOLDER if any(name in sys.modules for name in _ENGINES) else ""
            return _FOLDER + engine + ("" if os.environ.get("HF_HUB_OFFLINE") else _RETRIES)
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return ""
