"""Packages that vLLM 0.33.0 imports when it starts, besides torch and transformers: found by a start of its server.

vLLM's own requirements have CUDA libraries and a CUDA build of torch, which a run on the virtual GPU does not need.
"""

# Of these, pip installs what they require.
_WITH_REQUIREMENTS = (
    "aiohttp", "cachetools", "cbor2", "cloudpickle", "einops", "fastapi", "msgspec", "openai", "opentelemetry-api",
    "orjson", "partial-json-parser", "pillow", "prometheus-client", "psutil", "py-cpuinfo", "pybase64", "pyzmq",
    "requests", "sentencepiece", "tiktoken", "triton", "uvicorn", "uvloop", "watchfiles",
)  # fmt: skip
# These require a build of torch, of CUDA libraries or a release of transformers.
_ALONE = (
    "apache-tvm-ffi", "compressed-tensors", "depyf", "dill", "llguidance", "loguru", "opencv-python-headless",
    "oss-harmony", "torchvision", "xgrammar",
)  # fmt: skip
VLLM_PACKAGES = tuple(sorted((*_WITH_REQUIREMENTS, *_ALONE)))


def make_install_command(missing: tuple[str, ...] = VLLM_PACKAGES) -> str:
    """Return the command that installs those of `VLLM_PACKAGES` that are `missing`."""
    commands = (
        ("pip install", [name for name in _WITH_REQUIREMENTS if name in missing]),
        ("pip install --no-deps", [name for name in _ALONE if name in missing]),
    )
    return " && ".join(" ".join((command, *names)) for command, names in commands if names)
