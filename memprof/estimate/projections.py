"""Settings of a layer's estimate, and its linear layers: plain, quantized and adapted.

Sources: peft/tuners/lora/{layer,bnb}.py, bitsandbytes/autograd/_functions.py, and autocast's casts
(aten/src/ATen/autocast_mode.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass

from memprof.estimate.geometry import DecoderGeometry
from memprof.estimate.tape import FLOAT32, Tape, Tensor


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings other than shape that determine a layer's memory."""

    geometry: DecoderGeometry
    batch_size: int
    context_length: int
    item: int  # Bytes of an element of weights and activations.
    training: bool = True
    trains_weights: bool = True  # False: the model is frozen.
    amp: bool = False  # Float32 weights, autocast to half precision.
    quantize: str = ""  # int8, int4 or a stored format: the linear layers' weights.
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    cache: bool = False  # Keys and values go into a KV cache.
    padded: bool = False  # Sequences of a batch have different lengths.
    parts_heads: int = 1  # Ranks that exchange parts of the sequence for parts of the heads around attention (Ulysses).

    @property
    def tokens(self) -> int:
        """Return the number of tokens in a micro-batch."""
        return self.batch_size * self.context_length

    @property
    def compute_item(self) -> int:
        """Return the bytes of an element in matrix products."""
        if self.amp:
            return 2
        return self.stream_item if self.quantize else self.item

    @property
    def stream_item(self) -> int:
        """Return the bytes of an element of the hidden states between layers."""
        # PEFT prepares quantized models for training in float32 (prepare_model_for_kbit_training).
        return FLOAT32 if self.amp or (self.quantize and self.lora_rank and self.training) else self.item

    @property
    def masked(self) -> bool:
        """Return whether a mask is made; transformers/masking_utils.py makes none if every token is visible."""
        window = self.geometry.window
        return self.padded or (bool(window) and self.context_length >= window)


_LONG_INPUT = 1024


class Projections:
    """The linear layers of one decoder layer, recorded on a tape."""

    def __init__(self, tape: Tape, setting: Setting) -> None:
        self.tape = tape
        self.setting = setting
        self.g = setting.geometry
        self.trains = setting.training and setting.trains_weights
        self._matrices = self.g.matrices()

    def linear(self, x: Tensor, which: str, name: str) -> Tensor:
        """Record a linear layer with its adapter, without dropping `x`; return the output."""
        setting = self.setting
        rows, columns, bias = self._matrices[which]
        if setting.quantize == "int4":
            result = self._linear4(x, rows, columns, name)
        elif setting.quantize == "int8":
            result = self._linear8(x, rows, columns, name)
        elif setting.quantize:
            result = self._stored_linear(x, rows, columns, name)
        else:
            result = self._plain_linear(x, rows, columns, bias, name)
        if which in setting.lora_targets:
            result = self._adapt(x, result, columns, name)
        return result

    def _plain_linear(self, x: Tensor, rows: int, columns: int, bias: bool, name: str) -> Tensor:
        tape = self.tape
        item = self.setting.compute_item
        taken = tape.cast(x, item, f"{x.name}, for {name}")
        grad = (rows * columns + columns * bias) * self.setting.item if self.trains else 0
        half = rows * columns * item if self.trains and self.setting.amp else 0
        return tape.op(
            [taken], columns, item, keeps=[taken] if self.trains else (), name=name,
            trains=self.trains, param_grad=grad, temporary_param=half, drops=[taken],
        )  # fmt: skip

    def _linear4(self, x: Tensor, rows: int, columns: int, name: str) -> Tensor:
        """Record Linear4bit: products have a half-precision copy of the weight, in forward and backward."""
        tape = self.tape
        taken = tape.cast(x, 2, f"{x.name}, cast")
        weight = 2 * rows * columns
        scales = FLOAT32 * rows * columns // 64
        tape.during(weight + max(scales, 2 * tape.tokens * columns))
        product = tape.op([taken], columns, 2, name=name, temporary=weight, drops=[taken])
        return tape.cast(product, x.item, name, drops=[product])

    def _linear8(self, x: Tensor, rows: int, columns: int, name: str) -> Tensor:
        """Record Linear8bitLt, which saves its input.

        bitsandbytes/backends/cuda/ops.py: the input is cast to float16 and then int8, with scales and a mask of
        outliers; the product is int32, then float16, then the input's dtype.
        """
        tape = self.tape
        tape.during(tape.tokens * rows * (2 + 1 + 2 + 1))
        tape.during(tape.tokens * (rows + columns * (4 + 2 + x.item)))
        return tape.op([x], columns, x.item, keeps=[x], name=name, temporary=x.item * rows * columns)

    def _stored_linear(self, x: Tensor, rows: int, columns: int, name: str) -> Tensor:
        """Record a linear layer of a quantized checkpoint, in inference; return the output.

        Float8 quantizes the input too (transformers/integrations/finegrained_fp8.py). AWQ and GPTQ multiply a long
        input by a copy of the weight in half precision (awq/modules/linear/gemm.py: from 1,024 tokens).
        """
        tape = self.tape
        fp8 = self.setting.quantize == "fp8"
        product = tape.tokens * columns * x.item
        tape.during(product + (tape.tokens * rows if fp8 else 2 * rows * columns * (tape.tokens >= _LONG_INPUT)))
        return tape.op([x], columns, x.item, name=name)

    def _adapt(self, x: Tensor, result: Tensor, columns: int, name: str) -> Tensor:
        """Record PEFT's LoRA, whose matrices, inputs and outputs are float32 (autocast_adapter_dtype)."""
        tape, rank = self.tape, self.setting.lora_rank
        item = result.item
        of_adapter = 2 if self.setting.amp else FLOAT32
        wide = tape.cast(x, of_adapter, f"{x.name}, cast for LoRA")
        low = tape.op([wide], rank, of_adapter, keeps=[wide], trains=True, name="LoRA", drops=[wide])
        up = tape.op([low], columns, of_adapter, keeps=[low], trains=True, drops=[low])
        scaled = tape.op([up], columns, of_adapter, drops=[up])
        if self.setting.quantize and not self.setting.amp:
            # peft/tuners/lora/bnb.py casts before it adds.
            cast = tape.cast(scaled, item, drops=[scaled])
            return tape.add(result, cast, name, drops=[result, cast])
        summed = tape.add(result, scaled, name, drops=[result, scaled])
        return tape.cast(summed, item, name, drops=[summed])
