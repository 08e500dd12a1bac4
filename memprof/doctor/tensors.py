"""Search for the tensor of a failed allocation: its bytes, factorized over the dimensions of a model.

A candidate's weight, in bits, measures how unlikely it is that a random size matches as well. A range of w integers has
a multiple of 2^k with probability w / 2^k, so 131,072 tokens of 151,936 logits are strong evidence, 130,989 weak.
Evidence from the traceback is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memprof.doctor.diagnosis import Candidate, MessageSizes
from memprof.doctor.dimensions import Dimensions, list_catalog_dimensions
from memprof.units import MIB

_SEGMENT = 2 * MIB
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * MIB, 20 * MIB
_BLOCK = 512
MIN_BITS = 7.0  # Minimum weight without a known model, as hundreds of sizes are tried.
_KNOWN_BITS = 30.0  # Weight if all sizes were given, and the bytes match.
_HINT_BITS = 6.0
_HALF, _FULL = 2, 4
_COMMON_HEADS = (8, 12, 16, 20, 24, 25, 32, 40, 48, 64)
_SHARDS = (1, 2, 4, 8)
_DELTA_ROLE = "one weight delta for each token"
_MAX_ODD_FACTOR = 3  # Round sizes are powers of two times up to this, which too many widths divide.
_MANY_TOKENS = 1 << 17  # Tokens of a batch beyond which each doubling costs two bits.


def find_request_range(sizes: MessageSizes) -> tuple[int, int] | None:
    """Return the smallest and largest request, in bytes, that print as `tried`; None if the range is too wide.

    The message has the segment, rounded to two decimals; segments are multiples of 2 MiB for requests of at least
    10 MiB (`get_allocation_size` of c10/cuda/CUDACachingAllocator.cpp).
    """
    tried = sizes.tried
    if tried is None:
        return None
    if sizes.tried_is_segment:
        low, high = -(-tried.low // _SEGMENT) * _SEGMENT, tried.high // _SEGMENT * _SEGMENT
        if low <= high:
            if high <= _SMALL_SEGMENT or low == high == _LARGE_SEGMENT:
                return None
            return low - _SEGMENT + 1, high
    if tried.high < MIB:
        return None
    return max(1, tried.low - _BLOCK), tried.high


@dataclass(frozen=True, slots=True)
class TensorQuery:
    """What is known of a failed allocation: range of bytes, model, batch, and words of the traceback."""

    low: int  # Minimum of the request in bytes.
    high: int  # Maximum of the request in bytes.
    model: Dimensions | None = None
    half_dtype: str = "bfloat16"  # Name of the half-precision dtype.
    batch: int | None = None  # Number of sequences; None: unknown.
    length: int | None = None  # Tokens of a sequence; None: unknown.
    logged_numbers: tuple[int, ...] = ()  # Lengths and batch sizes in the log, which may be the run's.
    roles: frozenset[str] = frozenset()  # Roles that the traceback mentions.
    mentions_float32: bool = False  # Whether the traceback mentions float32.
    allocated_bytes: int | None = None  # Allocated bytes on the GPU; None: unknown.

    @property
    def dtypes(self) -> tuple[tuple[str, int, float], ...]:
        """Return the possible dtypes: name, bytes of an element, and bits of evidence."""
        return ((self.half_dtype, _HALF, 0.0), ("float32", _FULL, 1.5 if self.mentions_float32 else 0.0))

    def weigh_roles(self, *kinds: str) -> tuple[float, str]:
        """Return bits of evidence from the traceback for a tensor with one of these roles, and their explanation."""
        return (_HINT_BITS, "; the traceback speaks of it") if self.roles.intersection(kinds) else (0.0, "")


# Role -> words in the code that makes tensors of the role.
_ROLES = {
    "logits": "lm_head cross_entropy log_softmax logits loss_function logprob nll_loss log_prob",
    "attention": "attn attention softmax scores baddbmm matmul(q sdpa einsum",
    "feed-forward": "mlp act_fn gate_proj up_proj down_proj gelu silu feed_forward ffn",
    "weights": "convert( _apply load_ from_pretrained create_weights Parameter( .cuda() param.to",
    "optimizer": "exp_avg optimizer adam _init_group flatten_dense fp32_partition single_partition "
    "initialize_optimizer_states flat_param",
    "cache": "key_cache past_key cache_utils kv_cache DynamicCache",
}


def find_roles(frames: Sequence[str]) -> frozenset[str]:
    """Return the roles of tensors that the innermost frames of a traceback mention."""
    text = "\n".join(frames)
    return frozenset(role for role, words in _ROLES.items() if any(word in text for word in words.split()))


def find_candidates(query: TensorQuery, max_candidates: int = 5) -> list[Candidate]:
    """Return the tensors that the failed allocation may be for, likeliest first, at most `most`."""
    weighed: dict[tuple[str, tuple[int, ...], str], tuple[float, Candidate]] = {}
    enough = MIN_BITS if query.model is None else 1.0
    for bits, candidate in _iter_candidates(query):
        key = (candidate.role, candidate.shape, candidate.dtype)
        if bits >= enough and (key not in weighed or weighed[key][0] < bits):
            weighed[key] = (bits, candidate)
    ranked = sorted(weighed.values(), key=lambda item: -item[0])
    # Candidates far less likely than the first are left out.
    return [candidate for bits, candidate in ranked[:max_candidates] if bits > ranked[0][0] - 10]


def _iter_candidates(query: TensorQuery) -> Iterator[tuple[float, Candidate]]:
    model = query.model
    if model is None:
        # A round size matches many tensors: only roles that the traceback mentions count.
        said = query.roles if _is_round(query) else {"logits", "feed-forward", "attention"}
        for known in list_catalog_dimensions():
            if "logits" in said:
                yield from _iter_row_tensors(query, known.vocabulary, "logits", -1.0, "logits", known)
            if "feed-forward" in said:
                width = known.hidden * known.intermediate
                yield from _iter_row_tensors(query, width, _DELTA_ROLE, -4.0, "delta", known)
        for heads in _COMMON_HEADS if "attention" in said else ():
            yield from _iter_score_tensors(query, heads, -4.0)
        return
    for shards in _SHARDS:
        if model.vocabulary and model.vocabulary % shards == 0:
            split = "" if shards == 1 else f", of one of {shards} ranks"
            prior = 2.0 - 4 * math.log2(shards)
            yield from _iter_row_tensors(query, model.vocabulary // shards, f"logits{split}", prior, "logits")
    yield from _iter_row_tensors(query, model.hidden, "hidden states", -2.0, "hidden")
    yield from _iter_row_tensors(query, model.intermediate, "feed-forward activations", 0.0, "feed-forward")
    yield from _iter_row_tensors(
        query, 2 * model.intermediate, "feed-forward activations, gate and up", -1.0, "feed-forward"
    )
    if model.heads:
        yield from _iter_score_tensors(query, model.heads, 1.0)
        yield from _iter_row_tensors(query, model.heads * model.head_dim, "queries", -2.5, "attention")
        fused = (model.heads + 2 * model.kv_heads) * model.head_dim
        yield from _iter_row_tensors(query, fused, "queries, keys and values", -2.0, "attention")
        yield from _iter_row_tensors(query, model.kv_heads * model.head_dim, "keys or values", -2.5, "cache")
        yield from _iter_score_tensors(query, 1, -3.0, role="attention mask")
    yield from _iter_row_tensors(query, model.hidden * model.intermediate, _DELTA_ROLE, -3.0, "delta")
    yield from _iter_weights(query, model)


def _is_round(query: TensorQuery) -> bool:
    """Return whether the request may be a power of two bytes, or three times a power of two."""
    number = _find_roundest(query.low, query.high)
    return number >> ((number & -number).bit_length() - 1) <= _MAX_ODD_FACTOR


def _iter_row_tensors(
    query: TensorQuery, width: int, role: str, prior: float, role_kind: str, guess: Dimensions | None = None
) -> Iterator[tuple[float, Candidate]]:
    """Yield tensors with a row of `width` values per token; `guess` is a model if the user's is unknown."""
    if not width:
        return
    hint, said = query.weigh_roles(role_kind)
    model = guess or query.model
    name = "" if model is None else model.model
    what = "the vocabulary" if role_kind == "logits" else "hidden x feed-forward width"
    extra = f"{said}; {width:,} is {what} of {name} and others" if guess else said
    for dtype, item, bias in query.dtypes:
        unit = width * item
        for tokens, bits, exact, why in _iter_token_counts(query, unit):
            # The GPU would hold at least the weights in 4 bits, and the hidden states.
            least_held = 0 if guess is None else guess.num_parameters // 2 + tokens * guess.hidden * _HALF
            if query.allocated_bytes is not None and least_held > query.allocated_bytes:
                continue
            shape = (*_split_tokens(query, tokens), width)
            bits -= 2 * max(0.0, math.log2(tokens / _MANY_TOKENS))
            candidate = Candidate(shape, dtype, role, tokens * unit, name, why + extra, exact)
            yield bits + prior + hint + bias, candidate


def _iter_token_counts(query: TensorQuery, unit: int) -> Iterator[tuple[int, float, bool, str]]:
    """Yield possible numbers of tokens of `unit` bytes: number, bits, whether all sizes were known, and explanation."""
    low, high = -(-query.low // unit), query.high // unit
    width = (query.high - query.low + 1) / unit
    batch, length = query.batch, query.length
    if batch and length:
        for tokens, what in (
            (batch * length, "the batch and length given"),
            (batch * (length - 1), "the batch and length given, the last position left out"),
        ):
            if low <= tokens <= high:
                yield tokens, _KNOWN_BITS, True, what
    elif length:
        first = -(-low // length)
        if first * length <= high and first >= 1:
            bits = _measure_roundness(first, width / length) + 4
            yield first * length, bits, False, f"{first} sequences of {length:,}"
    if low > high or high < 1:
        return
    step = batch or 1
    tokens = _find_roundest(max(1, -(-low // step)), high // step) * step
    if tokens and low <= tokens <= high:
        yield tokens, _measure_roundness(tokens // step, width / step), False, f"{tokens:,} tokens fit the size"
    for logged_number in query.logged_numbers:
        if logged_number > 64 and (multiple := -(-low // logged_number) * logged_number) <= high:
            bits = _measure_roundness(multiple // logged_number, width / logged_number) + 2
            yield multiple, bits, False, f"a multiple of {logged_number:,}, which the log names"


def _split_tokens(query: TensorQuery, tokens: int) -> tuple[int, int]:
    """Return batch size and length for `tokens` tokens: as known, else the fewest sequences that the model allows."""
    if query.batch and tokens % query.batch == 0:
        return query.batch, tokens // query.batch
    if query.length and tokens % query.length == 0:
        return tokens // query.length, query.length
    for logged_number in sorted(query.logged_numbers, reverse=True):
        if logged_number > 64 and tokens % logged_number == 0:
            return tokens // logged_number, logged_number
    limit = query.model.max_positions if query.model else None
    batch = 1
    while limit and tokens // batch > limit and tokens % (2 * batch) == 0:
        batch *= 2
    return (batch, tokens // batch) if not limit or tokens // batch <= limit else (1, tokens)


def _iter_score_tensors(
    query: TensorQuery, heads: int, prior: float, role: str = "attention scores"
) -> Iterator[tuple[float, Candidate]]:
    """Yield tensors with one value per head and pair of positions."""
    hint, said = query.weigh_roles("attention")
    name = query.model.model if query.model else ""
    for dtype, item, bias in query.dtypes:
        for batch in (query.batch,) if query.batch else (1, 2, 4, 8, 16, 32):
            unit = batch * heads * item
            low, high = math.sqrt(query.low / unit), math.sqrt(query.high / unit)
            if query.length:
                if not low <= query.length <= high:
                    continue
                length, known = query.length, query.batch is not None
                bits, why = (_KNOWN_BITS if known else 12.0 - math.log2(batch)), "the length given"
            else:
                length = _find_roundest(math.ceil(low), math.floor(high))
                if not length:
                    continue
                bits, known = _measure_roundness(length, high - low) - math.log2(batch), False
                why = f"the square of {length:,} positions"
            shape = (batch, heads, length, length)
            candidate = Candidate(shape, dtype, role, math.prod(shape) * item, name, why + said, known)
            yield bits + prior + hint + bias, candidate


def _iter_weights(query: TensorQuery, model: Dimensions) -> Iterator[tuple[float, Candidate]]:
    """Yield parameters, gradients, optimizer states, and flat buffers of all parameters."""
    shapes: list[tuple[tuple[int, ...], str, float, str]] = [
        ((model.vocabulary, model.hidden), "embedding or head, its gradient or state", 0.0, "weights"),
        ((model.intermediate, model.hidden), "a feed-forward weight", 0.0, "weights"),
        ((2 * model.intermediate, model.hidden), "feed-forward weights, gate and up", -1.0, "weights"),
        ((model.heads * model.head_dim, model.hidden), "an attention weight", -1.0, "weights"),
        ((model.num_parameters,), "all parameters in one buffer", 0.0, "optimizer"),
    ]
    if experts := model.num_experts:
        width = model.expert_width
        shapes += [
            ((experts, 2 * width, model.hidden), "the experts' gate and up weights", 0.0, "weights"),
            ((experts, model.hidden, width), "the experts' down weights", 0.0, "weights"),
        ]
    relative = (query.high - query.low + 1) / query.high
    for shape, role, prior, role_kind in shapes:
        hint, said = query.weigh_roles(role_kind, "weights", "optimizer")
        for dtype, item, bias in query.dtypes:
            size = math.prod(shape) * item
            if size and query.low <= size <= query.high:
                candidate = Candidate(shape, dtype, role, size, model.model, f"its size exactly{said}", True)
                yield -math.log2(relative) + prior + hint + bias, candidate


def _measure_roundness(number: int, width: float) -> float:
    """Return in bits how unlikely a number as round as `number` is among `width` integers."""
    zeros = (number & -number).bit_length() - 1
    return zeros - math.log2(max(width, 2**-12))


def _find_roundest(low: int, high: int) -> int:
    """Return the number from `low` to `high` that is divisible by the highest power of two; 0 for an empty range."""
    if low > high:
        return 0
    multiples = (-(-low >> power) << power for power in range(high.bit_length(), -1, -1))
    return next(multiple for multiple in multiples if multiple <= high)
