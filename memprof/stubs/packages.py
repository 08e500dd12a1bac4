"""The packages that memprof replaces by stubs where they are not installed, and their releases.

memprof/stubs/ has the allocations. `names/PACKAGE.txt` has the public names of each module of a package, a module a
line; tests/accuracy/stub_signatures.py generates the file from the package's source.
"""

from __future__ import annotations

import functools
import importlib.resources
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Package:
    """A package that has a stub: its names, the release that the stub allocates like, and its source."""

    name: str  # name in imports
    distribution: str  # name of the distribution, also in version queries
    version: str  # the release whose allocations the stub has
    source: str  # source of the stub, as REPOSITORY@TAG
    stub_module: str = ""  # module in memprof/stubs; empty: that of `name`


_FLASH_REPOSITORY = "Dao-AILab/flash-attention@"


def _make_flash_extension(name: str, version: str, source: str) -> Package:
    """Return the Package for an extension module that flash-attention's repository builds beside flash_attn."""
    return Package(name, name.replace("_", "-"), version, _FLASH_REPOSITORY + source, "flash_attn")


PACKAGES = {
    package.name: package
    for package in (
        Package("flash_attn", "flash-attn", "2.8.3", f"{_FLASH_REPOSITORY}v2.8.3"),
        _make_flash_extension("dropout_layer_norm", "0.1", "v2.8.3:csrc/layer_norm/ln_api.cpp"),
        _make_flash_extension("fused_dense_lib", "0.0.0", "v2.8.3:csrc/fused_dense_lib/fused_dense.cpp"),
        _make_flash_extension("rotary_emb", "0.1", "v2.8.2:csrc/rotary/rotary.cpp"),
        _make_flash_extension("xentropy_cuda_lib", "0.1", "v2.8.2:csrc/xentropy/interface.cpp"),
        Package("amp_C", "apex", "0.1", "NVIDIA/apex@25.05:csrc/amp_C_frontend.cpp", "apex"),
        Package("apex", "apex", "0.1", "NVIDIA/apex@25.05"),
        Package("flash_attn_interface", "flash-attn-3", "3.0.0b1", f"{_FLASH_REPOSITORY}v2.8.3:hopper"),
        Package("causal_conv1d", "causal-conv1d", "1.6.1", "Dao-AILab/causal-conv1d@v1.6.1.post4"),
        Package("deepspeed", "deepspeed", "0.19.5", "deepspeedai/DeepSpeed@v0.19.5:deepspeed"),
        Package("flashinfer", "flashinfer-python", "0.6.17", "flashinfer-ai/flashinfer@v0.6.17:flashinfer"),
        Package("kernels", "kernels", "0.17.2", "huggingface/kernels@v0.17.2:src/kernels", "hub"),
        Package("mamba_ssm", "mamba-ssm", "2.3.2.post1", "state-spaces/mamba@v2.3.2.post1"),
        Package("torch_cluster", "torch-cluster", "1.6.3", "rusty1s/pytorch_cluster@1.6.3"),
        Package("torch_scatter", "torch-scatter", "2.1.2", "rusty1s/pytorch_scatter@2.1.2"),
        Package("transformer_engine", "transformer-engine", "2.18.0", "NVIDIA/TransformerEngine@v2.18"),
        Package("xformers", "xformers", "0.0.32.post2", "facebookresearch/xformers@v0.0.32.post2"),
    )
}
# Packages whose stubs libraries do not find, even after the program has chosen the package.
PROGRAM_ONLY_PACKAGES = ("deepspeed", "kernels")
# Packages whose Python code is installed, and whose compiled operators have stubs where they cannot be loaded.
INSTALLED_PACKAGES = (
    Package("torchaudio", "torchaudio", "2.11.0", "pytorch/audio@v2.11.0:src/libtorchaudio"),
    Package("torchvision", "torchvision", "0.28.0", "pytorch/vision@v0.28.0:torchvision/csrc/ops"),
)
# Packages that need a GPU to be built and have no stub: refused by name. The sizes of most of their outputs depend on
# numbers: points in a voxel, triangles in a pixel.
PACKAGES_WITHOUT_STUB = (
    "pytorch3d", "MinkowskiEngine", "spconv", "torchsparse", "torch_sparse", "torch_spline_conv", "pyg_lib",
    "nvdiffrast", "tinycudann", "diff_gaussian_rasterization", "simple_knn", "gsplat", "natten",
)  # fmt: skip
NO_STUBS_HINT = "(--no-stubs does without)."  # end of each stub's assumption
# Entry points of packages with stubs of their own: NAME = MODULE, whose import registers the stubs.
ENTRY_POINT_GROUP = "memprof.stubs"


@functools.cache
def read_public_names(package: str) -> dict[str, frozenset[str]]:
    """Return the public names of each module of `package`, by module; empty if memprof has no list of them."""
    if package not in PACKAGES:
        return {}
    file = importlib.resources.files("memprof.stubs") / "names" / f"{package}.txt"
    try:
        text = file.read_text(encoding="utf-8")
    except FileNotFoundError:
        return {}
    lines = (line.partition(":") for line in text.splitlines())
    return {module: frozenset(names.split()) for module, _, names in lines}
