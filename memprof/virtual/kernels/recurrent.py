"""Recurrent layers as cuDNN runs them: one buffer for all weights, one operator for all layers and time steps.

Sources: native/RNN.cpp (choice of cuDNN), native/cudnn/RNN.cpp (buffers, outputs, gradients), native/Autocast
(autocast_mode.cpp, cudnn/RNN: weights cast into a new buffer), torch/nn/modules/rnn.py (flatten_parameters).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from memprof.torch_private import kernels
from memprof.units import round_up
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.device_state import DeviceState
from memprof.virtual.kernel_context import KernelContext
from memprof.virtual.kernels.copies import copy_bytes
from memprof.virtual.kernels.registry import META, aten, composite, kernel

MODES = {"rnn_relu": 0, "rnn_tanh": 1, "lstm": 2, "gru": 3}  # kind of layer -> its number in cuDNN (cudnnRNNMode_t)
# Hidden-sized vectors that the backward needs of a time step: the gates, an LSTM's cell, a GRU's hidden candidate.
_NUM_SAVED_VECTORS = {0: 1, 1: 1, 2: 5, 3: 4}
_NUM_GATES = {0: 1, 1: 1, 2: 4, 3: 3}
CUDNN_DTYPES = (torch.float16, torch.float32, torch.float64)
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

RESERVE_ASSUMPTION = (
    "Recurrent layers run on cuDNN, which keeps a reserve space for the backward pass: counted is what it cannot do "
    "without (gates, cell states and the outputs between layers), since the real size is not published."
)
WORKSPACE_ASSUMPTION = "The workspace of cuDNN's recurrent layers is not published and not counted."
MEASURED_WORKSPACE_ASSUMPTION = (
    "The workspace and the reserve space of cuDNN's recurrent layers are not published: counted by a rule that "
    "reproduces what cuDNN 9.19 requests on an H100; another GPU's or version's may differ."
)
DROPOUT_ASSUMPTION = "The state of cuDNN's dropout between recurrent layers is counted as 2 MiB; it is slightly more."
COPIED_WEIGHTS_ASSUMPTION = "Recurrent weights that are not parts of one buffer are copied into one at every call."


def is_acceptable(tensor: torch.Tensor) -> bool:
    """Return what torch.backends.cudnn.is_acceptable returns: on the GPU, not bfloat16, and cuDNN enabled."""
    return kernels.get_cudnn_enabled() and tensor.is_cuda and tensor.dtype in CUDNN_DTYPES and tensor.numel() > 0


def is_cudnn_measured(gpu: DeviceProperties) -> bool:
    """Return whether the GPU's torch release has the cuDNN version whose reserve space and workspace were measured."""
    return gpu.cudnn_version >= _MEASURED_CUDNN_VERSION


def _runs_on_cudnn(gpu: DeviceProperties, dtype: torch.dtype) -> bool:
    """Return whether cuDNN supports `dtype` (use_cudnn, native/RNN.cpp): bfloat16 from cuDNN 9.13 and compute
    capability 8.0 on (cuda/detail/CUDAHooks.cpp, supportsBFloat16RNNWithCuDNN). torch.backends.cudnn.is_acceptable,
    which decides whether parameters are flattened, still returns False for bfloat16."""
    if gpu.device_type != "cuda":
        return False
    supports_bfloat16 = gpu.compute_capability >= (8, 0) and gpu.cudnn_version >= 91_300
    return dtype in CUDNN_DTYPES or (dtype is torch.bfloat16 and supports_bfloat16)


def _run_rnn(name: str, device_state: DeviceState, data: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    is_supported = kernels.get_cudnn_enabled() and _runs_on_cudnn(device_state.gpu, data.dtype) and data.numel() > 0
    if kwargs or not is_supported or not device_state.is_on_gpu(data):
        return NotImplemented
    if isinstance(args[2], (list, tuple)):  # packed sequences: the third of the arguments is the weights
        size_tensor, hidden, weights, biases, layers, dropout, training, bidirectional = args
        batch_sizes, batch_first = [int(hidden_size) for hidden_size in size_tensor.tolist()], False
    else:
        hidden, weights, biases, layers, dropout, training, bidirectional, batch_first = args
        batch_sizes = []
    hx, cx = hidden if name == "lstm" else (hidden, None)
    assume = device_state.values.assume
    if is_cudnn_measured(device_state.gpu):
        assume(MEASURED_WORKSPACE_ASSUMPTION)
    else:
        assume(WORKSPACE_ASSUMPTION)
        if training:
            assume(RESERVE_ASSUMPTION)
    hidden_size, proj_size = hx.shape[2], 0
    if cx is not None and cx.shape[2] != hidden_size:
        hidden_size, proj_size = cx.shape[2], hidden_size
    weights_per_layer = (4 if biases else 2) + bool(proj_size)
    layout = WeightLayout(MODES[name], data.shape[-1], hidden_size, proj_size, layers, bidirectional)
    weights = list(weights)
    buffer = layout.find_shared_buffer(weights)
    if torch.is_autocast_enabled("cuda") and torch.float32 in (data.dtype, weights[0].dtype):
        autocast_dtype = torch.get_autocast_dtype("cuda")
        data, hx = data.to(autocast_dtype), hx.to(autocast_dtype)
        cx = None if cx is None else cx.to(autocast_dtype)
        buffer, weights = _cast_weights(device_state, layout, weights, weights_per_layer, autocast_dtype)
    elif buffer is None:
        assume(COPIED_WEIGHTS_ASSUMPTION)
    dropout_state = _get_dropout_state(device_state, device_state.device_of(data)) if training and dropout > 0 else None
    sizes, flags = (hidden_size, proj_size, layers), (batch_first, dropout, training, bidirectional)
    options = (MODES[name], *sizes, *flags, batch_sizes, dropout_state)
    output, hy, cy, _, _ = aten._cudnn_rnn(data, weights, weights_per_layer, buffer, hx, cx, *options)
    return (output, hy, cy) if name == "lstm" else (output, hy)


for _name in MODES:
    composite(getattr(torch, _name))(functools.partial(_run_rnn, _name))


def _get_dropout_state(device_state: DeviceState, device: str) -> torch.Tensor:
    """Return the random state of cuDNN's dropout, allocated once on each GPU and never freed (get_dropout_state)."""
    key = f"state of cuDNN's dropout {device}"
    if key not in device_state.library_tensors:
        gpu, size = device_state.gpu, DROPOUT_STATE_BYTES
        if is_cudnn_measured(gpu):
            size = gpu.num_sms * gpu.threads_per_sm * _DROPOUT_BYTES_PER_THREAD
        else:
            device_state.values.assume(DROPOUT_ASSUMPTION)
        with device_state.factory_device_as(device):
            torch.empty((), dtype=torch.int64, device=META)  # the seed is drawn on the GPU
            device_state.library_tensors[key] = torch.empty(size, dtype=torch.uint8, device=META)
    return device_state.library_tensors[key]


def _cast_weights(
    device_state: DeviceState, layout: WeightLayout, weights: list[torch.Tensor], per_layer: int, dtype: torch.dtype
) -> Any:
    """Return a new half-precision buffer and the weights cast into it, as autocast does at every call."""
    with device_state.factory_device_as(device_state.device_of(weights[0])):
        buffer = torch.zeros(layout.numel, dtype=dtype, device=META)
    views = layout.make_views(buffer, [weight.shape for weight in weights], per_layer)
    # Tensors of their own that share the buffer, not views of it, so that each has its own gradient.
    copies = [view.detach() for view in views]
    return buffer, [part.copy_(weight) for part, weight in zip(copies, weights, strict=True)]


class WeightLayout:
    """Layout of all weights of a recurrent layer in cuDNN's single buffer: all matrices first, then all biases."""

    def __init__(
        self, mode: int, input_size: int, hidden_size: int, proj_size: int, layers: int, bidirectional: bool
    ) -> None:
        directions = 2 if bidirectional else 1
        rows = _NUM_GATES[mode] * hidden_size
        out = proj_size or hidden_size
        num_inputs = input_size + (layers - 1) * out * directions
        self.matrices = matrices = directions * (rows * (num_inputs + layers * out) + layers * proj_size * hidden_size)
        # Elements of the buffer: it has room for both biases even where the layer has none.
        self.numel = matrices + layers * directions * 2 * rows

    def find_shared_buffer(self, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return the buffer that holds all `weights` (try_get_weight_buf), or None."""
        with torch.DisableTorchFunction():
            first = weights[0].detach()
            storage = first.untyped_storage()
            if storage.nbytes() < self.numel * first.element_size():
                return None
            if any(weight.untyped_storage()._cdata != storage._cdata for weight in weights):
                return None
            return first.as_strided((self.numel,), (1,), 0)

    def make_views(self, buffer: torch.Tensor, shapes: Sequence[torch.Size], per_layer: int) -> list[torch.Tensor]:
        """Return views of `buffer` for weights of `shapes`, in the order of `nn.RNNBase._flat_weights`."""
        offsets = {True: 0, False: self.matrices}
        views = []
        for shape in shapes:
            is_matrix = len(shape) == 2
            views.append(buffer.narrow(0, offsets[is_matrix], shape.numel()).view(shape))
            offsets[is_matrix] += shape.numel()
        return views


@kernel(aten._cudnn_rnn_flatten_weight, on_host=True)
def flatten_weight(launch: KernelContext) -> Any:
    """Allocate a buffer for all weights; every parameter becomes a view of it, and its former storage is freed."""
    weights, weights_per_layer, input_size, mode, hidden_size, proj_size, num_layers, _, bidirectional = launch.args
    layout = WeightLayout(mode, input_size, hidden_size, proj_size, num_layers, bidirectional)
    buffer = launch.new(layout.numel, weights[0].dtype)
    with torch.no_grad():
        views = layout.make_views(buffer, [weight.shape for weight in weights], weights_per_layer)
        for weight, part in zip(weights, views, strict=True):
            launch.values.store.drop(weight.untyped_storage()._cdata)
            weight.set_(part)
    return buffer


def _read_shapes(args: Any) -> tuple[int, int, int, int]:
    """Return (time steps, batch size, directions, rows of a packed input or 0) from `args` of `_cudnn_rnn`."""
    data, batch_first, bidirectional, batch_sizes = args[0], args[10], args[13], args[14]
    num_directions = 2 if bidirectional else 1
    if batch_sizes:
        return len(batch_sizes), batch_sizes[0], num_directions, data.shape[0]
    num_steps, batch = data.shape[1::-1] if batch_first else data.shape[:2]
    return num_steps, batch, num_directions, 0


def _reserve_bytes(gpu: DeviceProperties, args: Any) -> int:
    """Return the bytes of cuDNN's reserve space for the backward pass; of other cuDNN versions a lower bound."""
    num_steps, batch, num_directions, packed_rows = _read_shapes(args)
    data, mode, hidden_size, proj_size, layers, dropout = args[0], args[6], args[7], args[8], args[9], args[11]
    itemsize, positions = data.element_size(), (packed_rows or num_steps * batch) * num_directions
    if not is_cudnn_measured(gpu):
        layer_outputs = (layers - 1) * (proj_size or hidden_size)
        return int(positions * (layers * _NUM_SAVED_VECTORS[mode] * hidden_size + layer_outputs) * itemsize)
    saved_vectors = layers * (_SAVED_GRU_VECTORS if mode == MODES["gru"] else _NUM_SAVED_VECTORS[mode]) * hidden_size
    if proj_size:
        saved_vectors += layers * (hidden_size + proj_size)
    output_values = positions * hidden_size
    # A bit for each output between two layers.
    mask_bytes = round_up(output_values * num_directions // 8, _ALIGNMENT) if dropout else 0
    saved_bytes = round_up(positions * saved_vectors * itemsize, _ALIGNMENT)
    saved_bytes += round_up((layers - 1) * output_values * itemsize, _ALIGNMENT)
    return saved_bytes + (layers - 1) * mask_bytes + _EXTRA_BYTES


def _is_persistent(gpu: DeviceProperties, args: Any, is_forward: bool) -> bool:
    """Return whether cuDNN runs a persistent algorithm (get_algo, native/cudnn/RNN.cpp). In bfloat16 and float64, its
    workspace is that of the standard algorithm."""
    data, mode, hidden_size, proj_size, num_layers = args[0], args[6], args[7], args[8], args[9]
    if proj_size or args[14] or data.dtype not in (torch.float32, torch.float16):
        return False
    if hidden_size <= (192 if is_forward else 128) * (1 if mode in (MODES["lstm"], MODES["gru"]) else 2):
        return True  # CUDNN_RNN_ALGO_PERSIST_STATIC_SMALL_H
    batch, is_small = _read_shapes(args)[1], num_layers == 1 and not args[13] and hidden_size <= 1024
    is_small = is_small and hidden_size % 128 == data.shape[-1] % 128 == 0 and batch % 8 == 0 and batch <= 128
    is_big, minor = gpu.compute_capability >= (8, 0) and gpu.num_sms >= 98, gpu.compute_capability[1]
    is_fast = mode == MODES["lstm"] or (mode != MODES["gru"] and (batch < 96 or hidden_size < 896))
    # CUDNN_RNN_ALGO_PERSIST_STATIC
    return data.dtype is torch.float16 and is_small and is_fast and is_big and minor != 6


def _workspace_bytes(launch: KernelContext, args: Any, is_forward: bool) -> int:
    """Return the bytes of cuDNN's workspace; in training, the larger one of forward and backward pass.

    `is_forward` is the pass for which torch requests the workspace; only the algorithm depends on it.
    """
    data, mode, hidden_size, proj_size, layers, dropout, is_training = (args[i] for i in (0, 6, 7, 8, 9, 11, 12))
    if not is_cudnn_measured(launch.gpu) or not launch.device_state.workspaces:
        return 0
    steps, batch, directions, packed_rows = _read_shapes(args)
    rows, input_size, output_size = packed_rows or steps * batch, data.shape[-1], proj_size or hidden_size
    is_bidirectional, is_multilayer = directions == 2, layers > 1
    is_lstm, gates = mode == MODES["lstm"], _NUM_GATES[mode]
    is_persistent = _is_persistent(launch.gpu, args, is_forward)
    matrices = WeightLayout(mode, input_size, hidden_size, proj_size, layers, is_bidirectional).matrices
    vectors, outputs = rows * hidden_size, rows * directions * hidden_size
    states = layers * directions * batch * hidden_size

    def list_common_buffers(copies: int) -> list[tuple[int, int]]:
        """Return (number of buffers, elements of each) of weights and, unless packed, of copied inputs and outputs."""
        buffers = [(1, matrices), (proj_size > 0, outputs)]
        if not packed_rows:
            buffers += [(copies, rows * input_size), (copies, rows * directions * output_size)]
            buffers += [(2 * copies, layers * directions * batch * output_size), (2 * copies * is_lstm, states)]
        return buffers

    # (number of buffers, elements of each)
    forward_pass = [
        *list_common_buffers(1),
        (is_training and dropout > 0 and is_multilayer and not is_bidirectional, vectors),
    ]
    if is_persistent:
        forward_pass += [
            (1, (3 * gates + 2 if is_bidirectional else 5 * gates) * outputs),
            (1, (4 if is_lstm else 2) * states),
            (is_bidirectional, states),
        ]
    else:
        # Of 256 time steps at once.
        gate_values = outputs if is_bidirectional else min(vectors, 256 * batch * hidden_size)
        forward_pass += [
            (1, gates * gate_values),
            (is_bidirectional, 4 * vectors),
            (1, gates * states),
            (is_lstm, 2 * states),
            (is_bidirectional, 2 * states),
        ]
    # Two copies: values and gradients.
    backward_pass = [*list_common_buffers(2), (4 if is_bidirectional else 1, rows * max(hidden_size, input_size))]
    backward_pass += [(1, (3 if is_lstm else 1) * states), (is_bidirectional, 2 * states)]
    if is_persistent:
        backward_pass += [(1, _PERSISTENT_BACKWARD[mode] * vectors), (not is_bidirectional, states)]
    if is_bidirectional or is_persistent or not is_multilayer:
        backward_pass += [(1 + is_multilayer, outputs)]
    else:  # the layers work at the same time, on some time steps each
        num_steps = 16 if batch <= 8 else 8 if batch <= 16 or steps >= 128 else 4 if batch <= 96 else 2
        backward_pass += [(1, min(rows, (num_steps * layers + max(num_steps, 8)) * batch) * hidden_size)]
    passes = [forward_pass, backward_pass] if is_training else [forward_pass]
    num_bytes = max(
        sum(count * round_up(n * data.element_size(), _ALIGNMENT) for count, n in buffers) for buffers in passes
    )
    lengths_bytes = 0 if packed_rows else round_up(8 * batch, _ALIGNMENT)
    return num_bytes + lengths_bytes + _EXTRA_BYTES + _BYTES_PER_CELL * layers * directions


@kernel(aten._cudnn_rnn)
def cudnn_rnn(launch: KernelContext) -> Any:
    """Allocate the output, the last hidden and cell states and, in training, the reserve space."""
    args = launch.args
    data, _, _, buffer, hx, cx = args[:6]
    hidden_size, proj_size, layers, batch_first, is_training = args[7], args[8], args[9], args[10], args[12]
    steps, batch, directions, rows = _read_shapes(args)
    output_size = proj_size or hidden_size
    is_transposed = batch_first and not rows
    with launch.scratch(*copy_bytes(data.transpose(0, 1) if is_transposed else data)):
        shape = (rows, output_size * directions) if rows else (steps, batch, output_size * directions)
        output = launch.new(shape, data.dtype)
        hy = launch.new((layers * directions, batch, output_size), hx.dtype)
        cell_shape = (0,) if cx is None else (layers * directions, batch, hidden_size)
        cy = launch.new(cell_shape, (hx if cx is None else cx).dtype)
        if buffer is None:
            layout = WeightLayout(args[6], data.shape[-1], hidden_size, proj_size, layers, args[13])
            buffer = launch.new(layout.numel, data.dtype)
        with launch.scratch(_workspace_bytes(launch, args, True)):
            reserve_space = launch.new(_reserve_bytes(launch.gpu, args) if is_training else 0, torch.uint8)
    return (output.transpose(0, 1) if is_transposed else output), hy, cy, reserve_space, buffer


@kernel(aten._cudnn_rnn_backward)
def cudnn_rnn_backward(launch: KernelContext) -> Any:
    """Allocate gradients of the input, of the states and, as views of one buffer, of the weights. Missing output
    gradients are zeros during the call.

    A batch-first input is transposed for the gradient of the input, and again for that of the weights.
    """
    data, weights, weights_per_layer, buffer, hx, cx, output, *grads = launch.args[:10]
    mode, hidden_size, proj_size, layers, batch_first, _, _, bidirectional, batch_sizes, _, _, mask = launch.args[10:]
    if all(grad is None for grad in grads):
        return None, None, None, [None] * len(weights)
    is_transposed = batch_first and not batch_sizes
    workspace_bytes = _workspace_bytes(launch, (data, *[None] * 5, *launch.args[10:]), False)
    missing_grads = [
        like for grad, like in zip(grads, (output, hx, cx), strict=True) if grad is None and like is not None
    ]
    contiguous_input = data.transpose(0, 1) if is_transposed else data
    grads_by_step = [grads[0].transpose(0, 1) if is_transposed and grads[0] is not None else grads[0], *grads[1:]]
    grad_weights: list[torch.Tensor | None] = [None] * len(weights)
    with launch.scratch(*(like.numel() * like.element_size() for like in missing_grads)):
        with launch.scratch(*copy_bytes(contiguous_input, *grads_by_step)):
            grad_data = launch.new(contiguous_input.shape, data.dtype)
            grad_hx = launch.new(hx.shape, hx.dtype)
            grad_cx = None if cx is None else launch.new(cx.shape, cx.dtype)
            launch.transients(workspace_bytes)
        if mask[3]:
            with launch.scratch(*copy_bytes(contiguous_input)):
                layout = WeightLayout(mode, data.shape[-1], hidden_size, proj_size, layers, bidirectional)
                if weights_per_layer == 4 + bool(proj_size):
                    buffer_grad = launch.new(buffer.numel(), buffer.dtype)
                    launch.transients(workspace_bytes)
                    shapes = [weight.shape for weight in weights]
                    grad_weights = list(layout.make_views(buffer_grad, shapes, weights_per_layer))
                else:  # without biases, for which the buffer has room, they are copied out of it
                    with launch.scratch(buffer.numel() * buffer.element_size()):
                        launch.transients(workspace_bytes)
                        grad_weights = [launch.new(weight.shape, weight.dtype) for weight in weights]
    return (grad_data.transpose(0, 1) if is_transposed else grad_data), grad_hx, grad_cx, grad_weights


@kernel(aten._pack_padded_sequence, on_host=True)
def pack_padded_sequence(launch: KernelContext) -> Any:
    """Copy the rows of time steps with equal batch size if they are not contiguous, and concatenate all rows
    (PackedSequence.cpp). The lengths stay on the host."""
    data, lengths, batch_first = launch.args
    if not data.is_meta or lengths.is_meta:
        return NotImplemented
    data_by_step = data.transpose(0, 1) if batch_first else data
    copied_bytes: list[int] = []
    first_step = 0
    for length in sorted(set(lengths.tolist())):
        copied_bytes += copy_bytes(data_by_step[first_step:length, : int((lengths >= length).sum())])
        first_step = length
    with launch.scratch(*copied_bytes):
        packed, batch_sizes = launch.func(data, lengths, batch_first)
        launch.record(packed)
    return packed, batch_sizes
