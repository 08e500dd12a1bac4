"""The linear layers of a decoder layer (unquantized, quantized, with LoRA), and the settings of a layer.

Sources: peft/tuners/lora/{layer,bnb}.py, bitsandbytes/autograd/_functions.py, and autocast's casts
(aten/src/ATen/autocast_mode.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass

from memprof.estimate.geometry import DecoderGeometry
from memprof.estimate.tape import FLOAT32, Tape, Tensor


@dataclass(frozen=True, slots=True)
class LayerSettings:
    """The shape, batch, dtype and training options that determine a layer's memory."""

    geometry: DecoderGeometry
    batch_size: int
    context_length: int
    itemsize: int  # Bytes of an element of weights and activations.
    training: bool = True
    trains_weights: bool = True  # False: the weights are frozen.
    amp: bool = False  # Float32 weights, autocast to half precision.
    quantize: str = ""  # Quantization of the linear layers: int8, int4 or a checkpoint format.
    lora_rank: int = 0
    lora_targets: tuple[str, ...] = ()
    cache: bool = False  # Whether keys and values go into a KV cache.
    padded: bool = False  # Whether sequences of a batch have different lengths.
    ulysses_ranks: int = 1  # Ranks that share the heads during attention (Ulysses).

    @property
    def tokens(self) -> int:
        """Return the number of tokens in a micro-batch."""
        return self.batch_size * self.context_length

    @property
    def compute_itemsize(self) -> int:
        """Return the bytes of an element in matrix products."""
        return 2 if self.amp else self.itemsize

    @property
    def stream_itemsize(self) -> int:
        """Return the bytes of an element of the hidden states between layers."""
        return FLOAT32 if self.amp else self.itemsize

    @property
    def has_mask(self) -> bool:
        """Return whether attention has a mask; transformers omits it if padding and window hide no token."""
        window = self.geometry.window
        return self.padded or (bool(window) and self.context_length >= window)


_LONG_INPUT = 1024


class Projections:
    """The linear layers of a decoder layer, whose operators are recorded on a tape."""

    def __init__(self, tape: Tape, setting: LayerSettings) -> None:
        self.tape = tape
        self.setting = setting
        self.g = setting.geometry
        self.trains = setting.training and setting.trains_weights
        self._matrices = self.g.list_matrices()

    def record_linear(self, x: Tensor, matrix: str, name: str) -> Tensor:
        """Record the linear layer `matrix` with its LoRA adapter, without dropping `x`; return the output."""
        setting = self.setting
        rows, columns, has_bias = self._matrices[matrix]
        if setting.quantize == "int4":
            output = self._record_int4(x, rows, columns, name)
        elif setting.quantize == "int8":
            output = self._record_int8(x, rows, columns, name)
        elif setting.quantize:
            output = self._record_prequantized(x, rows, columns, name)
        else:
            output = self._record_unquantized(x, rows, columns, has_bias, name)
        if matrix in setting.lora_targets:
            output = self._record_lora(x, output, columns, name)
        return output

    def _record_unquantized(self, x: Tensor, rows: int, columns: int, has_bias: bool, name: str) -> Tensor:
        tape = self.tape
        itemsize = self.setting.compute_itemsize
        x_cast = tape.cast(x, itemsize, f"{x.name}, for {name}")
        grad = (rows * columns + columns * has_bias) * self.setting.itemsize if self.trains else 0
        cast_bytes = rows * columns * itemsize if self.setting.amp else 0
        return tape.record(
            [x_cast], columns, itemsize, saves=[x_cast] if self.trains else (), name=name,
            trains=self.trains, grad_bytes=grad, param_temp_bytes=cast_bytes, drops=[x_cast],
        )  # fmt: skip

    def _record_int4(self, x: Tensor, rows: int, columns: int, name: str) -> Tensor:
        """Record bitsandbytes' Linear4bit, which dequantizes the weight in forward and backward; return the output."""
        tape = self.tape
        x_cast = tape.cast(x, 2, f"{x.name}, cast")
        weight_bytes = 2 * rows * columns
        scale_bytes = FLOAT32 * rows * columns // 64
        tape.add_temporary(weight_bytes + max(scale_bytes, 2 * tape.tokens * columns))
        product = tape.record([x_cast], columns, 2, name=name, temp_bytes=weight_bytes, drops=[x_cast])
        return tape.cast(product, x.itemsize, name, drops=[product])

    def _record_int8(self, x: Tensor, rows: int, columns: int, name: str) -> Tensor:
        """Record bitsandbytes' Linear8bitLt, which keeps its input (autograd/_functions.py); return the output.

        bitsandbytes/backends/cuda/ops.py: the input is cast to float16 and then int8, with scales and a mask of
        outliers; the product is int32, then float16, then the input's dtype.
        """
        tape = self.tape
        tape.add_temporary(tape.tokens * rows * (2 + 1 + 2 + 1))
        tape.add_temporary(tape.tokens * (rows + columns * (4 + 2 + x.itemsize)))
        tape.keep(x)
        return tape.record([x], columns, x.itemsize, saves=[x], name=name, temp_bytes=x.itemsize * rows * columns)

    def _record_prequantized(self, x: Tensor, rows: int, columns: int, name: str) -> Tensor:
        """Record a linear layer of a quantized checkpoint, in inference; return the output.

        Float8 quantizes the input too (transformers/integrations/finegrained_fp8.py). AWQ and GPTQ dequantize
        the weight for inputs of 1,024 tokens or more (awq/modules/linear/gemm.py).
        """
        tape = self.tape
        is_fp8 = self.setting.quantize == "fp8"
        product = tape.tokens * columns * x.itemsize
        dequantized = 2 * rows * columns * (tape.tokens >= _LONG_INPUT)
        tape.add_temporary(product + (tape.tokens * rows if is_fp8 else dequantized))
        return tape.record([x], columns, x.itemsize, name=name)

    def _record_lora(self, x: Tensor, output: Tensor, columns: int, name: str) -> Tensor:
        """Record PEFT's LoRA adapter, in float32 without autocast, and its sum with `output`; return the sum."""
        tape, rank = self.tape, self.setting.lora_rank
        itemsize = output.itemsize
        lora_itemsize = 2 if self.setting.amp else FLOAT32
        x_cast = tape.cast(x, lora_itemsize, f"{x.name}, cast for LoRA")
        down = tape.record([x_cast], rank, lora_itemsize, saves=[x_cast], trains=True, name="LoRA", drops=[x_cast])
        up = tape.record([down], columns, lora_itemsize, saves=[down], trains=True, drops=[down])
        scaled = tape.record([up], columns, lora_itemsize, drops=[up])
        total = tape.add(output, scaled, name, drops=[output, scaled])
        return tape.cast(total, itemsize, name, drops=[total])
