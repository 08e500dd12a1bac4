"""Construction of a model with quantized weights as its checkpoint stores them, by transformers' `from_pretrained`.

`from_pretrained` reads a checkpoint in host memory, made here, with the dtypes and shapes of the real one. For float8
blocks and MXFP4, transformers' own quantizers replace the layers, and stubs replace the kernels of the hub
(stubs/hub_kernels.py). For GPTQ and AWQ, transformers would need optimum and GPTQModel, and for GGUF a file: quantizers
of this module replace the same layers instead (optimum/gptq/quantizer.py at 83c88b8, transformers/integrations/awq.py
and gguf/utils.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memprof.errors import UsageError
from memprof.spec import Mode, TargetSpec
from memprof.workload.formats import GROUP, WeightFormat
from memprof.workload.packed_layers import KERNELS, GptqMarlin, PackedLinear

# Where optimum looks for what GPTQ packs (optimum/gptq/constants.py, BLOCK_PATTERNS).
_BLOCKS = (
    "transformer.h", "model.decoder.layers", "gpt_neox.layers", "model.layers", "model.language_model.layers", "h",
    "decoder.layers", "layers",
)  # fmt: skip
_GGML_TYPES = {"q4_0": 2, "q8_0": 8, "q4_k": 12, "q5_k": 13, "q6_k": 14}  # ggml.h, enum ggml_type
_MXFP4_BLOCK = 32


def load_stored(
    model_class: Any, configuration: Any, arguments: dict[str, Any], stored: WeightFormat, spec: TargetSpec
) -> nn.Module:
    """Return a model on "cuda" with stored weights; `arguments` as in load_quantized; UsageError if impossible."""
    from transformers.quantizers import auto

    if stored.name.startswith("gguf") and configuration.model_type not in _find_packed_gguf_types():
        unpacked: nn.Module = model_class._from_config(configuration, **arguments)
        return unpacked.to("cuda:0")
    said = dict(stored.config)
    said.pop("modules_in_block_to_quantize", None)  # for which transformers would look for optimum
    with _replace_quantizer(auto, stored, spec, arguments["dtype"]):
        try:
            config = auto.AutoQuantizationConfig.from_dict(said)
            state = _make_checkpoint(model_class, configuration, arguments, auto.AutoHfQuantizer.from_config(config))
        except (ImportError, AttributeError, KeyError) as error:
            raise UsageError(
                "this release of transformers does not load weights stored like this",
                value=f"{stored.name} ({type(error).__name__}: {error})",
                hint="update transformers",
            ) from error
        configuration.quantization_config = said
        model: nn.Module = model_class.from_pretrained(
            None, config=configuration, state_dict=state, device_map={"": "cuda:0"}, **arguments
        )
    for module in model.modules():
        if type(module).__name__ == "Mxfp4GptOssExperts":
            _register_blocks(module)
    return model


def _find_packed_gguf_types() -> frozenset[str]:
    """Return model types whose GGUF files transformers leaves packed (integrations/gguf); it unpacks others as it
    loads them (modeling_gguf_pytorch_utils.py)."""
    try:
        from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
    except ImportError:
        return frozenset()
    known = {"qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"}
    types = {known.get(name, name) for name in GGUF_ARCHS}
    return frozenset(types | {f"{name}_text" for name in types})


def number_of_weights(module: Any) -> int | None:
    """Return the number of weights in a module's own parameters; None: their number of elements."""
    if isinstance(module, PackedLinear):
        return module.num_weights + (0 if module.bias is None else module.bias.numel())
    kind = type(module).__name__
    if kind == "Mxfp4GptOssExperts":
        hidden, inner = module.hidden_size, module.intermediate_size
        return int(module.num_experts * (3 * hidden * inner + 2 * inner + hidden))
    if kind == "GgufLinear":
        return int(module.in_features * module.out_features + (0 if module.bias is None else module.out_features))
    if kind == "GgufEmbedding":
        return int(module.num_embeddings * module.embedding_dim)
    if kind == "GgufExperts":
        return int(3 * module.num_experts * module.hidden_dim * module.intermediate_dim)
    if kind.startswith("FP8"):
        return sum(p.numel() for name, p in module.named_parameters(recurse=False) if "scale" not in name)
    return None


def assumptions(stored: WeightFormat, spec: TargetSpec) -> list[str]:
    """Return the assumptions on these weights, in sentences."""
    kernel = _choose_kernel(stored, spec)
    found = [f"Weights are stored as {stored.name}{', as the configuration says' if stored.from_checkpoint else ''}."]
    if kernel:
        library = "Marlin (on Hopper GPTQModel takes Machete, which stores the same)" if kernel == "marlin" else kernel
        found.append(f"{stored.name}: products are by GPTQModel's kernel {library}.")
    if kernel == "triton" and spec.mode is Mode.TRAIN:
        found.append("GPTQModel unpacks a weight for each product, and autograd keeps it until the layer's backward.")
    if stored.name.startswith("gguf"):
        packed = ", ".join(sorted(_find_packed_gguf_types())) or "none in this release"
        found.append(
            "Every matrix, embedding and head are of one GGUF type, as llama-quantize --pure makes them. transformers "
            f"leaves them packed for some model types ({packed}), and unpacks the files of others as it loads them."
        )
    return found


def _choose_kernel(stored: WeightFormat, spec: TargetSpec) -> str:
    """Return the kernel of GPTQModel for a packed layer: the choice of utils/importer.py, or the configuration's."""
    method = str(stored.config["quant_method"])
    if method not in ("gptq", "awq"):
        return ""
    said = stored.config.get("backend")
    if said in ("marlin", "triton", "gemm"):
        return str(said)
    unpacking = "triton" if method == "gptq" else "gemm"
    # Marlin has no backward: adapters need AUTO_TRAINABLE.
    return unpacking if spec.mode is Mode.TRAIN or said == "auto_trainable" else "marlin"


def _make_checkpoint(
    model_class: Any, configuration: Any, arguments: dict[str, Any], quantizer: Any
) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint, in host memory and without values."""
    dtype = quantizer.update_dtype(arguments["dtype"])
    with torch.device("meta"):
        model = model_class._from_config(configuration, **{**arguments, "dtype": dtype})
    quantizer.preprocess_model(model)
    if all(number_of_weights(module) is None for module in model.modules()):
        raise UsageError(
            "nothing of this model can be stored so",
            value=f"{quantizer.quantization_config.quant_method} in {type(model).__name__}",
            hint="leave out --quantize",
        )
    tied = set(model.all_tied_weights_keys)
    state: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name not in tied:
            state |= _make_saved_tensors(name, tensor, model)
    return state


def _make_saved_tensors(name: str, tensor: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor]:
    path, _, own = name.rpartition(".")
    if own in ("gate_up_proj", "down_proj") and type(model.get_submodule(path)).__name__ == "Mxfp4GptOssExperts":
        experts, rows, packed = tensor.shape
        blocks = 2 * packed // _MXFP4_BLOCK
        return {
            f"{name}_blocks": torch.empty(experts, rows, blocks, _MXFP4_BLOCK // 2, dtype=torch.uint8),
            f"{name}_scales": torch.empty(experts, rows, blocks, dtype=torch.uint8),
        }
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype)}


def _register_blocks(experts: nn.Module) -> None:
    """Register the loaded weights of MXFP4 experts, which torch would not find as parameters."""
    for name in ("gate_up_proj", "down_proj"):
        kept = getattr(experts, name)
        if not isinstance(kept, torch.Tensor):
            scales = getattr(experts, f"{name}_precision_config").weight_scale
            for part, tensor in (("blocks", kept.data), ("scales", scales.data)):
                experts.register_parameter(f"{name}_{part}", nn.Parameter(tensor, requires_grad=False))


@contextmanager
def _replace_quantizer(auto: Any, stored: WeightFormat, spec: TargetSpec, dtype: torch.dtype) -> Iterator[None]:
    """Context manager: replace transformers' quantizer by memprof's where it needs a library or a file."""
    method = str(stored.config["quant_method"])
    if method not in ("gptq", "awq", "gguf"):
        yield
        return
    original = auto.AUTO_QUANTIZER_MAPPING[method]
    auto.AUTO_QUANTIZER_MAPPING[method] = lambda config, **rest: _make_quantizer(config, stored, spec, dtype, rest)
    try:
        yield
    finally:
        auto.AUTO_QUANTIZER_MAPPING[method] = original


def _make_quantizer(
    config: Any, stored: WeightFormat, spec: TargetSpec, dtype: torch.dtype, rest: dict[str, Any]
) -> Any:
    from transformers.quantizers.base import HfQuantizer

    class Replacing(HfQuantizer):
        """Replaces layers before they are loaded, and has their kernels prepare them afterwards."""

        requires_calibration = False

        def update_dtype(self, asked: torch.dtype) -> torch.dtype:
            # quantizers/quantizer_awq.py: the kernels' dtype
            return torch.float16 if stored.name.startswith("awq") and asked == torch.bfloat16 else asked

        def _process_model_before_weight_loading(self, model: Any, **unused: Any) -> None:
            if stored.name.startswith("gguf"):
                _replace_by_blocks(model, stored.name, dtype)
            else:
                _replace_by_packed(self, model, stored, _choose_kernel(stored, spec))

        def _process_model_after_weight_loading(self, model: Any, **unused: Any) -> Any:
            for module in model.modules():
                if isinstance(module, PackedLinear):
                    module.loaded()
            return model

        def is_serializable(self, **unused: Any) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return True

    return Replacing(config, **{**rest, "pre_quantized": True})


def _replace_by_packed(quantizer: Any, model: nn.Module, stored: WeightFormat, kernel: str) -> None:
    """Replace linear layers: GPTQ packs what is in the layers, AWQ what is not excepted."""
    said = stored.config
    kind = KERNELS[str(said["quant_method"]), kernel]
    if said["quant_method"] == "gptq":
        names = [name for name, _ in model.named_modules()]
        prefix = said.get("block_name_to_quantize") or next(
            (known for known in _BLOCKS if any(name.startswith(known) for name in names)), ""
        )
        chosen = [ending for group in said.get("modules_in_block_to_quantize") or () for ending in group]

        def packs(name: str) -> bool:
            return name.startswith(prefix) and (not chosen or name.endswith(tuple(chosen)))
    else:
        from transformers.quantizers.quantizers_utils import should_convert_module

        excepted = quantizer.get_modules_to_not_convert(
            model, said.get("modules_to_not_convert"), getattr(model, "_keep_in_fp32_modules", None),
            add_default_skips=True,
        )  # fmt: skip

        def packs(name: str) -> bool:
            return bool(should_convert_module(name, excepted))

    for name, parameter in model.named_parameters():
        if parameter.dim() > 2:
            raise UsageError(
                "mixtures of experts are not simulated in this format",
                value=f"{stored.name}: {name} has {parameter.dim()} dimensions",
                hint="--quantize fp8, or a GGUF type",
            )
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and packs(name):
            with torch.device("meta"):
                layer = kind(module, int(said.get("bits", 4)), int(said.get("group_size", GROUP)))
            if isinstance(layer, GptqMarlin):
                layer.desc_act = bool(said.get("desc_act"))
            model.set_submodule(name, layer)


def _replace_by_blocks(model: Any, name: str, dtype: torch.dtype) -> None:
    """Replace linear layers, embeddings and the head by transformers' own modules of GGUF blocks."""
    from transformers.integrations.gguf import dequant, kernels, utils

    kind = _GGML_TYPES[name.removeprefix("gguf-")]
    block = dequant.GGML_BLOCK[kind][0]
    plan = {}
    for path, parameter in model.named_parameters():
        parent = path.rpartition(".")[0]
        if type(model.get_submodule(parent)) not in (nn.Linear, nn.Embedding) and not parent.endswith(".experts"):
            continue
        if parameter.dim() > 1:
            if parameter.shape[-1] % block:
                raise UsageError(
                    f"{name} stores blocks of {block} weights",
                    value=f"{path} has rows of {parameter.shape[-1]}",
                    hint="--quantize gguf-q8_0 or gguf-q4_0: their blocks have 32",
                )
            plan[path] = kind
    with torch.device("meta"):
        utils.replace_with_gguf_modules(model, plan, kernels.get_gguf_kernel(), dtype)
