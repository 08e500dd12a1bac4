"""kernels: compiled kernels of Hugging Face's hub, downloaded by name. A kernel with a stub is replaced by the stub;
any other kernel is refused by name.

Sources: load.py and layer/ of huggingface/kernels@v0.17.2; the kernels of kernels-community are built from the
repositories that the stubs name. The package itself needs no GPU, and is often installed: then its `get_kernel` is
patched (`patches`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import ModuleType

from memprof.patching import Patch
from memprof.stubs import registry
from memprof.stubs.registry import register_in
from memprof.stubs.tools import make_placeholder, unsupported_error

_FLASH_2 = ("flash_attn", "")
_FLASH_3 = ("flash_attn_interface", "flash_attn_interface")
# Repository of the hub -> the package that the repository builds, and the module of its functions.
_KNOWN = {
    "kernels-community/flash-attn": _FLASH_2,
    "kernels-community/flash-attn2": _FLASH_2,
    "kernels-community/flash-attn3": _FLASH_3,
    "kernels-community/vllm-flash-attn3": _FLASH_3,
    "varunneal/flash-attention-3": _FLASH_3,
    "kernels-community/causal-conv1d": ("causal_conv1d", ""),
    "kernels-community/mamba-ssm": ("mamba_ssm", ""),
}


_load = register_in("kernels.load", "kernels", source="huggingface/kernels@v0.17.2:src/kernels/load.py")


@functools.cache
def _module(repository: str) -> ModuleType:
    """Return the hub's kernel as a module with the stubs of its package, and its inner module."""
    package, inner = _KNOWN[repository]
    module = ModuleType(repository.rpartition("/")[2].replace("-", "_"))
    vars(module).update(registry.stubs_in(package))
    if inner:
        setattr(module, inner, module)

    def __getattr__(attribute: str):
        if attribute.startswith("__") or not registry.is_public(package, attribute):
            raise AttributeError(f"module {repository!r} has no attribute {attribute!r}")
        return make_placeholder(package, attribute)

    module.__getattr__ = __getattr__  # type: ignore[method-assign]
    return module


@_load
def get_kernel(
    repo_id, *, revision=None, version=None, backend=None, user_agent=None, trust_remote_code=False, check_arch=True
):
    """Return the stub of a kernel of the hub, by its repository."""
    if repo_id not in _KNOWN:
        raise unsupported_error("kernels.get_kernel", f"{repo_id!r}, a compiled kernel", _HINT)
    return _module(repo_id)


@_load
def has_kernel(repo_id, *, revision=None, version=None, backend=None, trust_remote_code=False, check_arch=True):
    """Return whether the hub has a kernel for this GPU, as far as its kernels have stubs."""
    if repo_id not in _KNOWN:
        raise unsupported_error("kernels.has_kernel", f"{repo_id!r}, a compiled kernel", _HINT)
    return True


@_load
def load_kernel(repo_id, *, lockfile, backend=None):
    """Return the stub of a kernel that was downloaded before."""
    return get_kernel(repo_id, backend=backend)


@_load
def get_locked_kernel(repo_id, *, lockfile, trust_remote_code=False, user_agent=None):
    """Return the stub of a kernel whose version is in a lock file."""
    return get_kernel(repo_id)


_HINT = f"kernels of the hub that are known: {', '.join(sorted(_KNOWN))}"


def patches(module) -> Iterator[Patch]:
    """Yield patches of an installed package's download functions, so that kernels with stubs are not downloaded."""
    for name, ours in (("get_kernel", get_kernel), ("has_kernel", has_kernel)):
        real = getattr(module, name, None)
        if real is not None:
            yield module, name, _prefer_stub(real, ours)


def _prefer_stub(real, ours):
    @functools.wraps(real)
    def call(repo_id: str, *args, **kwargs):
        return ours(repo_id) if repo_id in _KNOWN else real(repo_id, *args, **kwargs)

    return call
