"""What to do where a program cannot download a model from Hugging Face's hub, or weights by torch.hub."""

from __future__ import annotations

import os
import sys
import traceback
from types import ModuleType
from urllib.error import URLError

# Errors of huggingface_hub (errors.py) for a file that is neither here nor can be asked for; what libraries raise
# themselves has one of them as its cause.
_ERRORS = ("LocalEntryNotFoundError", "OfflineModeIsEnabled")
_ENGINES = ("vllm", "sglang")
_FOLDER = "the hub cannot be reached, and the model is not cached here: give its folder in place of its name"
_ENGINE_FOLDER = ", in which config.json is enough"
_WEIGHTS = (
    "the weights cannot be downloaded here: leave them out (weights=None, pretrained=False), which takes the same "
    "memory, or copy their file into {folder}"
)
_FILE = "the file cannot be downloaded here: copy it to {path}"
_RETRIES = "; HF_HUB_OFFLINE=1 saves the attempts to connect"


def suggest_folder(error: BaseException | None) -> str:
    """Return a hint to give a folder, or to leave weights out, if a hub that cannot be reached caused `error`."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if type(error).__name__ in _ERRORS:
            engine = _ENGINE_FOLDER if any(name in sys.modules for name in _ENGINES) else ""
            return _FOLDER + engine + ("" if os.environ.get("HF_HUB_OFFLINE") else _RETRIES)
        hub = sys.modules.get("torch.hub")
        if isinstance(error, URLError) and hub is not None and (hint := _suggest_file(error, hub)):
            return hint
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return ""


def _suggest_file(error: BaseException, hub: ModuleType) -> str:
    """Return where to copy what a function of torch.hub was to download; "" if none was running."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == hub.__file__]
    names = {frame.f_code.co_name: frame for frame in frames}
    if "load_state_dict_from_url" in names:
        return _WEIGHTS.format(folder=os.path.join(hub.get_dir(), "checkpoints"))
    download = names.get("download_url_to_file")
    return "" if download is None else _FILE.format(path=download.f_locals["dst"])
