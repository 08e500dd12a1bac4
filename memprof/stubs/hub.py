"""kernels: compiled kernels of Hugging Face's hub, downloaded by name. A kernel with a stub is replaced by the stub;
any other kernel is refused by name.

Sources: load.py and layer/ of huggingface/kernels@v0.17.2; the kernels of kernels-community are built from the
repositories that the stubs name. The package itself needs no GPU, and is often installed: then its `get_kernel` is
patched (`get_patches`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType
from typing import Any

from memprof.patching import Patch
from memprof.stubs import registry
from memprof.stubs.registry import register_in
from memprof.stubs.tools import make_placeholder, unsupported_error

# Repository of the hub -> the package that the repository builds.
_PACKAGE_BY_REPOSITORY = {
    "kernels-community/flash-attn": "flash_attn",
    "kernels-community/flash-attn2": "flash_attn",
    "kernels-community/flash-attn3": "flash_attn_interface",
    "kernels-community/vllm-flash-attn3": "flash_attn_interface",
    "varunneal/flash-attention-3": "flash_attn_interface",
    "kernels-community/causal-conv1d": "causal_conv1d",
    "kernels-community/mamba-ssm": "mamba_ssm",
}
_HINT = f"kernels of the hub that are known: {', '.join(sorted(_PACKAGE_BY_REPOSITORY))}"
_register = register_in("kernels.load", "kernels", source="huggingface/kernels@v0.17.2:src/kernels/load.py")


@functools.cache
def _make_module(repository: str) -> ModuleType:
    """Return a module that replaces the kernel of `repository`, with the stubs of the package built from it."""
    package = _PACKAGE_BY_REPOSITORY[repository]
    module: Any = ModuleType(repository.rpartition("/")[2].replace("-", "_"))
    vars(module).update(registry.get_stubs(package))
    if package == "flash_attn_interface":
        module.flash_attn_interface = module

    def __getattr__(attribute: str):
        if attribute.startswith("__") or not registry.is_public(package, attribute):
            raise AttributeError(f"module {repository!r} has no attribute {attribute!r}")
        return make_placeholder(package, attribute)

    module.__getattr__ = __getattr__
    return module  # type: ignore[no-any-return]


@_register
def get_kernel(
    repo_id, *, revision=None, version=None, backend=None, user_agent=None, trust_remote_code=False, check_arch=True
):
    """Return the stub of the kernel in the hub's repository `repo_id`."""
    _check_repository("get_kernel", repo_id)
    return _make_module(repo_id)


@_register
def has_kernel(repo_id, *, revision=None, version=None, backend=None, trust_remote_code=False, check_arch=True):
    """Return True if the kernel in the repository `repo_id` has a stub; any other repository is refused."""
    _check_repository("has_kernel", repo_id)
    return True


def _check_repository(function: str, repository: str) -> None:
    if repository not in _PACKAGE_BY_REPOSITORY:
        raise unsupported_error(f"kernels.{function}", f"{repository!r}, a compiled kernel", _HINT)


@_register
def load_kernel(repo_id, *, lockfile, backend=None):
    """Return the stub of the kernel in `repo_id`, as get_kernel does."""
    return get_kernel(repo_id)


@_register
def get_locked_kernel(repo_id, *, lockfile, trust_remote_code=False, user_agent=None):
    """Return the stub of the kernel in `repo_id`, as get_kernel does; the lock file is not read."""
    return get_kernel(repo_id)


def get_patches(module) -> Iterator[Patch]:
    """Yield patches of the installed `kernels` package, so that kernels with stubs are not downloaded."""
    for name, replacement in (("get_kernel", get_kernel), ("has_kernel", has_kernel)):
        original = getattr(module, name, None)
        if original is not None:
            yield module, name, _prefer_stub(original, replacement)


def _prefer_stub(original, replacement):
    @functools.wraps(original)
    def call(repo_id: str, *args, **kwargs):
        return replacement(repo_id) if repo_id in _PACKAGE_BY_REPOSITORY else original(repo_id, *args, **kwargs)

    return call
