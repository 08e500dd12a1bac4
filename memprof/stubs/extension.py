"""The virtual GPU's extensions that activate stubs: import finder of missing packages, patches of installed ones."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from types import ModuleType
from typing import Any

from memprof.monitor.probe.sitecustomize import STUBS
from memprof.patching import Extension, Patch
from memprof.stubs import audio, cpp_extensions, deepspeed, detection, hub, in_graph, torchaudio, torchvision  # noqa: F401 (audio registers kernels)
from memprof.stubs.bitsandbytes import Bitsandbytes
from memprof.stubs.finder import StubFinder
from memprof.stubs.hub_kernels import HubKernels
from memprof.stubs.packages import PACKAGES
from memprof.stubs.sglang.extension import Sglang
from memprof.stubs.vllm.extension import Vllm
from memprof.torch_private import inductor
from memprof.virtual.install_context import InstallContext
from memprof.virtual.kernels import registry

# `attn_implementation`, or `config._attn_implementation` -> the package of its kernels.
_PACKAGE_BY_ATTENTION = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
# Models that import transformers' `_flash_attention_forward` only if a package is available at their import.
_MODELS_CHECKING_AT_IMPORT = ("gpt_neo", "bark", "gptj", "falcon")


def extensions(*, stubs: bool = True) -> list[Extension]:
    """Return the virtual GPU's extensions for libraries outside torch.

    Always: the hub's kernels, operators of torchvision and torchaudio, bitsandbytes. With `stubs`: missing packages.
    """
    installed: list[Extension] = [HubKernels(), LibraryOperators(), Bitsandbytes()]
    return [*installed, Vllm(), Sglang(), StubExtension()] if stubs else installed


class LibraryOperators(Extension):
    """The extension that registers the allocations of torchvision's and torchaudio's operators once imported."""

    imports = ("torchvision", "torchaudio")

    def make_module_patches(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Register the allocations of the operators of `module`; yield no patch."""
        registry.register_library_operators(module.__name__)
        if module.__name__ == "torchvision":
            context.function_mode.register_float32_operators(detection.list_float32_operators())
        yield from ()


class StubExtension(Extension):
    """The extension that replaces missing packages, and missing parts of installed packages, by stubs."""

    def __init__(self) -> None:
        self._finder: StubFinder | None = None
        self._patches_by_module: Mapping[str, Callable[[Any, InstallContext], Iterator[Patch]]] = {
            "sglang.srt.utils.common": self._expose_flashinfer,
            "transformers.modeling_utils": lambda module, context: _patch_attention_choice(module, self._expose),
            "kernels.load": lambda module, context: hub.get_patches(module),
            "kernels.utils": lambda module, context: hub.get_patches(module),
            "torchvision.extension": lambda module, context: torchvision.get_patches(module, context.assume),
            "torchaudio._extension.utils": lambda module, context: torchaudio.get_patches(module, context.assume),
            "deepspeed.ops.op_builder.fused_adam": lambda module, context: deepspeed.get_patches(
                module, context.assume
            ),
            "torch.utils.cpp_extension": cpp_extensions.get_patches,
            inductor.compile_fx.module: lambda module, context: in_graph.register_with_dynamo(),
        }
        self.imports = tuple(self._patches_by_module)
        self.environment = {STUBS: " ".join(PACKAGES)}

    def around(self, context: InstallContext) -> AbstractContextManager[None]:
        """Return a context manager under which imports of missing packages find their stubs: of kernels for CUDA, which
        machines of Apple and Intel do not have."""
        if context.gpu.device_type != "cuda":
            return nullcontext()
        record_uses = context.recorder.storages.record_uses
        self._finder = StubFinder(
            context.assume, context.forget_values, record_uses, context.allocate_permanent_workspace
        )
        return self._finder.activate()

    def make_module_patches(self, module: ModuleType, context: InstallContext) -> Iterator[Patch]:
        """Yield patches that replace the parts of `module` that need a GPU or a compiler."""
        yield from self._patches_by_module[module.__name__](module, context)

    def _expose_flashinfer(self, module: Any, context: InstallContext) -> Iterator[Patch]:
        """Let SGLang find FlashInfer, which it requires, so that its users have it; yield no patch."""
        self._expose("flashinfer")
        yield from ()

    def _expose(self, package: str) -> None:
        if self._finder is not None:
            self._finder.expose(package)


def _patch_attention_choice(module: Any, expose: Callable[[str], None]) -> Iterator[Patch]:
    """Yield a patch that calls `expose` with the package of the attention that a transformers model requests."""
    method = "_check_and_adjust_attn_implementation"
    original = getattr(module.PreTrainedModel, method, None)
    if original is None:
        return

    @functools.wraps(original)
    def check(model: Any, attn_implementation: Any, *args: Any, **kwargs: Any) -> Any:
        name = attn_implementation.removeprefix("paged|") if isinstance(attn_implementation, str) else None
        if name in _PACKAGE_BY_ATTENTION:
            expose(_PACKAGE_BY_ATTENTION[name])
            _repeat_conditional_imports()
        return original(model, attn_implementation, *args, **kwargs)

    yield module.PreTrainedModel, method, check


def _repeat_conditional_imports() -> None:
    utilities = sys.modules.get("transformers.modeling_flash_attention_utils")
    for name in _MODELS_CHECKING_AT_IMPORT:
        module = sys.modules.get(f"transformers.models.{name}.modeling_{name}")
        if module is not None and not hasattr(module, "_flash_attention_forward"):
            module._flash_attention_forward = utilities._flash_attention_forward  # type: ignore[attr-defined, union-attr]
