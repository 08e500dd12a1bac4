"""Which files of a model are on this machine: an engine loads dummy weights where there are none."""

from __future__ import annotations

from pathlib import Path

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
