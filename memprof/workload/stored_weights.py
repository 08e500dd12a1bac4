"""Models with quantized weights other than bitsandbytes', loaded by transformers from a checkpoint in host memory.

The checkpoint's tensors have the dtypes and shapes of a real one. For float8 blocks and MXFP4 transformers' own
quantizers replace the layers, and hub kernels are replaced by a stub (stubs/hub_kernels.py). For GPTQ and AWQ
transformers would need optimum and GPTQModel, and for GGUF a file; instead, a quantizer of this module replaces the
same layers (optimum/gptq/quantizer.py at 83c88b8, transformers/integrations/awq.py and gguf/utils.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from memprof.errors import UsageError
from memprof.spec import Mode, TargetSpec
from memprof.workload.formats import GROUP_SIZE, WeightFormat
from memprof.workload.packed_layers import KERNELS, GptqMarlin, PackedLinear

# Layer stacks whose linear layers optimum packs for GPTQ (optimum/gptq/constants.py, BLOCK_PATTERNS).
_BLOCKS = (
    "transformer.h", "model.decoder.layers", "gpt_neox.layers", "model.layers", "model.language_model.layers", "h",
    "decoder.layers", "layers",
)  # fmt: skip
_GGML_TYPES = {"q4_0": 2, "q8_0": 8, "q4_k": 12, "q5_k": 13, "q6_k": 14}  # ggml.h, enum ggml_type
_MXFP4_BLOCK = 32


def load_stored(
    model_class: Any, configuration: Any, arguments: dict[str, Any], stored: WeightFormat, spec: TargetSpec
) -> nn.Module:
    """Return a `model_class` on "cuda" with weights in the format `stored`; `arguments` as for `load_quantized`.
    Raises UsageError if the model cannot be loaded in this format."""
    from transformers.quantizers import auto

    if stored.name.startswith("gguf") and configuration.model_type not in _find_packed_gguf_types():
        unpacked: nn.Module = model_class._from_config(configuration, **arguments)
        return unpacked.to("cuda:0")
    entries = dict(stored.config)
    entries.pop("modules_in_block_to_quantize", None)  # for which transformers would look for optimum
    with _replace_quantizer(auto, stored, spec, arguments["dtype"]):
        try:
            config = auto.AutoQuantizationConfig.from_dict(entries)
            state = _make_checkpoint(model_class, configuration, arguments, auto.AutoHfQuantizer.from_config(config))
        except (ImportError, AttributeError, KeyError) as error:
            raise UsageError(
                "this release of transformers does not load weights stored like this",
                value=f"{stored.name} ({type(error).__name__}: {error})",
                hint="update transformers",
            ) from error
        configuration.quantization_config = entries
        model: nn.Module = model_class.from_pretrained(
            None, config=configuration, state_dict=state, device_map={"": "cuda:0"}, **arguments
        )
    for module in model.modules():
        if type(module).__name__ == "Mxfp4GptOssExperts":
            _register_blocks(module)
    return model


def _find_packed_gguf_types() -> frozenset[str]:
    """Return the model types whose GGUF weights transformers keeps packed (integrations/gguf); it unpacks those of
    other types while loading (modeling_gguf_pytorch_utils.py)."""
    try:
        from transformers.integrations.gguf.gguf_conversion_mapping import GGUF_ARCHS
    except ImportError:
        return frozenset()
    aliases = {"qwen35": "qwen3_5", "qwen35moe": "qwen3_5_moe"}
    names = {aliases.get(name, name) for name in GGUF_ARCHS}
    return frozenset(names | {f"{name}_text" for name in names})


def count_weights(module: Any) -> int | None:
    """Return the number of weights that a module's own packed parameters stand for; None if they are not packed."""
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


def list_assumptions(stored: WeightFormat, spec: TargetSpec) -> list[str]:
    """Return sentences for the report on what is assumed about weights in the format `stored`."""
    kernel = _choose_kernel(stored, spec)
    notes = [f"Weights are stored as {stored.name}{', as the configuration says' if stored.from_checkpoint else ''}."]
    if kernel:
        library = "Marlin (on Hopper GPTQModel takes Machete, which stores the same)" if kernel == "marlin" else kernel
        notes.append(f"{stored.name}: products are by GPTQModel's kernel {library}.")
    if kernel == "triton" and spec.mode is Mode.TRAIN:
        notes.append("GPTQModel unpacks a weight for each product, and autograd keeps it until the layer's backward.")
    if stored.name.startswith("gguf"):
        packed = ", ".join(sorted(_find_packed_gguf_types())) or "none in this release"
        notes.append(
            "Every matrix, embedding and head are of one GGUF type, as llama-quantize --pure makes them. transformers "
            f"leaves them packed for some model types ({packed}), and unpacks the files of others as it loads them."
        )
    return notes


def _choose_kernel(stored: WeightFormat, spec: TargetSpec) -> str:
    """Return GPTQModel's kernel for packed layers, as its utils/importer.py chooses; "" for formats without kernels."""
    method = str(stored.config["quant_method"])
    if method not in ("gptq", "awq"):
        return ""
    entries = stored.config.get("backend")
    if entries in ("marlin", "triton", "gemm"):
        return str(entries)
    unpacking = "triton" if method == "gptq" else "gemm"
    # Marlin has no backward: adapters need AUTO_TRAINABLE.
    return unpacking if spec.mode is Mode.TRAIN or entries == "auto_trainable" else "marlin"


def _make_checkpoint(
    model_class: Any, configuration: Any, arguments: dict[str, Any], quantizer: Any
) -> dict[str, torch.Tensor]:
    """Return the state dict of a checkpoint in the format of `quantizer`: uninitialized tensors in host memory."""
    dtype = quantizer.update_dtype(arguments["dtype"])
    with torch.device("meta"):
        model = model_class._from_config(configuration, **{**arguments, "dtype": dtype})
    quantizer.preprocess_model(model)
    if all(count_weights(module) is None for module in model.modules()):
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
    path, _, leaf = name.rpartition(".")
    if leaf in ("gate_up_proj", "down_proj") and type(model.get_submodule(path)).__name__ == "Mxfp4GptOssExperts":
        experts, rows, packed = tensor.shape
        blocks = 2 * packed // _MXFP4_BLOCK
        return {
            f"{name}_blocks": torch.empty(experts, rows, blocks, _MXFP4_BLOCK // 2, dtype=torch.uint8),
            f"{name}_scales": torch.empty(experts, rows, blocks, dtype=torch.uint8),
        }
    return {name: torch.empty(tensor.shape, dtype=tensor.dtype)}


def _register_blocks(experts: nn.Module) -> None:
    """Register the loaded weights and scales of MXFP4 `experts` as parameters, so that torch finds them."""
    for name in ("gate_up_proj", "down_proj"):
        loaded = getattr(experts, name)
        if not isinstance(loaded, torch.Tensor):
            scales = getattr(experts, f"{name}_precision_config").weight_scale
            for suffix, tensor in (("blocks", loaded.data), ("scales", scales.data)):
                experts.register_parameter(f"{name}_{suffix}", nn.Parameter(tensor, requires_grad=False))


@contextmanager
def _replace_quantizer(auto: Any, stored: WeightFormat, spec: TargetSpec, dtype: torch.dtype) -> Iterator[None]:
    """Context manager: replace transformers' quantizer for GPTQ, AWQ and GGUF, which needs a library or a file."""
    method = str(stored.config["quant_method"])
    if method not in ("gptq", "awq", "gguf"):
        yield
        return
    original = auto.AUTO_QUANTIZER_MAPPING[method]
    auto.AUTO_QUANTIZER_MAPPING[method] = lambda config, **opts: _make_quantizer(config, stored, spec, dtype, opts)
    try:
        yield
    finally:
        auto.AUTO_QUANTIZER_MAPPING[method] = original


def _make_quantizer(
    config: Any, stored: WeightFormat, spec: TargetSpec, dtype: torch.dtype, options: dict[str, Any]
) -> Any:
    from transformers.quantizers.base import HfQuantizer

    class StubQuantizer(HfQuantizer):
        """Quantizer of transformers that replaces layers before weights are loaded, and repacks them afterwards."""

        requires_calibration = False

        def update_dtype(self, dtype: torch.dtype) -> torch.dtype:
            # quantizers/quantizer_awq.py: the kernels' dtype
            return torch.float16 if stored.name.startswith("awq") and dtype == torch.bfloat16 else dtype

        def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
            if stored.name.startswith("gguf"):
                _replace_by_blocks(model, stored.name, dtype)
            else:
                _replace_by_packed(self, model, stored, _choose_kernel(stored, spec))

        def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
            for module in model.modules():
                if isinstance(module, PackedLinear):
                    module.prepare()
            return model

        def is_serializable(self, **kwargs: Any) -> bool:
            return False

        @property
        def is_trainable(self) -> bool:
            return True

    return StubQuantizer(config, **{**options, "pre_quantized": True})


def _replace_by_packed(quantizer: Any, model: nn.Module, stored: WeightFormat, kernel: str) -> None:
    """Replace linear layers by packed ones: for GPTQ those in the layer stack, for AWQ all that are not excluded."""
    entries = stored.config
    kind = KERNELS[str(entries["quant_method"]), kernel]
    if entries["quant_method"] == "gptq":
        names = [name for name, _ in model.named_modules()]
        prefix = entries.get("block_name_to_quantize") or next(
            (path for path in _BLOCKS if any(name.startswith(path) for name in names)), ""
        )
        endings = [ending for group in entries.get("modules_in_block_to_quantize") or () for ending in group]

        def is_packed(name: str) -> bool:
            return name.startswith(prefix) and (not endings or name.endswith(tuple(endings)))
    else:
        from transformers.quantizers.quantizers_utils import should_convert_module

        skipped = quantizer.get_modules_to_not_convert(
            model, entries.get("modules_to_not_convert"), getattr(model, "_keep_in_fp32_modules", None),
            add_default_skips=True,
        )  # fmt: skip

        def is_packed(name: str) -> bool:
            return bool(should_convert_module(name, skipped))

    for name, parameter in model.named_parameters():
        if parameter.dim() > 2:
            raise UsageError(
                "mixtures of experts are not simulated in this format",
                value=f"{stored.name}: {name} has {parameter.dim()} dimensions",
                hint="--quantize fp8, or a GGUF type",
            )
    for name, module in list(model.named_modules()):
        if type(module) is nn.Linear and is_packed(name):
            with torch.device("meta"):
                layer = kind(module, int(entries.get("bits", 4)), int(entries.get("group_size", GROUP_SIZE)))
            if isinstance(layer, GptqMarlin):
                layer.desc_act = bool(entries.get("desc_act"))
            model.set_submodule(name, layer)


def _replace_by_blocks(model: Any, name: str, dtype: torch.dtype) -> None:
    """Replace linear layers, embeddings and the head by transformers' own GGUF modules; `name` is such as gguf-q4_0."""
    from transformers.integrations.gguf import dequant, kernels, utils

    ggml_type = _GGML_TYPES[name.removeprefix("gguf-")]
    block = dequant.GGML_BLOCK[ggml_type][0]
    types = {}
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
            types[path] = ggml_type
    with torch.device("meta"):
        utils.replace_with_gguf_modules(model, types, kernels.get_gguf_kernel(), dtype)
