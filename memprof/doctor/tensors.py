"""The tensor of a failed allocation: its bytes, factorized over the dimensions of a model.

Every candidate has a weight in bits: how unlikely it is that a random size would fit as well. A range of w integers
has a multiple of 2^k by chance with probability w / 2^k. So 131,072 tokens of 151,936 logits are strong evidence, and
130,989 tokens are almost none. Evidence of the traceback is added.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from memprof.doctor.diagnosis import Candidate, Figures
from memprof.doctor.dimensions import Dimensions, catalog_dimensions
from memprof.units import MIB

_SEGMENT = 2 * MIB
_SMALL_SEGMENT, _LARGE_SEGMENT = 2 * MIB, 20 * MIB
_BLOCK = 512
MIN_BITS = 7.0  # Without a model's name a fit below this is as likely chance: some hundred sizes are tried.
_KNOWN_BITS = 30.0  # Every size was given, and the bytes agree.
_HINT_BITS = 6.0
_HALF, _FULL = 2, 4
_COMMON_HEADS = (8, 12, 16, 20, 24, 25, 32, 40, 48, 64)
_SHARDS = (1, 2, 4, 8)
_DELTA = "one weight delta for each token"
_MOST_ODD = 3  # Times a power of two, up to which a size is round: so many widths divide it that it tells none.
_MANY_TOKENS = 1 << 17  # Of a batch; beyond it each doubling is a quarter as likely.


def requested(figures: Figures) -> tuple[int, int] | None:
    """Return the smallest and the largest request, in bytes, that print as `tried`; None if the range is too wide.

    The message prints the segment, which is a multiple of 2 MiB for requests of 10 MiB and more
    (`get_allocation_size` of c10/cuda/CUDACachingAllocator.cpp), rounded to two decimals.
    """
    tried = figures.tried
    if tried is None:
        return None
    if figures.tried_is_segment:
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
    """The facts of a search for the tensor."""

    low: int  # the smallest request that it may be, bytes.
    high: int
    model: Dimensions | None = None
    half: str = "bfloat16"  # name of the half dtype in use.
    batch: int | None = None  # sequences, None if not known.
    length: int | None = None  # tokens of each, None if not known.
    hinted: tuple[int, ...] = ()  # lengths and batches that the log names, which may be those of this run.
    roles: frozenset[str] = frozenset()  # what the traceback speaks of.
    wide: bool = False  # whether the traceback speaks of float32.
    held: int | None = None  # bytes of tensors that were on the GPU already, None if not known.

    @property
    def dtypes(self) -> tuple[tuple[str, int, float], ...]:
        """Return the possible dtypes: name, bytes of an element, and bits of evidence."""
        return ((self.half, _HALF, 0.0), ("float32", _FULL, 1.5 if self.wide else 0.0))

    def speaks_of(self, *kinds: str) -> tuple[float, str]:
        """Return bits of evidence for a tensor with one of these roles from the traceback, and their explanation."""
        return (_HINT_BITS, "; the traceback speaks of it") if self.roles.intersection(kinds) else (0.0, "")


# Words of the code in which tensors of a role are made.
_ROLES = {
    "logits": "lm_head cross_entropy log_softmax logits loss_function logprob nll_loss log_prob",
    "attention": "attn attention softmax scores baddbmm matmul(q sdpa einsum",
    "feed-forward": "mlp act_fn gate_proj up_proj down_proj gelu silu feed_forward ffn",
    "weights": "convert( _apply load_ from_pretrained create_weights Parameter( .cuda() param.to",
    "optimizer": "exp_avg optimizer adam _init_group flatten_dense fp32_partition single_partition "
    "initialize_optimizer_states flat_param",
    "cache": "key_cache past_key cache_utils kv_cache DynamicCache",
}


def roles_in(frames: Sequence[str]) -> frozenset[str]:
    """Return the roles of tensors that a traceback's innermost frames mention."""
    text = "\n".join(frames)
    return frozenset(role for role, words in _ROLES.items() if any(word in text for word in words.split()))


def candidates(question: TensorQuery, most: int = 5) -> list[Candidate]:
    """Return the tensors that the failed allocation may be, likeliest first."""
    weighed: dict[tuple[str, tuple[int, ...], str], tuple[float, Candidate]] = {}
    enough = MIN_BITS if question.model is None else 1.0
    for bits, candidate in _iter_candidates(question):
        key = (candidate.role, candidate.shape, candidate.dtype)
        if bits >= enough and (key not in weighed or weighed[key][0] < bits):
            weighed[key] = (bits, candidate)
    ranked = sorted(weighed.values(), key=lambda item: -item[0])
    # What is far less likely than the first is no candidate.
    return [candidate for bits, candidate in ranked[:most] if bits > ranked[0][0] - 10]


def _iter_candidates(question: TensorQuery) -> Iterator[tuple[float, Candidate]]:
    model = question.model
    if model is None:
        # A round size is as many logits, scores or weights: of these the traceback must speak.
        said = question.roles if _is_round(question) else {"logits", "feed-forward", "attention"}
        for known in catalog_dimensions():
            if "logits" in said:
                yield from _row_candidates(question, known.vocabulary, "logits", -1.0, "logits", known)
            if "feed-forward" in said:
                yield from _row_candidates(question, known.hidden * known.intermediate, _DELTA, -4.0, "delta", known)
        for heads in _COMMON_HEADS if "attention" in said else ():
            yield from _score_candidates(question, heads, -4.0)
        return
    for shards in _SHARDS:
        if model.vocabulary and model.vocabulary % shards == 0:
            split = "" if shards == 1 else f", of one of {shards} ranks"
            prior = 2.0 - 4 * math.log2(shards)
            yield from _row_candidates(question, model.vocabulary // shards, f"logits{split}", prior, "logits")
    yield from _row_candidates(question, model.hidden, "hidden states", -2.0, "hidden")
    yield from _row_candidates(question, model.intermediate, "feed-forward activations", 0.0, "feed-forward")
    yield from _row_candidates(
        question, 2 * model.intermediate, "feed-forward activations, gate and up", -1.0, "feed-forward"
    )
    if model.heads:
        yield from _score_candidates(question, model.heads, 1.0)
        yield from _row_candidates(question, model.heads * model.head_dim, "queries", -2.5, "attention")
        fused = (model.heads + 2 * model.kv_heads) * model.head_dim
        yield from _row_candidates(question, fused, "queries, keys and values", -2.0, "attention")
        yield from _row_candidates(question, model.kv_heads * model.head_dim, "keys or values", -2.5, "cache")
        yield from _score_candidates(question, 1, -3.0, role="attention mask")
    yield from _row_candidates(question, model.hidden * model.intermediate, _DELTA, -3.0, "delta")
    yield from _weight_candidates(question, model)


def _is_round(question: TensorQuery) -> bool:
    """Return whether the request may be a power of two bytes, or three times a power of two."""
    number = _find_most_even(question.low, question.high)
    return number >> ((number & -number).bit_length() - 1) <= _MOST_ODD


def _row_candidates(
    question: TensorQuery, width: int, role: str, prior: float, kind: str, of: Dimensions | None = None
) -> Iterator[tuple[float, Candidate]]:
    """Yield tensors of one row of `width` values per token; `of` names a model if the user's is not known."""
    if not width:
        return
    hint, said = question.speaks_of(kind)
    model = of or question.model
    name = "" if model is None else model.model
    what = "the vocabulary" if kind == "logits" else "hidden x feed-forward width"
    extra = f"{said}; {width:,} is {what} of {name} and others" if of else said
    for dtype, item, bias in question.dtypes:
        unit = width * item
        for tokens, bits, exact, why in _token_counts(question, unit):
            # Then the GPU has weights of 4 bits at least, and the rows' hidden states.
            least_held = 0 if of is None else of.num_parameters // 2 + tokens * of.hidden * _HALF
            if question.held is not None and least_held > question.held:
                continue
            shape = (*_split_tokens(question, tokens), width)
            bits -= 2 * max(0.0, math.log2(tokens / _MANY_TOKENS))
            candidate = Candidate(shape, dtype, role, tokens * unit, name, why + extra, exact)
            yield bits + prior + hint + bias, candidate


def _token_counts(question: TensorQuery, unit: int) -> Iterator[tuple[int, float, bool, str]]:
    """Yield possible numbers of tokens of `unit` bytes: number, bits, whether all sizes were known, and explanation."""
    low, high = -(-question.low // unit), question.high // unit
    width = (question.high - question.low + 1) / unit
    batch, length = question.batch, question.length
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
            yield (
                first * length,
                _bits_of_roundness(first, width / length) + 4,
                False,
                f"{first} sequences of {length:,}",
            )
    if low > high or high < 1:
        return
    step = batch or 1
    tokens = _find_most_even(max(1, -(-low // step)), high // step) * step
    if tokens and low <= tokens <= high:
        yield tokens, _bits_of_roundness(tokens // step, width / step), False, f"{tokens:,} tokens fit the size"
    for hinted in question.hinted:
        if hinted > 64 and (multiple := -(-low // hinted) * hinted) <= high:
            bits = _bits_of_roundness(multiple // hinted, width / hinted) + 2
            yield multiple, bits, False, f"a multiple of {hinted:,}, which the log names"


def _split_tokens(question: TensorQuery, tokens: int) -> tuple[int, int]:
    """Return batch size and length for `tokens` tokens: as given, else the fewest sequences that fit the positions."""
    if question.batch and tokens % question.batch == 0:
        return question.batch, tokens // question.batch
    if question.length and tokens % question.length == 0:
        return tokens // question.length, question.length
    for hinted in sorted(question.hinted, reverse=True):
        if hinted > 64 and tokens % hinted == 0:
            return tokens // hinted, hinted
    limit = question.model.max_positions if question.model else None
    batch = 1
    while limit and tokens // batch > limit and tokens % (2 * batch) == 0:
        batch *= 2
    return (batch, tokens // batch) if not limit or tokens // batch <= limit else (1, tokens)


def _score_candidates(
    question: TensorQuery, heads: int, prior: float, role: str = "attention scores"
) -> Iterator[tuple[float, Candidate]]:
    """Yield tensors of one value per head and pair of positions."""
    hint, said = question.speaks_of("attention")
    name = question.model.model if question.model else ""
    for dtype, item, bias in question.dtypes:
        for batch in (question.batch,) if question.batch else (1, 2, 4, 8, 16, 32):
            unit = batch * heads * item
            low, high = math.sqrt(question.low / unit), math.sqrt(question.high / unit)
            if question.length:
                if not low <= question.length <= high:
                    continue
                length, known = question.length, question.batch is not None
                bits, why = (_KNOWN_BITS if known else 12.0 - math.log2(batch)), "the length given"
            else:
                length = _find_most_even(math.ceil(low), math.floor(high))
                if not length:
                    continue
                bits, known = _bits_of_roundness(length, high - low) - math.log2(batch), False
                why = f"the square of {length:,} positions"
            shape = (batch, heads, length, length)
            candidate = Candidate(shape, dtype, role, math.prod(shape) * item, name, why + said, known)
            yield bits + prior + hint + bias, candidate


def _weight_candidates(question: TensorQuery, model: Dimensions) -> Iterator[tuple[float, Candidate]]:
    """Yield parameters, gradients, optimizer states, and flat buffers of all parameters."""
    shapes: list[tuple[tuple[int, ...], str, float, str]] = [
        ((model.vocabulary, model.hidden), "embedding or head, its gradient or state", 0.0, "weights"),
        ((model.intermediate, model.hidden), "a feed-forward weight", 0.0, "weights"),
        ((2 * model.intermediate, model.hidden), "feed-forward weights, gate and up", -1.0, "weights"),
        ((model.heads * model.head_dim, model.hidden), "an attention weight", -1.0, "weights"),
        ((model.num_parameters,), "all parameters in one buffer", 0.0, "optimizer"),
    ]
    if model.experts:
        shapes += [
            ((model.experts, 2 * model.expert, model.hidden), "the experts' gate and up weights", 0.0, "weights"),
            ((model.experts, model.hidden, model.expert), "the experts' down weights", 0.0, "weights"),
        ]
    relative = (question.high - question.low + 1) / question.high
    for shape, role, prior, kind in shapes:
        hint, said = question.speaks_of(kind, "weights", "optimizer")
        for dtype, item, bias in question.dtypes:
            size = math.prod(shape) * item
            if size and question.low <= size <= question.high:
                candidate = Candidate(shape, dtype, role, size, model.model, f"its size exactly{said}", True)
                yield -math.log2(relative) + prior + hint + bias, candidate


def _bits_of_roundness(number: int, width: float) -> float:
    """Return, in bits, how unlikely a number as round as `number` is within `width` integers."""
    zeros = (number & -number).bit_length() - 1
    return zeros - math.log2(max(width, 2**-12))


def _find_most_even(low: int, high: int) -> int:
    """Return the number from `low` to `high` that is divisible by the highest power of two; 0 for an empty range."""
    if low > high:
        return 0
    multiples = (-(-low >> power) << power for power in range(high.bit_length(), -1, -1))
    return next(multiple for multiple in multiples if multiple <= high)
