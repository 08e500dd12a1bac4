"""What the machine has: the versions of the packages that a measurement depends on, and its GPU."""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess

PACKAGES = (
    "torch", "transformers", "triton", "accelerate", "peft", "numpy", "pandas", "typer", "rich", "nvidia-ml-py",
    "tokenizers", "safetensors", "pytest", "expecttest", "plotly",
)  # fmt: skip


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def main() -> None:
    print(f"Python {platform.python_version()};", *(f"{name} {version(name)};" for name in PACKAGES))
    smi = shutil.which("nvidia-smi")
    if smi is not None:
        subprocess.run([smi], check=False)


if __name__ == "__main__":
    main()
