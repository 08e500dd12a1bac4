"""One decoder layer, operator by operator, as in transformers; `DecoderLayer.forward` records the layer on a tape.

Sources: transformers/models/*/modeling_*.py, and for tensors that attention saves, PyTorch's
aten/src/ATen/native/transformers/cuda/.
"""

from __future__ import annotations

from memprof.estimate.projections import Projections, Setting
from memprof.estimate.tape import FLOAT32, Tape, Tensor

# The flash attention kernels take heads up to this size (sdp_utils.cpp, check_flash_attention_hardware_support).
FLASH_MAX_HEAD = 256


class DecoderLayer(Projections):
    """One layer whose operators are recorded on a tape."""

    def norm(self, x: Tensor, name: str, width: int | None = None, rows: int = 1) -> Tensor:
        """Record a norm over `width` elements, `rows` times per token; return its output."""
        if self.g.norm == "layer":
            return self._layer_norm(x, name)
        tape, width = self.tape, x.width if width is None else width
        wide = tape.cast(x, FLOAT32, f"{x.name}, float32 for the norm")
        squares = tape.op([wide], x.width, FLOAT32, keeps=[wide])
        root = tape.op([squares], rows, FLOAT32, keeps_output=True, name="norm statistics", drops=[squares])
        normed = tape.op([wide, root], x.width, FLOAT32, keeps=[wide, root], name=f"{name} before its weight, float32")
        tape.drop(wide, root)
        grad = width * self.setting.item if self.trains else 0
        item, is_cast_first = FLOAT32, self.g.norm == "rms"
        if is_cast_first:
            normed = tape.cast(normed, x.item, f"{name} before its weight", drops=[normed])
            item = max(normed.item, self.setting.stream_item)
        weighted = tape.op(
            [normed], x.width, item, keeps=[normed] if self.trains else (), trains=self.trains, param_grad=grad,
            temporary=tape.tokens * x.width * item if self.trains else 0, name=name, drops=[normed],
        )  # fmt: skip
        return weighted if is_cast_first else tape.cast(weighted, x.item, name, drops=[weighted])

    def _layer_norm(self, x: Tensor, name: str) -> Tensor:
        tape = self.tape
        item = FLOAT32 if self.setting.amp else x.item
        wide = tape.cast(x, item, f"{x.name}, float32 for the norm")
        grad = 2 * x.width * self.setting.item if self.trains else 0
        return tape.op(
            [wide], x.width, item, keeps=[wide], extra=2 * FLOAT32 * tape.tokens,
            trains=self.trains, param_grad=grad, name=name, drops=[wide],
        )  # fmt: skip

    def rotate(self, x: Tensor, name: str) -> Tensor:
        """Record rotary positions, on all or a part of each head, and drop `x`; return the output."""
        tape = self.tape
        if not self.g.rotary:
            return x
        share = self.g.rotary
        width = int(x.width * share)
        item = max(x.item, self.setting.stream_item)
        cosine = tape.op([x], width, item)
        turned = tape.op([x], width, x.item)
        tape.during(tape.tokens * width * x.item // 2)
        sine = tape.op([turned], width, item, drops=[turned])
        result = tape.add(cosine, sine, name, drops=[cosine, sine])
        if share < 1:
            result = tape.op([result, x], x.width, item, name=name, drops=[result])
        tape.drop(x)
        return result

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Record scaled_dot_product_attention, and drop `q`, `k` and `v`; return the output."""
        tape, g, setting = self.tape, self.g, self.setting
        if setting.cache:
            k, v = self._add_to_cache(k), self._add_to_cache(v)
        item = setting.compute_item
        cast = [tape.cast(t, item, f"{t.name}, cast") for t in (q, k, v)]
        tape.drop(q, k, v)
        q, k, v = cast
        groups = g.heads != g.kv_heads
        masked = setting.masked
        if groups and masked and g.kv_heads > 1:
            # With a mask transformers repeats keys and values itself (integrations/sdpa_attention.py), but one head.
            wide = [tape.op([t], g.attention_width, item, name=f"{t.name}, repeated") for t in (k, v)]
            tape.drop(k, v)
            k, v = wide
        if setting.parts_heads > 1:
            q, k, v = self._exchange_heads(q, k, v)
        if g.family == "gemma2":
            result = self._record_eager(q, k, v)
        elif item == FLOAT32 and groups and not masked:
            result = self._record_math(q, k, v)
        else:
            result = self._record_kernel(q, k, v, flash=item == 2 and not masked and g.head_dim <= FLASH_MAX_HEAD)
        tape.drop(q, k, v)
        return result

    def _exchange_heads(self, *parts: Tensor) -> list[Tensor]:
        """Record the exchange of all heads of some tokens for some heads of all tokens (workload/ulysses.py)."""
        tape, g, ranks = self.tape, self.g, self.setting.parts_heads
        repeats = -(-ranks // g.kv_heads)  # of keys and values, where there are fewer heads than ranks
        if g.kv_heads * repeats % ranks:
            repeats = g.heads // g.kv_heads
        found = []
        for part in parts:
            width = part.width if part.width == g.attention_width else repeats * g.kv_width
            wide = part if width == part.width else tape.op([part], width, part.item, drops=[part])
            sent = tape.op([wide], width, part.item, drops=[wide])
            found.append(tape.op([sent], width, part.item, name=f"{part.name}, of all tokens", drops=[sent]))
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
            if self.setting.masked:
                # Zeros and minus infinities of the query's dtype, made and kept by each layer (native/transformers/
                # attention.cpp), its rows aligned to 16 elements.
                sums += q.item * batch * length * -(-length // 16) * 16
        return tape.op(
            [q, k, v], q.width, q.item, keeps=[q, k, v], keeps_output=True, extra=sums, temporary=temporary,
            name="attention output",
        )  # fmt: skip

    def _record_math(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Record attention in float32 with shared heads: no fused kernel applies (sdp_utils.cpp), scores are made.

        The inputs are scaled by the square root of the scale and the heads repeated (native/transformers/attention.cpp,
        _scaled_dot_product_attention_math).
        """
        tape, g = self.tape, self.g
        scores_width = g.heads * self.setting.context_length
        wide = [tape.op([t], g.attention_width, FLOAT32, name=f"{t.name}, repeated") for t in (k, v)]
        scaled_q = tape.op([q], q.width, FLOAT32, name="query, scaled")
        scaled_k = tape.op([wide[0]], g.attention_width, FLOAT32, name="key, scaled")
        scores = tape.op([scaled_q, scaled_k], scores_width, FLOAT32, keeps=[scaled_q, scaled_k])
        tape.drop(scaled_q, scaled_k)
        shares = tape.op([scores], scores_width, FLOAT32, keeps_output=True, name="attention scores", drops=[scores])
        return tape.op(
            [shares, wide[1]], q.width, FLOAT32, keeps=[shares, wide[1]], name="attention output", drops=[shares, *wide]
        )

    def _record_eager(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Record Gemma 2's attention, whose scores go through tanh, unlike torch's kernels (modeling_gemma2.py)."""
        tape, g = self.tape, self.g
        item, scores_width = q.item, g.heads * self.setting.context_length
        wide = [tape.op([t], g.attention_width, item, name=f"{t.name}, repeated") for t in (k, v)]
        scores = tape.op([q, wide[0]], scores_width, item, keeps=[q, wide[0]])
        for keeps_output in (False, False, True, False):  # times scale, over the cap, tanh, times the cap
            name = "attention scores, capped"
            scores = tape.op([scores], scores_width, item, keeps_output=keeps_output, name=name, drops=[scores])
        if self.setting.context_length > 1:  # the mask of what comes later
            scores = tape.op([scores], scores_width, item, drops=[scores])
        shares = tape.op([scores], scores_width, FLOAT32, keeps_output=True, name="attention scores, float32")
        tape.drop(scores)
        half = tape.cast(shares, item, "attention scores after softmax", drops=[shares])
        return tape.op(
            [half, wide[1]], q.width, item, keeps=[half, wide[1]], name="attention output", drops=[half, *wide]
        )

    def _add_to_cache(self, tensor: Tensor) -> Tensor:
        """Return a new tensor in the KV cache (cache_utils.py, DynamicLayer.update), which the tape does not count."""
        self.tape.drop(tensor)
        return self.tape.given(tensor.width, tensor.item, needs_grad=False, name=tensor.name)

    def attention(self, x: Tensor) -> Tensor:
        """Record self-attention with its projections, without dropping `x`; return the output."""
        tape, g = self.tape, self.g
        if g.fused_qkv:
            fused = self.linear(x, "qkv", "query, key, value")
            # Views: what is not rotated keeps the whole, as does whoever keeps one of the three.
            widths = {"query": g.attention_width, "key": g.kv_width, "value": g.kv_width}
            q, k, v = (tape.view(fused, width, name) for name, width in widths.items())
            tape.drop(fused)
        else:
            q = self.linear(x, "q", "query")
            if g.family == "opt":  # the scale is applied by hand
                q = tape.op([q], q.width, q.item, name="query", drops=[q])
            k = self.linear(x, "k", "key")
            v = self.linear(x, "v", "value")
            if g.qk_norm:
                q, k = self._normalize_heads(q, "query", g.heads), self._normalize_heads(k, "key", g.kv_heads)
        q, k = self.rotate(q, "query"), self.rotate(k, "key")
        result = self.attend(q, k, v)
        if self._has_strided_heads():
            name = "attention output, heads side by side"
            result = tape.op([result], result.width, result.item, name=name, drops=[result])
        projected = self.linear(result, "o", "attention projection")
        tape.drop(result)
        return projected

    def _has_strided_heads(self) -> bool:
        """Return whether the heads of a token are not contiguous in the output of attention, which is then copied.

        A kernel's output has the strides of its query. A query with partial rotation is joined head by head (aten.cat).
        """
        setting, g = self.setting, self.g
        if setting.parts_heads > 1:
            return True
        math = setting.compute_item == FLOAT32 and g.heads != g.kv_heads and not setting.masked
        return math or g.family in ("gemma2", "gpt_neox", "phi", "phi3")

    def _normalize_heads(self, x: Tensor, name: str, heads: int) -> Tensor:
        by_head = self.g.qk_norm == "head"
        width = self.g.head_dim if by_head else x.width
        result = self.norm(x, f"{name}, normed", width, heads if by_head else 1)
        self.tape.drop(x)
        return result

    def mlp(self, x: Tensor) -> Tensor:
        """Record the MLP, without dropping `x`; return the output."""
        tape, g = self.tape, self.g
        if not g.gated:
            up = self.linear(x, "up", "MLP up")
            product = self.activate(up, g.activation)
            tape.drop(up)
        elif g.fused_up:
            both = self.linear(x, "up", "gate and up")
            # A view of half of it each.
            gate = tape.op([both], g.intermediate, both.item, keeps=[both], name="activated gate")
            product = tape.op([gate, both], g.intermediate, both.item, keeps=[gate, both], name="gate times up")
            tape.drop(gate, both)
        else:
            raw = self.linear(x, "gate", "gate")
            gate = tape.op([raw], raw.width, raw.item, keeps=[raw], name="activated gate", drops=[raw])
            up = self.linear(x, "up", "up")
            product = tape.op([gate, up], up.width, up.item, keeps=[gate, up], name="gate times up", drops=[gate, up])
        down = self.linear(product, "down", "MLP down")
        tape.drop(product)
        return down

    def activate(self, x: Tensor, kind: str) -> Tensor:
        """Record an activation, and return its output; ReLU saves its result, others save their input."""
        tape = self.tape
        if kind == "relu":
            return tape.op([x], x.width, x.item, keeps_output=True, name="activated")
        if kind != "gelu-python":
            return tape.op([x], x.width, x.item, keeps=[x], name="activated")
        # transformers/activations.py, NewGELUActivation: eight operators.
        # Under autocast pow is computed in float32, and all that follows.
        item = FLOAT32 if self.setting.amp else x.item
        half = tape.op([x], x.width, x.item, name="half of the input of GELU")
        wide = tape.cast(x, item, "input of GELU, float32")
        cube = tape.op([wide], x.width, item, keeps=[wide], drops=[wide])
        small = tape.op([cube], x.width, item, drops=[cube])
        inner = tape.add(x, small, drops=[small])
        scaled = tape.op([inner], x.width, item, drops=[inner])
        tanh = tape.op([scaled], x.width, item, keeps_output=True, name="tanh of GELU", drops=[scaled])
        one = tape.op([tanh], x.width, item, name="1 + tanh of GELU", drops=[tanh])
        return tape.op([half, one], x.width, item, keeps=[half, one], name="activated", drops=[half, one])

    def dropped(self, x: Tensor) -> Tensor:
        """Record dropout in training (a new tensor, and a mask of a byte per element), and drop `x`."""
        if not (self.g.dropout and self.setting.training):
            return x
        mask = self.tape.tokens * x.width if x.needs_grad else 0
        return self.tape.op([x], x.width, x.item, extra=mask, name="dropout", drops=[x])

    # -- the layer

    def forward(self, hidden: Tensor) -> Tensor:
        """Record the layer, without dropping `hidden`; return the output."""
        if self.g.family in ("gpt_neox", "phi"):
            return self._record_parallel(hidden)
        tape, gemma, after = self.tape, self.g.norm == "gemma", self.g.norm == "olmo"
        x = hidden
        for part, name in ((self.attention, "attention"), (self.mlp, "MLP")):
            normed = x if after else self.norm(x, f"input of {name}")
            out = self.dropped(part(normed))
            if not after:
                tape.drop(normed)
            if gemma or after:
                normed = self.norm(out, f"output of {name}, normed")
                tape.drop(out)
                out = normed
            summed = tape.add(x, out, f"residual after {name}", drops=[out])
            if x is not hidden:
                tape.drop(x)
            x = summed
        return x

    def _record_parallel(self, hidden: Tensor) -> Tensor:
        """Record attention and MLP in parallel, on one norm or two; return the output."""
        tape = self.tape
        normed = self.norm(hidden, "input of attention")
        attended = self.attention(normed)
        if self.g.norms == 2:
            tape.drop(normed)
        attended = self.dropped(attended)
        if self.g.norms == 2:
            normed = self.norm(hidden, "input of MLP")
        out = self.dropped(self.mlp(normed))
        tape.drop(normed)
        both = tape.add(out, attended, drops=[out, attended])
        return tape.add(both, hidden, "hidden states", drops=[both])


def kept_per_layer(setting: Setting, *, hidden_needs_grad: bool = True) -> tuple[Tape, int]:
    """Return the tape of one layer, and the bytes that the layer saves for the backward, including a saved input."""
    tape, width = Tape(setting.tokens, setting.training), setting.geometry.hidden
    hidden = tape.given(width, setting.stream_item, needs_grad=hidden_needs_grad, name="hidden states")
    output = DecoderLayer(tape, setting).forward(hidden)
    tape.drop(output)
    if hidden.holders > 1:  # it is the output of the layer before
        tape.kept[f"{hidden.name} #0"] = hidden.num_bytes
    return tape, tape.kept_bytes
