"""What the starts of vLLM and SGLang have in common: which files of a model are here, and how workers send objects."""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from memprof.patching import Patch

WEIGHT_FILES = ("*.safetensors", "*.bin", "*.pt", "*.gguf")
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tekken.json", "vocab.json", "tiktoken.model", "*.tiktoken")


def has_files(folder: Path, name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether the model `name`, a folder or a repository of the hub that may be cached, has one of the files."""
    if not folder.is_dir():
        if name.count("/") > 1 or name.startswith("/"):
            return True  # a path that the engine will refuse itself
        from huggingface_hub import constants, file_download

        cache = Path(constants.HF_HUB_CACHE) / file_download.repo_folder_name(repo_id=name, repo_type="model")
        return any(path for pattern in patterns for path in cache.glob(f"snapshots/*/{pattern}"))
    return any(path for pattern in patterns for path in folder.glob(pattern))


def patch_groups(module: Any) -> Iterator[Patch]:
    """Yield a patch by which workers send each other objects by torch.distributed, and not by shared memory; `module`
    has the groups (parallel_state.py of either engine)."""
    original = module.GroupCoordinator.__init__

    @functools.wraps(original)
    def __init__(group: Any, *args: Any, **kwargs: Any) -> None:
        original(group, *args, **{**kwargs, "use_message_queue_broadcaster": False})

    yield module.GroupCoordinator, "__init__", __init__


@contextlib.contextmanager
def set_variables(cache: str, others: Mapping[str, str]) -> Iterator[None]:
    """Context manager: set the variable `cache` to a folder that is removed at exit, and the variables `others`."""
    folder = tempfile.mkdtemp(prefix="memprof-engine-")
    values = {**others, cache: folder}
    previous = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in previous.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        shutil.rmtree(folder, ignore_errors=True)
