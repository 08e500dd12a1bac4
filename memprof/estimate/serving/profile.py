"""Peak of vLLM's profile run: the most that torch allocates beyond the weights in one step of the largest batch.

The run makes one forward of max_num_batched_tokens and then samples for max_num_seqs requests
(v1/worker/gpu_model_runner.py, profile_run and _dummy_sampler_run; v1/worker/gpu/model_runner.py in the V2 runner). Its
peak is in the sampler, whose logits are in float32, or in the widest layer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from memprof.device.catalog import Gpu
from memprof.estimate.serving.model import ITEMSIZE, ServedModel
from memprof.estimate.serving.weights import VOCABULARY_PADDING, WeightFormat
from memprof.estimate.state import CUBLAS_WORKSPACE, CUBLAS_WORKSPACE_HOPPER
from memprof.serving.releases import SORT, TRITON, VllmRules
from memprof.units import round_up

FLOAT32 = 4
# Hidden states at the peak of a layer's MLP: the residual, the MLP's input and, in compiled code, the attention's
# output and the residual before it, which the caller of the compiled piece still holds.
_COMPILED_STATES, _EAGER_STATES = 4, 2
_LATENT_WORKSPACE_TOKENS = 64 * 1024  # attention/backends/mla/common.py, determine_chunked_prefill_workspace_size.


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """What the profile run depends on."""

    rules: VllmRules
    gpu: Gpu
    tensor_parallel: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    weight_format: WeightFormat | None = None
    is_eager: bool = False
    profiles_images: bool = True


@dataclass(frozen=True, slots=True)
class ProfilePeak:
    """The most that the profile run allocates, and what that is."""

    num_bytes: int
    reason: str


def uses_second_runner(model: ServedModel, rules: VllmRules, weight_format: WeightFormat | None) -> bool:
    """Return whether vLLM's V2 model runner is the default for a model."""
    return rules.uses_second_runner(
        "" if model.images else model.family, is_dense=not model.experts and not model.is_hybrid,
        is_quantized=weight_format is not None,
    )  # fmt: skip


def compute_profile_peak(model: ServedModel, settings: ProfileSettings) -> ProfilePeak:
    """Return the peak of the profile run on one rank."""
    kept = _count_kept_bytes(model, settings)
    peaks = [ProfilePeak(num_bytes + kept, reason) for num_bytes, reason in _list_moments(model, settings)]
    tokens, itemsize = settings.max_num_batched_tokens, ITEMSIZE
    if model.images is not None and settings.profiles_images:
        encoder = model.images.widen_to_video(settings.max_model_len)
        held = encoder.count_kept_bytes(tokens, model.geometry.hidden, itemsize)
        count = encoder.count_images(tokens)
        peaks = [ProfilePeak(peak.num_bytes + held, f"{peak.reason}; {count} images") for peak in peaks]
        batches = settings.rules.batches_video_frames
        layer = encoder.count_layer_bytes(tokens, itemsize, settings.gpu.total_bytes, batches=batches)
        layer += encoder.pixels * count * itemsize
        layer += kept - (_count_expert_workspace(model, settings) if settings.rules.keeps_workspaces else 0)
        peaks.append(ProfilePeak(layer, f"image encoder: {count} images of {encoder.patches:,} patches"))
    return max(peaks, key=lambda peak: peak.num_bytes)


def _count_kept_bytes(model: ServedModel, settings: ProfileSettings) -> int:
    """Return what is allocated in the run and stays: cuBLAS' workspace, and the workspaces of fused experts."""
    kept = CUBLAS_WORKSPACE_HOPPER if settings.gpu.compute_capability[0] >= 9 else CUBLAS_WORKSPACE
    if settings.rules.keeps_workspaces:
        kept += _count_expert_workspace(model, settings)
    if settings.rules.counts_penalties_in_profile and uses_second_runner(model, settings.rules, settings.weight_format):
        # Counts of each request's tokens (v1/worker/gpu/sample/penalties.py, output_bin_counts).
        kept += settings.max_num_seqs * model.geometry.vocab * FLOAT32
    return kept


def _count_expert_workspace(model: ServedModel, settings: ProfileSettings) -> int:
    """Return the two workspaces of Triton's fused experts (fused_moe/fused_moe.py, workspace_shapes): outputs of the
    first product and of the second share one, the activation has the other."""
    experts = model.experts
    if experts is None:
        return 0
    hidden = experts.hidden or model.geometry.hidden
    columns = experts.width // settings.tensor_parallel * (2 if experts.is_gated else 1)
    rows = settings.max_num_batched_tokens * experts.top_k
    itemsize = ITEMSIZE
    if settings.rules.keeps_workspaces:
        return rows * (max(columns, hidden) + max(columns // 2, hidden)) * itemsize
    return rows * (max(columns, hidden) + columns // 2) * itemsize


def _list_moments(model: ServedModel, settings: ProfileSettings) -> Iterator[tuple[int, str]]:
    """Yield the bytes and a description of each moment that may be the peak, without what stays allocated."""
    yield _compute_sampler_moment(model, settings)
    g, itemsize = model.geometry, ITEMSIZE
    tokens, tp = settings.max_num_batched_tokens, settings.tensor_parallel
    states = (_EAGER_STATES if settings.is_eager else _COMPILED_STATES) * tokens * g.hidden * itemsize
    experts = model.experts
    if experts is None or experts.num_layers < g.layers or experts.keeps_dense:
        width = g.intermediate // tp
        ups = 2 if g.is_gated else 1
        num_bytes = tokens * (ups + 1) * width * itemsize
        if settings.weight_format is not None and settings.weight_format.name in ("int8", "fp8", "fp8-block"):
            num_bytes += tokens * width  # The activations, quantized for the next product.
        yield num_bytes + states, f"MLP of {tokens:,} tokens x {(ups + 1) * width:,} elements"
    if experts is not None:
        transient = 0 if settings.rules.keeps_workspaces else _count_expert_workspace(model, settings)
        shared = 3 * tokens * experts.shared_width // tp * itemsize
        yield transient + shared + states, f"{experts.top_k} experts for each of {tokens:,} tokens"
    if model.latent is not None:
        rows = min(max(8 * settings.max_model_len, 4 * settings.max_num_seqs * 64), _LATENT_WORKSPACE_TOKENS)
        width = g.heads // tp * (model.latent.nope + model.latent.value)
        yield rows * width * itemsize + states, f"keys and values of {rows:,} tokens, decompressed"
    if model.state is not None:
        width = model.state.conv_width + model.state.heads * model.state.head_dim
        yield 3 * tokens * width // tp * itemsize + states, f"linear attention of {tokens:,} tokens"


def _compute_sampler_moment(model: ServedModel, settings: ProfileSettings) -> tuple[int, str]:
    g, itemsize, rules = model.geometry, ITEMSIZE, settings.rules
    rows = min(settings.max_num_seqs, settings.max_num_batched_tokens)
    sampler = rules.find_sampler(settings.gpu.compute_capability)
    vocabulary = g.vocab if sampler == SORT else round_up(g.vocab, VOCABULARY_PADDING)
    copies = rules.count_float32_logits(sampler)
    has_random_states = True
    if uses_second_runner(model, settings.rules, settings.weight_format):
        has_random_states = False
        if not rules.warms_sampler_up:
            copies = 0  # Without top-k and top-p the V2 runner samples from the logits as they are (sample/gumbel.py).
    num_bytes = rows * vocabulary * (itemsize + copies * FLOAT32)
    if sampler == TRITON and copies:  # A row for each multiprocessor (sample/ops/topk_topp_triton.py).
        num_bytes += settings.gpu.num_sms * vocabulary * FLOAT32
    states = settings.max_num_batched_tokens + (2 if has_random_states else 1) * rows
    num_bytes += states * g.hidden * itemsize
    each = f"{itemsize + copies * FLOAT32} bytes"
    return num_bytes, f"sampler's logits: {rows:,} rows x {vocabulary:,} tokens x {each}"
