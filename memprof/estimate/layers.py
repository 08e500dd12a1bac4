"""A decoder layer of transformers, operator by operator; `DecoderLayer.record` records one on a tape.

Sources: transformers/models/*/modeling_*.py, and for tensors that attention saves, PyTorch's
aten/src/ATen/native/transformers/cuda/.
"""

from __future__ import annotations

from memprof.estimate.projections import LayerSettings, Projections
from memprof.estimate.tape import FLOAT32, Tape, Tensor

# Maximum head size of the flash attention kernels (sdp_utils.cpp, check_flash_attention_hardware_support).
FLASH_MAX_HEAD = 256


class DecoderLayer(Projections):
    """A decoder layer whose operators are recorded on a tape."""

    def record_norm(self, x: Tensor, name: str, width: int | None = None, rows: int = 1) -> Tensor:
        """Record a norm over `width` elements, `rows` times per token; return the output."""
        if self.g.norm == "layer":
            return self._layer_norm(x, name)
        tape, width = self.tape, x.width if width is None else width
        wide = tape.cast(x, FLOAT32, f"{x.name}, float32 for the norm")
        squares = tape.record([wide], x.width, FLOAT32, saves=[wide])
        root = tape.record([squares], rows, FLOAT32, saves_output=True, name="norm statistics", drops=[squares])
        before = f"{name} before its weight"
        normed = tape.record([wide, root], x.width, FLOAT32, saves=[wide, root], name=f"{before}, float32")
        tape.drop(wide, root)
        grad = width * self.setting.itemsize if self.trains else 0
        itemsize, is_cast_first = FLOAT32, self.g.norm == "rms"
        if is_cast_first:
            normed = tape.cast(normed, x.itemsize, before, drops=[normed])
            itemsize = max(normed.itemsize, self.setting.stream_itemsize)
        weighted = tape.record(
            [normed], x.width, itemsize, saves=[normed] if self.trains else (), trains=self.trains, param_grad=grad,
            temporary=tape.tokens * x.width * itemsize if self.trains else 0, name=name, drops=[normed],
        )  # fmt: skip
        return weighted if is_cast_first else tape.cast(weighted, x.itemsize, name, drops=[weighted])

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        tape = self.tape
        itemsize = FLOAT32 if self.setting.amp else x.itemsize
        wide = tape.cast(x, itemsize, f"{x.name}, float32 for the norm")
        grad = 2 * x.width * self.setting.itemsize if self.trains else 0
        return tape.record(
            [wide], x.width, itemsize, saves=[wide], extra=2 * FLOAT32 * tape.tokens,
            trains=self.trains, param_grad=grad, name=name, drops=[wide],
        )  # fmt: skip

    def record_rotary(self, x: Tensor, name: str) -> Tensor:
        """Record rotary positions on `rotary_fraction` of each head, and drop `x`; return the output."""
        tape = self.tape
        if not self.g.rotary_fraction:
            return x
        share = self.g.rotary_fraction
        width = int(x.width * share)
        itemsize = max(x.itemsize, self.setting.stream_itemsize)
        cosine = tape.record([x], width, itemsize)
        turned = tape.record([x], width, x.itemsize)
        tape.add_temporary(tape.tokens * width * x.itemsize // 2)
        sine = tape.record([turned], width, itemsize, drops=[turned])
        result = tape.add(cosine, sine, name, drops=[cosine, sine])
        if share < 1:
            result = tape.record([result, x], x.width, itemsize, name=name, drops=[result])
        tape.drop(x)
        return result

    def record_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Record scaled_dot_product_attention, and drop `q`, `k` and `v`; return the output."""
        tape, g, setting = self.tape, self.g, self.setting
        if setting.cache:
            k, v = self._add_to_cache(k), self._add_to_cache(v)
        itemsize = setting.compute_itemsize
        cast = [tape.cast(t, itemsize, f"{t.name}, cast") for t in (q, k, v)]
        tape.drop(q, k, v)
        q, k, v = cast
        groups = g.heads != g.kv_heads
        masked = setting.has_mask
        if groups and masked and g.kv_heads > 1:
            # With a mask transformers repeats keys and values itself (integrations/sdpa_attention.py), but one head.
            wide = [tape.record([t], g.attention_width, itemsize, name=f"{t.name}, repeated") for t in (k, v)]
            tape.drop(k, v)
            k, v = wide
        if setting.ulysses_ranks > 1:
            q, k, v = self._exchange_heads(q, k, v)
        if g.family == "gemma2":
            result = self._record_eager(q, k, v)
        elif itemsize == FLOAT32 and groups and not masked:
            result = self._record_math(q, k, v)
        else:
            result = self._record_kernel(q, k, v, flash=itemsize == 2 and not masked and g.head_dim <= FLASH_MAX_HEAD)
        tape.drop(q, k, v)
        return result

    def _exchange_heads(self, *parts: Tensor) -> list[Tensor]:
        """Record Ulysses' exchange of all heads of some tokens for some heads of all tokens (workload/ulysses.py)."""
        tape, g, ranks = self.tape, self.g, self.setting.ulysses_ranks
        repeats = -(-ranks // g.kv_heads)  # of keys and values, where there are fewer heads than ranks
        if g.kv_heads * repeats % ranks:
            repeats = g.heads // g.kv_heads
        found = []
        for part in parts:
            width = part.width if part.width == g.attention_width else repeats * g.kv_width
            wide = part if width == part.width else tape.record([part], width, part.itemsize, drops=[part])
            sent = tape.record([wide], width, part.itemsize, drops=[wide])
            found.append(tape.record([sent], width, part.itemsize, name=f"{part.name}, of all tokens", drops=[sent]))
        return found

    def _record_kernel(self, q: Tensor, k: Tensor, v: Tensor, *, flash: bool) -> Tensor:
        """Record flash or memory-efficient attention: both save their inputs, the output, and a row sum per head."""
        tape, g = self.tape, self.g
        batch, length = self.setting.batch_size, self.setting.context_length
        rounded = -(-length // 128) * 128
        sums = FLOAT32 * batch * g.heads * length
        if flash:
            head = -(-g.head_dim // 32) * 32 if g.head_dim <= 128 else -(-g.head_dim // 64) * 64
            temporary = FLOAT32 * batch * g.heads * rounded * (1 + head)
            if g.heads != g.kv_heads:
                temporary += 2 * 2 * tape.tokens * g.attention_width
        else:
            temporary = sums
            if self.setting.has_mask:
                # The mask in the query's dtype, which each layer makes and saves (native/transformers/attention.cpp);
                # rows are aligned to 16 elements.
                sums += q.itemsize * batch * length * -(-length // 16) * 16
        return tape.record(
            [q, k, v], q.width, q.itemsize, saves=[q, k, v], saves_output=True, extra=sums, temporary=temporary,
            name="attention output",
        )  # fmt: skip

    def _record_math(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Record attention in float32 with shared key heads, where no fused kernel applies (sdp_utils.cpp).

        The inputs are scaled by the square root of the scale and the heads repeated (native/transformers/attention.cpp,
        _scaled_dot_product_attention_math).
        """
        tape, g = self.tape, self.g
        scores_width = g.heads * self.setting.context_length
        wide = [tape.record([t], g.attention_width, FLOAT32, name=f"{t.name}, repeated") for t in (k, v)]
        scaled_q = tape.record([q], q.width, FLOAT32, name="query, scaled")
        scaled_k = tape.record([wide[0]], g.attention_width, FLOAT32, name="key, scaled")
        scores = tape.record([scaled_q, scaled_k], scores_width, FLOAT32, saves=[scaled_q, scaled_k])
        tape.drop(scaled_q, scaled_k)
        shares = tape.record(
            [scores], scores_width, FLOAT32, saves_output=True, name="attention scores", drops=[scores]
        )
        return tape.record(
            [shares, wide[1]], q.width, FLOAT32, saves=[shares, wide[1]], name="attention output", drops=[shares, *wide]
        )

    def _record_eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Record Gemma 2's eager attention, whose scores are capped by tanh (modeling_gemma2.py)."""
        tape, g = self.tape, self.g
        itemsize, scores_width = q.itemsize, g.heads * self.setting.context_length
        wide = [tape.record([t], g.attention_width, itemsize, name=f"{t.name}, repeated") for t in (k, v)]
        scores = tape.record([q, wide[0]], scores_width, itemsize, saves=[q, wide[0]])
        for saves_output in (False, False, True, False):  # times scale, over the cap, tanh, times the cap
            name = "attention scores, capped"
            scores = tape.record([scores], scores_width, itemsize, saves_output=saves_output, name=name, drops=[scores])
        if self.setting.context_length > 1:  # the mask of what comes later
            scores = tape.record([scores], scores_width, itemsize, drops=[scores])
        shares = tape.record([scores], scores_width, FLOAT32, saves_output=True, name="attention scores, float32")
        tape.drop(scores)
        half = tape.cast(shares, itemsize, "attention scores after softmax", drops=[shares])
        return tape.record(
            [half, wide[1]], q.width, itemsize, saves=[half, wide[1]], name="attention output", drops=[half, *wide]
        )

    def _add_to_cache(self, tensor: Tensor) -> Tensor:
        """Return a copy of a tensor in the KV cache, which the tape does not count (cache_utils.py, DynamicLayer)."""
        self.tape.drop(tensor)
        return self.tape.add_input(tensor.width, tensor.itemsize, needs_grad=False, name=tensor.name)

    def record_self_attention(self, x: Tensor) -> Tensor:
        """Record self-attention with its projections, without dropping `x`; return the output."""
        tape, g = self.tape, self.g
        if g.has_fused_qkv:
            fused = self.record_linear(x, "qkv", "query, key, value")
            # Views, each of which keeps the base alive.
            widths = {"query": g.attention_width, "key": g.kv_width, "value": g.kv_width}
            q, k, v = (tape.view(fused, width, name) for name, width in widths.items())
            tape.drop(fused)
        else:
            q = self.record_linear(x, "q", "query")
            if g.family == "opt":  # the scale is applied by hand
                q = tape.record([q], q.width, q.itemsize, name="query", drops=[q])
            k = self.record_linear(x, "k", "key")
            v = self.record_linear(x, "v", "value")
            if g.qk_norm:
                q, k = self._normalize_heads(q, "query", g.heads), self._normalize_heads(k, "key", g.kv_heads)
        q, k = self.record_rotary(q, "query"), self.record_rotary(k, "key")
        result = self.record_attention(q, k, v)
        if self._has_strided_heads():
            name = "attention output, heads side by side"
            result = tape.record([result], result.width, result.itemsize, name=name, drops=[result])
        projected = self.record_linear(result, "o", "attention projection")
        tape.drop(result)
        return projected

    def _has_strided_heads(self) -> bool:
        """Return whether attention's output must be copied because a token's heads are not contiguous.

        A kernel's output has the strides of its query; with partial rotary positions, aten.cat joins it head by head.
        """
        setting, g = self.setting, self.g
        if setting.ulysses_ranks > 1:
            return True
        math = setting.compute_itemsize == FLOAT32 and g.heads != g.kv_heads and not setting.has_mask
        return math or g.family in ("gemma2", "gpt_neox", "phi", "phi3")

    def _normalize_heads(self, x: Tensor, name: str, heads: int) -> Tensor:
        by_head = self.g.qk_norm == "head"
        width = self.g.head_dim if by_head else x.width
        result = self.record_norm(x, f"{name}, normed", width, heads if by_head else 1)
        self.tape.drop(x)
        return result

    def record_mlp(self, x: Tensor) -> Tensor:
        """Record the MLP, without dropping `x`; return the output."""
        tape, g = self.tape, self.g
        if not g.is_gated:
            up = self.record_linear(x, "up", "MLP up")
            product = self.record_activation(up, g.activation)
            tape.drop(up)
        elif g.has_fused_gate_up:
            both = self.record_linear(x, "up", "gate and up")
            # Gate and up are views of halves of `both`.
            gate = tape.record([both], g.intermediate, both.itemsize, saves=[both], name="activated gate")
            product = tape.record([gate, both], g.intermediate, both.itemsize, saves=[gate, both], name="gate times up")
            tape.drop(gate, both)
        else:
            raw = self.record_linear(x, "gate", "gate")
            gate = tape.record([raw], raw.width, raw.itemsize, saves=[raw], name="activated gate", drops=[raw])
            up = self.record_linear(x, "up", "up")
            product = tape.record(
                [gate, up], up.width, up.itemsize, saves=[gate, up], name="gate times up", drops=[gate, up]
            )
        down = self.record_linear(product, "down", "MLP down")
        tape.drop(product)
        return down

    def record_activation(self, x: Tensor, activation: str) -> Tensor:
        """Record an activation; return the output. ReLU saves its output, others their input."""
        tape = self.tape
        if activation == "relu":
            return tape.record([x], x.width, x.itemsize, saves_output=True, name="activated")
        if activation != "gelu-python":
            return tape.record([x], x.width, x.itemsize, saves=[x], name="activated")
        # transformers/activations.py, NewGELUActivation: eight operators.
        # Under autocast pow is computed in float32, and all that follows.
        itemsize = FLOAT32 if self.setting.amp else x.itemsize
        half = tape.record([x], x.width, x.itemsize, name="half of the input of GELU")
        wide = tape.cast(x, itemsize, "input of GELU, float32")
        cube = tape.record([wide], x.width, itemsize, saves=[wide], drops=[wide])
        small = tape.record([cube], x.width, itemsize, drops=[cube])
        inner = tape.add(x, small, drops=[small])
        scaled = tape.record([inner], x.width, itemsize, drops=[inner])
        tanh = tape.record([scaled], x.width, itemsize, saves_output=True, name="tanh of GELU", drops=[scaled])
        one = tape.record([tanh], x.width, itemsize, name="1 + tanh of GELU", drops=[tanh])
        return tape.record([half, one], x.width, itemsize, saves=[half, one], name="activated", drops=[half, one])

    def record_dropout(self, x: Tensor) -> Tensor:
        """Record dropout in training (output, and a mask of a byte per element), and drop `x`; return the output."""
        if not (self.g.has_dropout and self.setting.training):
            return x
        mask = self.tape.tokens * x.width if x.needs_grad else 0
        return self.tape.record([x], x.width, x.itemsize, extra=mask, name="dropout", drops=[x])

    def record(self, hidden: Tensor) -> Tensor:
        """Record the whole layer, without dropping `hidden`; return the output."""
        if self.g.family in ("gpt_neox", "phi"):
            return self._record_parallel(hidden)
        tape, gemma, after = self.tape, self.g.norm == "gemma", self.g.norm == "olmo"
        x = hidden
        for part, name in ((self.record_self_attention, "attention"), (self.record_mlp, "MLP")):
            normed = x if after else self.record_norm(x, f"input of {name}")
            out = self.record_dropout(part(normed))
            if not after:
                tape.drop(normed)
            if gemma or after:
                normed = self.record_norm(out, f"output of {name}, normed")
                tape.drop(out)
                out = normed
            summed = tape.add(x, out, f"residual after {name}", drops=[out])
            if x is not hidden:
                tape.drop(x)
            x = summed
        return x

    def _record_parallel(self, hidden: Tensor) -> Tensor:
        """Record attention and MLP in parallel, with one norm or two; return the output."""
        tape = self.tape
        normed = self.record_norm(hidden, "input of attention")
        attended = self.record_self_attention(normed)
        if self.g.num_norms == 2:
            tape.drop(normed)
        attended = self.record_dropout(attended)
        if self.g.num_norms == 2:
            normed = self.record_norm(hidden, "input of MLP")
        out = self.record_dropout(self.record_mlp(normed))
        tape.drop(normed)
        both = tape.add(out, attended, drops=[out, attended])
        return tape.add(both, hidden, "hidden states", drops=[both])


def record_layer(setting: LayerSettings, *, hidden_needs_grad: bool = True) -> tuple[Tape, int]:
    """Return the tape of one layer, and the bytes saved for the backward, including the layer's input if saved."""
    tape, width = Tape(setting.tokens, setting.training), setting.geometry.hidden
    hidden = tape.add_input(width, setting.stream_itemsize, needs_grad=hidden_needs_grad, name="hidden states")
    output = DecoderLayer(tape, setting).record(hidden)
    tape.drop(output)
    if hidden.num_references > 1:  # it is the output of the layer before
        tape.saved[f"{hidden.name} #0"] = hidden.num_bytes
    return tape, tape.saved_bytes
