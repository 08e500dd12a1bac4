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

_SEGMENT_BYTES = 2 * MIB
_SMALL_SEGMENT_BYTES, _LARGE_SEGMENT_BYTES = 2 * MIB, 20 * MIB
_BLOCK_BYTES = 512
MIN_EVIDENCE_BITS = 7.0  # Minimum weight without a known model, as hundreds of sizes are tried.
_EXACT_MATCH_BITS = 30.0  # Weight if all sizes were given, and the bytes match.
_TRACEBACK_BITS = 6.0
_HALF_BYTES, _FLOAT_BYTES = 2, 4
_COMMON_HEAD_COUNTS = (8, 12, 16, 20, 24, 25, 32, 40, 48, 64)
_SHARD_COUNTS = (1, 2, 4, 8)
_DELTA_ROLE = "one weight delta for each token"
_MAX_ODD_FACTOR = 3  # Round sizes are powers of two times up to this, which too many widths divide.
_MAX_ODD_VOCABULARY_FACTOR = 5  # The same of vocabularies: 163,840 words divide many sizes too.
_COMMON_MAX_TOKENS = 1 << 17  # Tokens of a batch beyond which each doubling costs two bits.
_COMMON_MAX_DELTAS = 1 << 13  # The same where each token has a matrix of its own.


def find_request_range(sizes: MessageSizes) -> tuple[int, int] | None:
    """Return the smallest and largest request in bytes for which torch prints `sizes.tried`; None: too wide a range.

    torch prints the size of the segment, rounded to two decimals; segments are multiples of 2 MiB for requests of at
    least 10 MiB (`get_allocation_size` of c10/cuda/CUDACachingAllocator.cpp).
    """
    tried = sizes.tried
    if tried is None:
        return None
    if sizes.tried_is_segment:
        low, high = -(-tried.low // _SEGMENT_BYTES) * _SEGMENT_BYTES, tried.high // _SEGMENT_BYTES * _SEGMENT_BYTES
        if low <= high:
            if high <= _SMALL_SEGMENT_BYTES or low == high == _LARGE_SEGMENT_BYTES:
                return None
            return low - _SEGMENT_BYTES + 1, high
    if tried.high < MIB:
        return None
    return max(1, tried.low - _BLOCK_BYTES), tried.high


@dataclass(frozen=True, slots=True)
class TensorQuery:
    """The known properties of a failed allocation: range of bytes, model, batch, and roles in the traceback."""

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
        """Return the possible dtypes of the tensor: name, bytes of an element, and evidence in bits."""
        return ((self.half_dtype, _HALF_BYTES, 0.0), ("float32", _FLOAT_BYTES, 1.5 if self.mentions_float32 else 0.0))

    def weigh_roles(self, *role_kinds: str) -> tuple[float, str]:
        """Return the traceback's evidence for a tensor of one of `role_kinds`: bits (0 if none), and a phrase on it."""
        return (_TRACEBACK_BITS, "; the traceback speaks of it") if self.mentions(*role_kinds) else (0.0, "")

    def mentions(self, *role_kinds: str) -> bool:
        """Return whether the traceback mentions one of `role_kinds`."""
        return bool(self.roles.intersection(role_kinds))


# Role -> words in the code that makes tensors of the role.
_WORDS_BY_ROLE = {
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
    return frozenset(role for role, words in _WORDS_BY_ROLE.items() if any(word in text for word in words.split()))


def find_candidates(query: TensorQuery, max_candidates: int = 5) -> list[Candidate]:
    """Return at most `max_candidates` tensors that the failed allocation may be for, likeliest first."""
    best_by_key: dict[tuple[str, tuple[int, ...], str], tuple[float, Candidate]] = {}
    min_bits = MIN_EVIDENCE_BITS if query.model is None else 1.0
    for bits, candidate in _iter_candidates(query):
        key = (candidate.role, candidate.shape, candidate.dtype)
        if bits >= min_bits and (key not in best_by_key or best_by_key[key][0] < bits):
            best_by_key[key] = (bits, candidate)
    best_first = sorted(best_by_key.values(), key=lambda item: -item[0])
    # Candidates far less likely than the first are left out.
    return [candidate for bits, candidate in best_first[:max_candidates] if bits > best_first[0][0] - 10]


def _iter_candidates(query: TensorQuery) -> Iterator[tuple[float, Candidate]]:
    model = query.model
    if model is None:
        # A round size matches tensors of many models: it says nothing of a vocabulary, and scores need the traceback.
        is_round = _is_round_size(query)
        likely_roles = query.roles.intersection(("attention",)) if is_round else {"logits", "feed-forward", "attention"}
        for entry in list_catalog_dimensions():
            if "logits" in likely_roles and not _is_round(entry.vocabulary, _MAX_ODD_VOCABULARY_FACTOR):
                yield from _iter_row_tensors(query, entry.vocabulary, "logits", -1.0, "logits", entry)
            if "feed-forward" in likely_roles:
                width = entry.hidden * entry.intermediate
                yield from _iter_row_tensors(query, width, _DELTA_ROLE, -4.0, "delta", entry)
        for heads in _COMMON_HEAD_COUNTS if "attention" in likely_roles else ():
            yield from _iter_score_tensors(query, heads, -4.0)
        return
    for shards in _SHARD_COUNTS:
        if model.vocabulary % shards == 0:
            suffix = "" if shards == 1 else f", of one of {shards} ranks"
            prior = 2.0 - 4 * math.log2(shards)
            yield from _iter_row_tensors(query, model.vocabulary // shards, f"logits{suffix}", prior, "logits")
    yield from _iter_row_tensors(query, model.hidden, "hidden states", -2.0, "hidden")
    yield from _iter_row_tensors(query, model.intermediate, "feed-forward activations", 0.0, "feed-forward")
    yield from _iter_row_tensors(
        query, 2 * model.intermediate, "feed-forward activations, gate and up", -1.0, "feed-forward"
    )
    if model.heads:
        yield from _iter_score_tensors(query, model.heads, 1.0)
        yield from _iter_row_tensors(query, model.heads * model.head_dim, "queries", -2.5, "attention")
        qkv_width = (model.heads + 2 * model.kv_heads) * model.head_dim
        yield from _iter_row_tensors(query, qkv_width, "queries, keys and values", -2.0, "attention")
        yield from _iter_row_tensors(query, model.kv_heads * model.head_dim, "keys or values", -2.5, "cache")
        yield from _iter_score_tensors(query, 1, -3.0, role="attention mask")
    yield from _iter_row_tensors(query, model.hidden * model.intermediate, _DELTA_ROLE, -3.0, "delta")
    yield from _iter_weight_tensors(query, model)


def _is_round_size(query: TensorQuery) -> bool:
    """Return whether the range of bytes contains a power of two, or three times a power of two."""
    return _is_round(_find_roundest_number(query.low, query.high))


def _is_round(number: int, max_odd_factor: int = _MAX_ODD_FACTOR) -> bool:
    """Return whether `number` is a power of two times an odd number up to `max_odd_factor`."""
    return number > 0 and number >> ((number & -number).bit_length() - 1) <= max_odd_factor


def _iter_row_tensors(
    query: TensorQuery, width: int, role: str, prior: float, role_kind: str, guess: Dimensions | None = None
) -> Iterator[tuple[float, Candidate]]:
    """Yield tensors with `width` values per token, with bits of evidence; `guess` replaces an unknown model."""
    if not width:
        return
    hint_bits, hint_text = query.weigh_roles(role_kind)
    model = guess or query.model
    name = "" if model is None else model.model
    width_name = "the vocabulary" if role_kind == "logits" else "hidden x feed-forward width"
    explanation = hint_text
    max_tokens = _COMMON_MAX_DELTAS if role_kind == "delta" else _COMMON_MAX_TOKENS
    if guess:
        explanation += f"; the model is a guess: {width:,} is {width_name} of {name} and others"
    for dtype, itemsize, dtype_bits in query.dtypes:
        row_bytes = width * itemsize
        for tokens, bits, is_exact, reason in _iter_token_counts(query, row_bytes):
            # The GPU would hold at least the weights in 4 bits, and the hidden states.
            min_bytes = 0 if guess is None else guess.num_parameters // 2 + tokens * guess.hidden * _HALF_BYTES
            if query.allocated_bytes is not None and min_bytes > query.allocated_bytes:
                continue
            shape = (*_split_tokens(query, tokens), width)
            bits -= 2 * max(0.0, math.log2(tokens / max_tokens))
            candidate = Candidate(
                shape, dtype, role, tokens * row_bytes, name, reason + explanation, is_exact,
                is_guess=guess is not None, in_traceback=query.mentions(role_kind),
            )  # fmt: skip
            yield bits + prior + hint_bits + dtype_bits, candidate


def _iter_token_counts(query: TensorQuery, token_bytes: int) -> Iterator[tuple[int, float, bool, str]]:
    """Yield possible numbers of tokens, each of `token_bytes`, with bits of evidence, exactness and explanation."""
    low, high = -(-query.low // token_bytes), query.high // token_bytes
    span = (query.high - query.low + 1) / token_bytes
    batch, length = query.batch, query.length
    if batch and length:
        for tokens, reason in (
            (batch * length, "the batch and length given"),
            (batch * (length - 1), "the batch and length given, the last position left out"),
        ):
            if low <= tokens <= high:
                yield tokens, _EXACT_MATCH_BITS, True, reason
    elif length:
        num_sequences = -(-low // length)
        if num_sequences * length <= high:
            bits = _measure_roundness(num_sequences, span / length) + 4
            yield num_sequences * length, bits, False, f"{num_sequences} sequences of {length:,}"
    if low > high or high < 1:
        return
    step = batch or 1
    tokens = _find_roundest_number(max(1, -(-low // step)), high // step) * step
    if tokens and low <= tokens <= high:
        yield tokens, _measure_roundness(tokens // step, span / step), False, f"{tokens:,} tokens fit the size"
    for logged_number in query.logged_numbers:
        if logged_number > 64 and (multiple := -(-low // logged_number) * logged_number) <= high:
            bits = _measure_roundness(multiple // logged_number, span / logged_number) + 2
            yield multiple, bits, False, f"a multiple of {logged_number:,}, which the log names"


def _split_tokens(query: TensorQuery, tokens: int) -> tuple[int, int]:
    """Return batch size and length for `tokens`: by the query or log, else the smallest batch that the model allows."""
    if query.batch and tokens % query.batch == 0:
        return query.batch, tokens // query.batch
    if query.length and tokens % query.length == 0:
        return tokens // query.length, query.length
    for logged_number in sorted(query.logged_numbers, reverse=True):
        if logged_number > 64 and tokens % logged_number == 0:
            return tokens // logged_number, logged_number
    max_length = query.model.max_positions if query.model else None
    batch = 1
    while max_length and tokens // batch > max_length and tokens % (2 * batch) == 0:
        batch *= 2
    return (batch, tokens // batch) if not max_length or tokens // batch <= max_length else (1, tokens)


def _iter_score_tensors(
    query: TensorQuery, heads: int, prior: float, role: str = "attention scores"
) -> Iterator[tuple[float, Candidate]]:
    """Yield tensors [batch, heads, length, length], such as attention scores, with bits of evidence."""
    hint_bits, hint_text = query.weigh_roles("attention")
    name = query.model.model if query.model else ""
    for dtype, itemsize, dtype_bits in query.dtypes:
        for batch in (query.batch,) if query.batch else (1, 2, 4, 8, 16, 32):
            pair_bytes = batch * heads * itemsize
            min_length, max_length = math.sqrt(query.low / pair_bytes), math.sqrt(query.high / pair_bytes)
            if query.length:
                if not min_length <= query.length <= max_length:
                    continue
                length, is_exact = query.length, query.batch is not None
                bits, reason = (_EXACT_MATCH_BITS if is_exact else 12.0 - math.log2(batch)), "the length given"
            else:
                length = _find_roundest_number(math.ceil(min_length), math.floor(max_length))
                if not length:
                    continue
                bits, is_exact = _measure_roundness(length, max_length - min_length) - math.log2(batch), False
                reason = f"the square of {length:,} positions"
            shape = (batch, heads, length, length)
            candidate = Candidate(
                shape, dtype, role, math.prod(shape) * itemsize, name, reason + hint_text, is_exact,
                is_guess=query.model is None, in_traceback=query.mentions("attention"),
            )  # fmt: skip
            yield bits + prior + hint_bits + dtype_bits, candidate


def _iter_weight_tensors(query: TensorQuery, model: Dimensions) -> Iterator[tuple[float, Candidate]]:
    """Yield parameters, gradients, optimizer states and flat buffers in the range of bytes, with bits of evidence."""
    shapes: list[tuple[tuple[int, ...], str, float]] = [
        ((model.vocabulary, model.hidden), "embedding or head, its gradient or state", 0.0),
        ((model.intermediate, model.hidden), "a feed-forward weight", 0.0),
        ((2 * model.intermediate, model.hidden), "feed-forward weights, gate and up", -1.0),
        ((model.heads * model.head_dim, model.hidden), "an attention weight", -1.0),
        ((model.num_parameters,), "all parameters in one buffer", 0.0),
    ]
    if num_experts := model.num_experts:
        width = model.expert_width
        shapes += [
            ((num_experts, 2 * width, model.hidden), "the experts' gate and up weights", 0.0),
            ((num_experts, model.hidden, width), "the experts' down weights", 0.0),
        ]
    relative_span = (query.high - query.low + 1) / query.high
    hint_bits, hint_text = query.weigh_roles("weights", "optimizer")
    in_traceback = query.mentions("weights", "optimizer")
    for shape, role, prior in shapes:
        for dtype, itemsize, dtype_bits in query.dtypes:
            num_bytes = math.prod(shape) * itemsize
            if num_bytes and query.low <= num_bytes <= query.high:
                why = f"its size exactly{hint_text}"
                candidate = Candidate(
                    shape, dtype, role, num_bytes, model.model, why, exact=True, in_traceback=in_traceback
                )
                yield -math.log2(relative_span) + prior + hint_bits + dtype_bits, candidate


def _measure_roundness(number: int, span: float) -> float:
    """Return how unlikely it is, in bits, that `span` integers include one with as many trailing zeros as `number`."""
    num_zeros = (number & -number).bit_length() - 1
    return num_zeros - math.log2(max(span, 2**-12))


def _find_roundest_number(low: int, high: int) -> int:
    """Return the integer from `low` to `high` that is divisible by the highest power of two; 0 for an empty range."""
    if low > high:
        return 0
    multiples = (-(-low >> power) << power for power in range(high.bit_length(), -1, -1))
    return next(multiple for multiple in multiples if multiple <= high)
