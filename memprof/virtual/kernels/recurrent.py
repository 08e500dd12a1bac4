"""Recurrent layers as cuDNN runs them: one buffer for all weights, one operator for all layers and time steps.

Sources: native/RNN.cpp (which path), native/cudnn/RNN.cpp (buffers, outputs, gradients), native/Autocast
(autocast_mode.cpp, cudnn/RNN: weights cast into a new buffer), torch/nn/modules/rnn.py (flatten_parameters).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from memprof.torch_private import kernels
from memprof.units import round_up
from memprof.virtual.device_properties import DeviceProperties, cudnn_version
from memprof.virtual.device_state import DeviceState
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.copies import contiguous
from memprof.virtual.kernels.registry import META, aten, composite, kernel

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # kind of layer -> its number in cuDNN (cudnnRNNMode_t)
# Hidden-sized vectors that the backward needs of a time step: the gates, an LSTM's cell, a GRU's hidden candidate.
_SAVED_VECTORS = {0: 1, 1: 1, 2: 5, 3: 4}
_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
DTYPES = (torch.float16, torch.float32, torch.float64)
DROPOUT_STATE_BYTES = 2 << 20

# cuDNN 9.19, applied wherever torch brings that version along: the reserve space and the workspace as buffers that add
# up to what cudnnGetRNNTempSpaceSizes answered on an H100 for 1,229 shapes, of all kinds, data types, algorithms,
# directions, with dropout, packed or projected: of 105,090 sizes 101,962 to the byte, the others within 128 bytes (but
# for 5, of an algorithm that torch does not choose there).
_MEASURED_CUDNN_VERSION = 91_900
_SAVED_GRU_VECTORS = 6
_EXTRA_BYTES = 256
_ALIGNMENT = 32  # of each of the buffers
_BYTES_PER_CELL = 8 << 20  # of each layer and direction, beside its buffers
_PERSISTENT_BACKWARD = {0: 9, 1: 9, 2: 12, 3: 14}  # hidden vectors of a row that the persistent algorithms add
_DROPOUT_BYTES_PER_THREAD = 24  # of the threads that the GPU holds at once: 6,488,064 bytes on an H100

RESERVE = (
    "Recurrent layers run on cuDNN, which keeps a reserve space for the backward pass: counted is what it cannot do "
    "without (gates, cell states and the outputs between layers), since the real size is not published."
)
WORKSPACE = "The workspace of cuDNN's recurrent layers is not published and not counted."
MEASURED_WORKSPACE = (
    "The workspace and the reserve space of cuDNN's recurrent layers are not published: counted by a rule that "
    "reproduces what cuDNN 9.19 requests on an H100; another GPU's or version's may differ."
)
DROPOUT = "The state of cuDNN's dropout between recurrent layers is counted as 2 MiB; it is slightly more."
COPIED_WEIGHTS = "Recurrent weights that are not parts of one buffer are copied into one at every call."


def is_acceptable(tensor: torch.Tensor) -> bool:
    """Return whether torch.backends.cudnn.is_acceptable is true: on the GPU, not bfloat16, and cuDNN enabled."""
    return kernels.get_cudnn_enabled() and tensor.is_cuda and tensor.dtype in DTYPES and tensor.numel() > 0


def is_measured(gpu: DeviceProperties) -> bool:
    """Return whether torch brings along the cuDNN whose reserve space and workspace were measured."""
    return cudnn_version(gpu.release) >= _MEASURED_CUDNN_VERSION


def _runs_on_cudnn(gpu: DeviceProperties, dtype: torch.dtype) -> bool:
    """Return whether cuDNN runs the dtype (use_cudnn, native/RNN.cpp): bfloat16 from cuDNN 9.13 and compute capability
    8.0 on (cuda/detail/CUDAHooks.cpp, supportsBFloat16RNNWithCuDNN), though torch.backends.cudnn.is_acceptable, by
    which parameters are flattened, says no."""
    takes_bfloat16 = gpu.compute_capability >= (8, 0) and cudnn_version(gpu.release) >= 91_300
    return dtype in DTYPES or (dtype is torch.bfloat16 and takes_bfloat16)


def _run_rnn(name: str, device_state: DeviceState, data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    acceptable = kernels.get_cudnn_enabled() and _runs_on_cudnn(device_state.gpu, data.dtype) and data.numel() > 0
    if kwargs or not acceptable or not device_state.is_on_gpu(data):
        return NotImplemented
    if isinstance(args[2], (list, tuple)):  # packed sequences: the third of the arguments is the weights
        batch_sizes, hidden, weights, biases, layers, dropout, training, bidirectional = args
        sizes, batch_first = [int(size) for size in batch_sizes.tolist()], False
    else:
        hidden, weights, biases, layers, dropout, training, bidirectional, batch_first = args
        sizes = []
    hx, cx = hidden if name == "lstm" else (hidden, None)
    assume = device_state.values.assume
    if is_measured(device_state.gpu):
        assume(MEASURED_WORKSPACE)
    else:
        assume(WORKSPACE)
        if training:
            assume(RESERVE)
    size, projected = hx.shape[2], 0
    if cx is not None and cx.shape[2] != size:
        size, projected = cx.shape[2], size
    per_layer = (4 if biases else 2) + bool(projected)
    packing = WeightLayout(MODES[name], data.shape[-1], size, projected, layers, bidirectional)
    weights = list(weights)
    buffer = packing.find_shared_buffer(weights)
    if torch.is_autocast_enabled("cuda") and torch.float32 in (data.dtype, weights[0].dtype):
        half = torch.get_autocast_dtype("cuda")
        data, hx = data.to(half), hx.to(half)
        cx = None if cx is None else cx.to(half)
        buffer, weights = _cast_weights(device_state, packing, weights, per_layer, half)
    elif buffer is None:
        assume(COPIED_WEIGHTS)
    state = _get_dropout_state(device_state, device_state.device_of(data)) if training and dropout > 0 else None
    options = (MODES[name], size, projected, layers, batch_first, dropout, training, bidirectional, sizes, state)
    output, hy, cy, _, _ = aten._cudnn_rnn(data, weights, per_layer, buffer, hx, cx, *options)
    return (output, hy, cy) if name == "lstm" else (output, hy)


for _name in MODES:
    composite(getattr(torch, _name))(functools.partial(_run_rnn, _name))


def _get_dropout_state(device_state: DeviceState, device: str) -> torch.Tensor:
    """Return the state of cuDNN's random numbers, made once on each GPU and never freed (get_dropout_state)."""
    key = f"state of cuDNN's dropout {device}"
    if key not in device_state.library_tensors:
        gpu, size = device_state.gpu, DROPOUT_STATE_BYTES
        if is_measured(gpu):
            size = gpu.num_sms * gpu.threads_per_sm * _DROPOUT_BYTES_PER_THREAD
        else:
            device_state.values.assume(DROPOUT)
        with device_state.factory_device_as(device):
            torch.empty((), dtype=torch.int64, device=META)  # the seed is drawn on the GPU
            device_state.library_tensors[key] = torch.empty(size, dtype=torch.uint8, device=META)
    return device_state.library_tensors[key]


def _cast_weights(
    device_state: DeviceState, packing: WeightLayout, weights: list[torch.Tensor], per_layer: int, dtype: torch.dtype
) -> Any:
    """Return a new half-precision buffer, and the weights cast into its parts, as autocast does at every call."""
    with device_state.factory_device_as(device_state.device_of(weights[0])):
        buffer = torch.zeros(packing.numel, dtype=dtype, device=META)
    views = packing.views(buffer, [weight.shape for weight in weights], per_layer)
    # Tensors of their own that share the buffer, not views of it, so that each has its own gradient.
    parts = [view.detach() for view in views]
    return buffer, [part.copy_(weight) for part, weight in zip(parts, weights, strict=True)]


class WeightLayout:
    """The layout of all weights of a recurrent layer in cuDNN's one buffer: matrices first, then both biases."""

    def __init__(
        self, mode: int, input_size: int, hidden_size: int, projected: int, layers: int, bidirectional: bool
    ) -> None:
        directions = 2 if bidirectional else 1
        rows = _GATES[mode] * hidden_size
        out = projected or hidden_size
        inputs = input_size + (layers - 1) * out * directions
        self.matrices = matrices = directions * (rows * (inputs + layers * out) + layers * projected * hidden_size)
        # Elements of the buffer: it has room for both biases even where the layer has none.
        self.numel = matrices + layers * directions * 2 * rows

    def find_shared_buffer(self, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the buffer that `weights` are parts of (try_get_weight_buf), or None."""
        with torch.DisableTorchFunction():
            first = weights[0].detach()
            storage = first.untyped_storage()
            if storage.nbytes() < self.numel * first.element_size():
                return None
            if any(weight.untyped_storage()._cdata != storage._cdata for weight in weights):
                return None
            return first.as_strided((self.numel,), (1,), 0)

    def views(self, buffer: torch.Tensor, shapes: Sequence[torch.Size], per_layer: int) -> list[torch.Tensor]:
        """Return the parts of `buffer` for weights of `shapes`, in the order of `nn.RNNBase._flat_weights`."""
        offsets = {True: 0, False: self.matrices}
        parts = []
        for shape in shapes:
            matrix = len(shape) == 2
            parts.append(buffer.narrow(0, offsets[matrix], shape.numel()).view(shape))
            offsets[matrix] += shape.numel()
        return parts


@kernel(aten._cudnn_rnn_flatten_weight, on_host=True)
def flatten_weight(launch: KernelContext) -> Any:
    """Make a buffer for all weights; every parameter becomes a part of the buffer, and its own storage is freed."""
    weights, per_layer, input_size, kind, hidden_size, projected, layers, _, bidirectional = launch.args
    packing = WeightLayout(kind, input_size, hidden_size, projected, layers, bidirectional)
    buffer = launch.new(packing.numel, weights[0].dtype)
    with torch.no_grad():
        parts = packing.views(buffer, [weight.shape for weight in weights], per_layer)
        for weight, part in zip(weights, parts, strict=True):
            launch.values.store.drop(weight.untyped_storage()._cdata)
            weight.set_(part)
    return buffer


def _read_shapes(args: Any) -> tuple[int, int, int, int]:
    """Return time steps, sequences, directions, and the rows of a packed input (0 for other inputs)."""
    data, batch_first, bidirectional, sizes = args[0], args[10], args[13], args[14]
    directions = 2 if bidirectional else 1
    if sizes:
        return len(sizes), sizes[0], directions, data.shape[0]
    steps, batch = data.shape[1::-1] if batch_first else data.shape[:2]
    return steps, batch, directions, 0


def _reserve_bytes(gpu: DeviceProperties, args: Any) -> int:
    """Return the bytes that the backward pass needs at least: cuDNN's reserve space, or a lower bound of it."""
    steps, batch, directions, rows = _read_shapes(args)
    data, kind, size, projected, layers, dropout = args[0], args[6], args[7], args[8], args[9], args[11]
    item, positions = data.element_size(), (rows or steps * batch) * directions
    if not is_measured(gpu):
        return int(positions * (layers * _SAVED_VECTORS[kind] * size + (layers - 1) * (projected or size)) * item)
    saved_vectors = layers * (_SAVED_GRU_VECTORS if kind == MODES["gru"] else _SAVED_VECTORS[kind]) * size
    if projected:
        saved_vectors += layers * (size + projected)
    output_values = positions * size
    mask = (
        round_up(output_values * directions // 8, _ALIGNMENT) if dropout else 0
    )  # a bit for each output between two layers
    saved_bytes = round_up(positions * saved_vectors * item, _ALIGNMENT) + round_up(
        (layers - 1) * output_values * item, _ALIGNMENT
    )
    return saved_bytes + (layers - 1) * mask + _EXTRA_BYTES


def _is_persistent(gpu: DeviceProperties, args: Any, forward: bool) -> bool:
    """Return whether a persistent algorithm runs (get_algo, native/cudnn/RNN.cpp); in bfloat16 and float64 cuDNN's
    workspace is that of the standard algorithm."""
    data, kind, size, projected, layers = args[0], args[6], args[7], args[8], args[9]
    if projected or args[14] or data.dtype not in (torch.float32, torch.float16):
        return False
    if size <= (192 if forward else 128) * (1 if kind in (MODES["lstm"], MODES["gru"]) else 2):
        return True  # CUDNN_RNN_ALGO_PERSIST_STATIC_SMALL_H
    batch, fits = _read_shapes(args)[1], layers == 1 and not args[13] and size <= 1024
    fits = fits and size % 128 == data.shape[-1] % 128 == 0 and batch % 8 == 0 and batch <= 128
    large, minor = gpu.compute_capability >= (8, 0) and gpu.num_sms >= 98, gpu.compute_capability[1]
    num_steps = kind == MODES["lstm"] or (kind != MODES["gru"] and (batch < 96 or size < 896))
    return data.dtype is torch.float16 and fits and num_steps and large and minor != 6  # CUDNN_RNN_ALGO_PERSIST_STATIC


def _workspace_bytes(launch: KernelContext, args: Any, forward: bool) -> int:
    """Return the bytes of cuDNN's workspace: in training those of the larger pass, forward or backward.

    `forward` says for which pass torch asks, which decides on the algorithm alone.
    """
    data, kind, size, projected, layers, dropout, train = (args[place] for place in (0, 6, 7, 8, 9, 11, 12))
    if not is_measured(launch.gpu) or not launch.device_state.workspaces:
        return 0
    steps, batch, directions, packed_rows = _read_shapes(args)
    rows, features, out = packed_rows or steps * batch, data.shape[-1], projected or size
    is_bidirectional, is_multilayer, is_lstm, gates = directions == 2, layers > 1, kind == MODES["lstm"], _GATES[kind]
    is_persistent = _is_persistent(launch.gpu, args, forward)
    matrices = WeightLayout(kind, features, size, projected, layers, is_bidirectional).matrices
    vectors, outputs, states = rows * size, rows * directions * size, layers * directions * batch * size

    def list_common_buffers(copies: int) -> list[tuple[int, int]]:
        """Return the buffers of weights and, unless sequences are packed, of copies of inputs, outputs and states."""
        buffers = [(1, matrices), (projected > 0, outputs)]
        if not packed_rows:
            buffers += [(copies, rows * features), (copies, rows * directions * out)]
            buffers += [(2 * copies, layers * directions * batch * out), (2 * copies * is_lstm, states)]
        return buffers

    # (how many buffers, elements of each)
    forward_pass = [
        *list_common_buffers(1),
        (train and dropout > 0 and is_multilayer and not is_bidirectional, vectors),
    ]
    if is_persistent:
        forward_pass += [
            (1, (3 * gates + 2 if is_bidirectional else 5 * gates) * outputs),
            (1, (4 if is_lstm else 2) * states),
            (is_bidirectional, states),
        ]
    else:
        gated = outputs if is_bidirectional else min(vectors, 256 * batch * size)  # of 256 time steps at once
        forward_pass += [
            (1, gates * gated),
            (is_bidirectional, 4 * vectors),
            (1, gates * states),
            (is_lstm, 2 * states),
            (is_bidirectional, 2 * states),
        ]
    backward_pass = [
        *list_common_buffers(2),
        (4 if is_bidirectional else 1, rows * max(size, features)),
    ]  # with gradients of what is copied
    backward_pass += [(1, (3 if is_lstm else 1) * states), (is_bidirectional, 2 * states)]
    if is_persistent:
        backward_pass += [(1, _PERSISTENT_BACKWARD[kind] * vectors), (not is_bidirectional, states)]
    if is_bidirectional or is_persistent or not is_multilayer:
        backward_pass += [(1 + is_multilayer, outputs)]
    else:  # the layers work at the same time, on some time steps each
        num_steps = 16 if batch <= 8 else 8 if batch <= 16 or steps >= 128 else 4 if batch <= 96 else 2
        backward_pass += [(1, min(rows, (num_steps * layers + max(num_steps, 8)) * batch) * size)]
    passes = [forward_pass, backward_pass] if train else [forward_pass]
    num_bytes = max(
        sum(count * round_up(each * data.element_size(), _ALIGNMENT) for count, each in buffers) for buffers in passes
    )
    lengths = 0 if packed_rows else round_up(8 * batch, _ALIGNMENT)
    return num_bytes + lengths + _EXTRA_BYTES + _BYTES_PER_CELL * layers * directions


@kernel(aten._cudnn_rnn)
def cudnn_rnn(launch: KernelContext) -> Any:
    """Make the output, the last hidden and cell states, and in training the reserve space."""
    args = launch.args
    data, _, _, buffer, hx, cx = args[:6]
    size, projected, layers, batch_first, train = args[7], args[8], args[9], args[10], args[12]
    steps, batch, directions, rows = _read_shapes(args)
    out = projected or size
    is_transposed = batch_first and not rows
    with launch.scratch(*contiguous(data.transpose(0, 1) if is_transposed else data)):
        shape = (rows, out * directions) if rows else (steps, batch, out * directions)
        output = launch.new(shape, data.dtype)
        hy = launch.new((layers * directions, batch, out), hx.dtype)
        cy = launch.new((0,) if cx is None else (layers * directions, batch, size), (hx if cx is None else cx).dtype)
        if buffer is None:
            packing = WeightLayout(args[6], data.shape[-1], size, projected, layers, args[13])
            buffer = launch.new(packing.numel, data.dtype)
        with launch.scratch(_workspace_bytes(launch, args, True)):
            reserve = launch.new(_reserve_bytes(launch.gpu, args) if train else 0, torch.uint8)
    return (output.transpose(0, 1) if is_transposed else output), hy, cy, reserve, buffer


@kernel(aten._cudnn_rnn_backward)
def cudnn_rnn_backward(launch: KernelContext) -> Any:
    """Make gradients of the input, the states and, as parts of one buffer, the weights. Missing output gradients are
    zeros during the call.

    A batch-first input is transposed for the gradient of the input, and again for that of the weights.
    """
    data, weights, per_layer, buffer, hx, cx, output, *grads = launch.args[:10]
    kind, size, projected, layers, batch_first, _, _, bidirectional, sizes, _, _, mask = launch.args[10:]
    if all(grad is None for grad in grads):
        return None, None, None, [None] * len(weights)
    is_transposed = batch_first and not sizes
    workspace = _workspace_bytes(launch, (data, *[None] * 5, *launch.args[10:]), False)
    missing_grads = [
        like for grad, like in zip(grads, (output, hx, cx), strict=True) if grad is None and like is not None
    ]
    contiguous_input = data.transpose(0, 1) if is_transposed else data
    grads_by_step = [grads[0].transpose(0, 1) if is_transposed and grads[0] is not None else grads[0], *grads[1:]]
    grad_weights: list[torch.Tensor | None] = [None] * len(weights)
    with launch.scratch(*(like.numel() * like.element_size() for like in missing_grads)):
        with launch.scratch(*contiguous(contiguous_input, *grads_by_step)):
            grad_data = launch.new(contiguous_input.shape, data.dtype)
            grad_hx = launch.new(hx.shape, hx.dtype)
            grad_cx = None if cx is None else launch.new(cx.shape, cx.dtype)
            launch.transients(workspace)
        if mask[3]:
            with launch.scratch(*contiguous(contiguous_input)):
                packing = WeightLayout(kind, data.shape[-1], size, projected, layers, bidirectional)
                if per_layer == 4 + bool(projected):
                    flat = launch.new(buffer.numel(), buffer.dtype)
                    launch.transients(workspace)
                    grad_weights = list(packing.views(flat, [weight.shape for weight in weights], per_layer))
                else:  # without biases, for which the buffer has room, they are copied out of it
                    with launch.scratch(buffer.numel() * buffer.element_size()):
                        launch.transients(workspace)
                        grad_weights = [launch.new(weight.shape, weight.dtype) for weight in weights]
    return (grad_data.transpose(0, 1) if is_transposed else grad_data), grad_hx, grad_cx, grad_weights


@kernel(aten._pack_padded_sequence, on_host=True)
def pack_padded_sequence(launch: KernelContext) -> Any:
    """Copy the rows of time steps of equal batch size where they are not contiguous, and concatenate them
    (PackedSequence.cpp). The lengths are on the host and stay there."""
    data, lengths, batch_first = launch.args
    if not data.is_meta or lengths.is_meta:
        return NotImplemented
    steps = data.transpose(0, 1) if batch_first else data
    copy_sizes: list[int] = []
    first_step = 0
    for length in sorted(set(lengths.tolist())):
        copy_sizes += contiguous(steps[first_step:length, : int((lengths >= length).sum())])
        first_step = length
    with launch.scratch(*copy_sizes):
        packed, batch_sizes = launch.func(data, lengths, batch_first)
        launch.record(packed)
    return packed, batch_sizes
