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
        """Record a norm over `width` elements (None: all of a token's), `rows` times per token; return the output."""
        if self.g.norm == "layer":
            return self._record_layer_norm(x, name)
        tape, width = self.tape, x.width if width is None else width
        x32 = tape.cast(x, FLOAT32, f"{x.name}, float32 for the norm")
        squares = tape.record([x32], x.width, FLOAT32, saves=[x32])
        stats = tape.record([squares], rows, FLOAT32, saves_output=True, name="norm statistics", drops=[squares])
        prefix = f"{name} before its weight"
        normed = tape.record([x32, stats], x.width, FLOAT32, saves=[x32, stats], name=f"{prefix}, float32")
        tape.drop(x32, stats)
        grad = width * self.setting.itemsize if self.trains else 0
        itemsize, is_cast_first = FLOAT32, self.g.norm == "rms"
        if is_cast_first:
            normed = tape.cast(normed, x.itemsize, prefix, drops=[normed])
            itemsize = max(normed.itemsize, self.setting.stream_itemsize)
        output = tape.record(
            [normed], x.width, itemsize, saves=[normed] if self.trains else (), trains=self.trains, grad_bytes=grad,
            temp_bytes=tape.tokens * x.width * itemsize if self.trains else 0, name=name, drops=[normed],
        )  # fmt: skip
        return output if is_cast_first else tape.cast(output, x.itemsize, name, drops=[output])

    def _record_layer_norm(self, x: Tensor, name: str) -> Tensor:
        tape = self.tape
        itemsize = FLOAT32 if self.setting.amp else x.itemsize
        x_cast = tape.cast(x, itemsize, f"{x.name}, float32 for the norm")
        grad = 2 * x.width * self.setting.itemsize if self.trains else 0
        return tape.record(
            [x_cast], x.width, itemsize, saves=[x_cast], extra_bytes=2 * FLOAT32 * tape.tokens,
            trains=self.trains, grad_bytes=grad, name=name, drops=[x_cast],
        )  # fmt: skip

    def record_rotary(self, x: Tensor, name: str) -> Tensor:
        """Record rotary positions on `rotary_fraction` of each head, and drop `x`; return the output."""
        tape = self.tape
        if not self.g.rotary_fraction:
            return x
        fraction = self.g.rotary_fraction
        width = int(x.width * fraction)
        itemsize = max(x.itemsize, self.setting.stream_itemsize)
        cos_product = tape.record([x], width, itemsize)
        rotated_half = tape.record([x], width, x.itemsize)
        sin_product = tape.record([rotated_half], width, itemsize, drops=[rotated_half])
        output = tape.add(cos_product, sin_product, name, drops=[cos_product, sin_product])
        if fraction < 1:
            output = tape.record([output, x], x.width, itemsize, name=name, drops=[output])
        tape.drop(x)
        return output

    def record_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Record scaled_dot_product_attention, and drop `q`, `k` and `v`; return the output."""
        tape, g, setting = self.tape, self.g, self.setting
        if setting.cache:
            k, v = self._add_to_cache(k), self._add_to_cache(v)
        itemsize = setting.compute_itemsize
        inputs = [tape.cast(t, itemsize, f"{t.name}, cast") for t in (q, k, v)]
        tape.drop(q, k, v)
        q, k, v = inputs
        is_grouped = g.heads != g.kv_heads
        has_mask = setting.has_mask
        if is_grouped and has_mask and g.kv_heads > 1:
            # With a mask transformers repeats keys and values itself (integrations/sdpa_attention.py), but one head.
            kv = [tape.record([t], g.attention_width, itemsize, name=f"{t.name}, repeated") for t in (k, v)]
            tape.drop(k, v)
            k, v = kv
        if setting.ulysses_ranks > 1:
            q, k, v = self._exchange_heads(q, k, v)
        if g.family == "gemma2":
            output = self._record_eager(q, k, v)
        elif itemsize == FLOAT32 and is_grouped and not has_mask:
            output = self._record_math(q, k, v)
        else:
            is_flash = itemsize == 2 and not has_mask and g.head_dim <= FLASH_MAX_HEAD
            output = self._record_fused(q, k, v, is_flash=is_flash)
        tape.drop(q, k, v)
        return output

    def _exchange_heads(self, *tensors: Tensor) -> list[Tensor]:
        """Record Ulysses' all-to-all, after which the rank has some heads of all tokens; return these tensors."""
        tape, g, ranks = self.tape, self.g, self.setting.ulysses_ranks
        repeats = -(-ranks // g.kv_heads)  # of keys and values, where there are fewer heads than ranks
        if g.kv_heads * repeats % ranks:
            repeats = g.heads // g.kv_heads
        outputs = []
        for t in tensors:
            width = t.width if t.width == g.attention_width else repeats * g.kv_width
            repeated = t if width == t.width else tape.record([t], width, t.itemsize, drops=[t])
            buffer = tape.record([repeated], width, t.itemsize, drops=[repeated])
            outputs.append(tape.record([buffer], width, t.itemsize, name=f"{t.name}, of all tokens", drops=[buffer]))
        return outputs

    def _record_fused(self, q: Tensor, k: Tensor, v: Tensor, *, is_flash: bool) -> Tensor:
        """Record flash or memory-efficient attention, which save inputs, output and row sums; return the output."""
        tape, g = self.tape, self.g
        batch, length = self.setting.batch_size, self.setting.context_length
        padded_length = -(-length // 128) * 128
        saved_bytes = FLOAT32 * batch * g.heads * length
        if is_flash:
            padded_head = -(-g.head_dim // 32) * 32 if g.head_dim <= 128 else -(-g.head_dim // 64) * 64
            temp_bytes = FLOAT32 * batch * g.heads * padded_length * (1 + padded_head)
            if g.heads != g.kv_heads:
                temp_bytes += 2 * 2 * tape.tokens * g.attention_width
        else:
            temp_bytes = saved_bytes
            if self.setting.has_mask:
                # The mask in the query's dtype, which each layer makes and saves (native/transformers/attention.cpp);
                # rows are aligned to 16 elements.
                saved_bytes += q.itemsize * batch * length * -(-length // 16) * 16
        return tape.record(
            [q, k, v], q.width, q.itemsize, saves=[q, k, v], saves_output=True, extra_bytes=saved_bytes,
            temp_bytes=temp_bytes, name="attention output",
        )  # fmt: skip

    def _record_math(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Record grouped-query attention in float32, for which torch has no fused kernel (sdp_utils.cpp).

        The inputs are scaled by the square root of the scale and the heads repeated (native/transformers/attention.cpp,
        _scaled_dot_product_attention_math).
        """
        tape, g = self.tape, self.g
        scores_width = g.heads * self.setting.context_length
        kv = [tape.record([t], g.attention_width, FLOAT32, name=f"{t.name}, repeated") for t in (k, v)]
        scaled_q = tape.record([q], q.width, FLOAT32, name="query, scaled")
        scaled_k = tape.record([kv[0]], g.attention_width, FLOAT32, name="key, scaled")
        scores = tape.record([scaled_q, scaled_k], scores_width, FLOAT32, saves=[scaled_q, scaled_k])
        tape.drop(scaled_q, scaled_k)
        probs = tape.record([scores], scores_width, FLOAT32, saves_output=True, name="attention scores", drops=[scores])
        return tape.record(
            [probs, kv[1]], q.width, FLOAT32, saves=[probs, kv[1]], name="attention output", drops=[probs, *kv]
        )

    def _record_eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Record Gemma 2's eager attention, whose scores are soft-capped by tanh (modeling_gemma2.py)."""
        tape, g = self.tape, self.g
        itemsize, scores_width = q.itemsize, g.heads * self.setting.context_length
        kv = [tape.record([t], g.attention_width, itemsize, name=f"{t.name}, repeated") for t in (k, v)]
        scores = tape.record([q, kv[0]], scores_width, itemsize, saves=[q, kv[0]])
        for saves_output in (False, False, True, False):  # times scale, over the cap, tanh, times the cap
            name = "attention scores, capped"
            scores = tape.record([scores], scores_width, itemsize, saves_output=saves_output, name=name, drops=[scores])
        if self.setting.context_length > 1:  # the mask of what comes later
            scores = tape.record([scores], scores_width, itemsize, drops=[scores])
        probs = tape.record([scores], scores_width, FLOAT32, saves_output=True, name="attention scores, float32")
        tape.drop(scores)
        weights = tape.cast(probs, itemsize, "attention scores after softmax", drops=[probs])
        return tape.record(
            [weights, kv[1]], q.width, itemsize, saves=[weights, kv[1]], name="attention output", drops=[weights, *kv]
        )

    def _add_to_cache(self, tensor: Tensor) -> Tensor:
        """Drop `tensor`, and return its copy in the KV cache, whose bytes the tape does not count (cache_utils.py)."""
        self.tape.drop(tensor)
        return self.tape.add_input(tensor.width, tensor.itemsize, needs_grad=False, name=tensor.name)

    def record_self_attention(self, x: Tensor) -> Tensor:
        """Record self-attention with its projections, without dropping `x`; return the output."""
        tape, g = self.tape, self.g
        if g.has_fused_qkv:
            qkv = self.record_linear(x, "qkv", "query, key, value")
            # Views, each of which keeps the base alive.
            widths = {"query": g.attention_width, "key": g.kv_width, "value": g.kv_width}
            q, k, v = (tape.view(qkv, width, name) for name, width in widths.items())
            tape.drop(qkv)
        else:
            q = self.record_linear(x, "q", "query")
            if g.family == "opt":  # the scale is applied by hand
                q = tape.record([q], q.width, q.itemsize, name="query", drops=[q])
            k = self.record_linear(x, "k", "key")
            v = self.record_linear(x, "v", "value")
            if g.qk_norm:
                q, k = self._normalize_heads(q, "query", g.heads), self._normalize_heads(k, "key", g.kv_heads)
        q, k = self.record_rotary(q, "query"), self.record_rotary(k, "key")
        output = self.record_attention(q, k, v)
        if self._has_strided_heads():
            name = "attention output, heads side by side"
            output = tape.record([output], output.width, output.itemsize, name=name, drops=[output])
        result = self.record_linear(output, "o", "attention projection")
        tape.drop(output)
        return result

    def _has_strided_heads(self) -> bool:
        """Return whether attention's output must be copied because a token's heads are not contiguous.

        A kernel's output has the strides of its query, which partial rotary positions make non-contiguous (aten.cat).
        """
        setting, g = self.setting, self.g
        if setting.ulysses_ranks > 1:
            return True
        is_math = setting.compute_itemsize == FLOAT32 and g.heads != g.kv_heads and not setting.has_mask
        return is_math or g.family in ("gemma2", "gpt_neox", "phi", "phi3")

    def _normalize_heads(self, x: Tensor, name: str, heads: int) -> Tensor:
        is_per_head = self.g.qk_norm == "head"
        width = self.g.head_dim if is_per_head else x.width
        output = self.record_norm(x, f"{name}, normed", width, heads if is_per_head else 1)
        self.tape.drop(x)
        return output

    def record_mlp(self, x: Tensor) -> Tensor:
        """Record the MLP, without dropping `x`; return the output."""
        tape, g = self.tape, self.g
        if not g.is_gated:
            up = self.record_linear(x, "up", "MLP up")
            product = self.record_activation(up, g.activation)
            tape.drop(up)
        elif g.has_fused_gate_up:
            pair = self.record_linear(x, "up", "gate and up")
            # Gate and up are views of halves of `pair`.
            gate = tape.record([pair], g.intermediate, pair.itemsize, saves=[pair], name="activated gate")
            product = tape.record([gate, pair], g.intermediate, pair.itemsize, saves=[gate, pair], name="gate times up")
            tape.drop(gate, pair)
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
        """Record an activation function; return its output. ReLU saves its output, others save their input."""
        tape = self.tape
        if activation == "relu":
            return tape.record([x], x.width, x.itemsize, saves_output=True, name="activated")
        if activation != "gelu-python":
            return tape.record([x], x.width, x.itemsize, saves=[x], name="activated")
        # transformers/activations.py, NewGELUActivation: eight operators.
        # Under autocast pow is computed in float32, and all that follows.
        itemsize = FLOAT32 if self.setting.amp else x.itemsize
        half = tape.record([x], x.width, x.itemsize, name="half of the input of GELU")
        x_cast = tape.cast(x, itemsize, "input of GELU, float32")
        cube = tape.record([x_cast], x.width, itemsize, saves=[x_cast], drops=[x_cast])
        cubic = tape.record([cube], x.width, itemsize, drops=[cube])
        tanh_in = tape.add(x, cubic, drops=[cubic])
        scaled = tape.record([tanh_in], x.width, itemsize, drops=[tanh_in])
        tanh = tape.record([scaled], x.width, itemsize, saves_output=True, name="tanh of GELU", drops=[scaled])
        gate = tape.record([tanh], x.width, itemsize, name="1 + tanh of GELU", drops=[tanh])
        return tape.record([half, gate], x.width, itemsize, saves=[half, gate], name="activated", drops=[half, gate])

    def record_dropout(self, x: Tensor) -> Tensor:
        """Record dropout in training (output, and a mask of a byte per element), and drop `x`; return the output."""
        if not (self.g.has_dropout and self.setting.training):
            return x
        mask_bytes = self.tape.tokens * x.width if x.needs_grad else 0
        return self.tape.record([x], x.width, x.itemsize, extra_bytes=mask_bytes, name="dropout", drops=[x])

    def record(self, hidden: Tensor) -> Tensor:
        """Record the entire layer, without dropping `hidden`; return the output."""
        if self.g.family in ("gpt_neox", "phi"):
            return self._record_parallel(hidden)
        tape, is_gemma, is_olmo = self.tape, self.g.norm == "gemma", self.g.norm == "olmo"
        x = hidden
        for record_block, name in ((self.record_self_attention, "attention"), (self.record_mlp, "MLP")):
            normed = x if is_olmo else self.record_norm(x, f"input of {name}")
            out = self.record_dropout(record_block(normed))
            if not is_olmo:
                tape.drop(normed)
            if is_gemma or is_olmo:
                normed = self.record_norm(out, f"output of {name}, normed")
                tape.drop(out)
                out = normed
            residual = tape.add(x, out, f"residual after {name}", drops=[out])
            if x is not hidden:
                tape.drop(x)
            x = residual
        return x

    def _record_parallel(self, hidden: Tensor) -> Tensor:
        """Record a layer whose attention and MLP both read `hidden`, through one or two norms; return the output."""
        tape = self.tape
        normed = self.record_norm(hidden, "input of attention")
        attention = self.record_self_attention(normed)
        if self.g.num_norms == 2:
            tape.drop(normed)
        attention = self.record_dropout(attention)
        if self.g.num_norms == 2:
            normed = self.record_norm(hidden, "input of MLP")
        out = self.record_dropout(self.record_mlp(normed))
        tape.drop(normed)
        total = tape.add(out, attention, drops=[out, attention])
        return tape.add(total, hidden, "hidden states", drops=[total])


def record_layer(setting: LayerSettings, *, hidden_needs_grad: bool = True) -> tuple[Tape, int]:
    """Return the tape of one layer, and the bytes saved for the backward, which include the layer's input if saved."""
    tape, width = Tape(setting.tokens, setting.training), setting.geometry.hidden
    hidden = tape.add_input(width, setting.stream_itemsize, needs_grad=hidden_needs_grad, name="hidden states")
    output = DecoderLayer(tape, setting).record(hidden)
    tape.drop(output)
    if hidden.num_references > 1:  # it is the output of the layer before
        tape.saved[f"{hidden.name} #0"] = hidden.num_bytes
    return tape, tape.saved_bytes
