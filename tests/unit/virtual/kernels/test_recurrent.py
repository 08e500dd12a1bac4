"""Recurrent layers on cuDNN: one buffer of weights, one operator, gradients in one buffer."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.virtual import VirtualGpu
from memprof.virtual.device_properties import DeviceProperties
from memprof.virtual.kernels import recurrent

STEPS, BATCH, INPUT, HIDDEN = 5, 3, 6, 8


GPU = find_gpu("rtx-4090")


def made(gpu, first, op="_cudnn_rnn", *, hidden=False):
    return [
        storage.num_bytes
        for storage in gpu.trace.storages[first:]
        if gpu.trace.op(storage) == f"aten.{op}" and storage.hidden is hidden
    ]


def storages(tensors):
    return {tensor.untyped_storage()._cdata for tensor in tensors}


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"num_layers": 2, "bidirectional": True}, {"bias": False}])
def test_parameters_share_one_buffer_with_room_for_both_biases(gpu, kind, options):
    layer = kind(INPUT, HIDDEN, **options).cuda()
    parameters = list(layer.parameters())
    (buffer,) = storages(parameters)
    live = [
        gpu.trace.storages[index]
        for address, index in gpu.recorder.storages.index_by_address.items()
        if address == buffer
    ]
    gates = {nn.LSTM: 4, nn.GRU: 3, nn.RNN: 1}[kind]
    biases = options.get("num_layers", 1) * (2 if options.get("bidirectional") else 1) * 2 * gates * HIDDEN
    matrices = sum(parameter.numel() for parameter in parameters if parameter.dim() == 2)
    assert [storage.num_bytes for storage in live] == [4 * (matrices + biases)]
    # The storages that the parameters had before are gone: nothing else lives.
    assert gpu.recorder.storages.live_bytes == live[0].num_bytes
    assert len({parameter.data_ptr() for parameter in parameters}) == len(parameters)
    assert all(parameter.is_contiguous() and parameter.is_cuda for parameter in parameters)


def test_a_projected_lstm_shares_one_buffer_too(gpu):
    layer = nn.LSTM(INPUT, HIDDEN, proj_size=4).cuda()
    assert len(storages(layer.parameters())) == 1
    assert layer.weight_hr_l0.shape == (4, HIDDEN)
    output, (h, c) = layer(torch.randn(STEPS, BATCH, INPUT, device="cuda"))
    assert (output.shape, h.shape, c.shape) == ((STEPS, BATCH, 4), (1, BATCH, 4), (1, BATCH, HIDDEN))
    output.sum().backward()
    assert layer.weight_hr_l0.grad.shape == (4, HIDDEN)


@pytest.mark.usefixtures("recorded_release")
def test_an_lstm_makes_its_output_states_and_what_the_backward_needs(gpu):
    layer = nn.LSTM(INPUT, HIDDEN).cuda()
    data = torch.randn(STEPS, BATCH, INPUT, device="cuda")
    first = len(gpu.trace.storages)
    layer(data)
    state = 4 * BATCH * HIDDEN
    assert made(gpu, first) == [4 * STEPS * BATCH * HIDDEN, state, state, 4 * STEPS * BATCH * HIDDEN * 5 + 256]
    assert made(gpu, first, hidden=True) == []
    assert any("workspace" in sentence for sentence in gpu.trace.assumptions)


@pytest.mark.usefixtures("recorded_release")
def test_a_gru_of_two_layers_in_both_directions_keeps_the_output_between_them(gpu):
    layer = nn.GRU(INPUT, HIDDEN, num_layers=2, bidirectional=True).cuda()
    data = torch.randn(STEPS, BATCH, INPUT, device="cuda")
    first = len(gpu.trace.storages)
    output, state = layer(data)
    assert output.shape == (STEPS, BATCH, 2 * HIDDEN)
    assert state.shape == (4, BATCH, HIDDEN)
    kept = 4 * STEPS * BATCH * 2 * (2 * 6 * HIDDEN + HIDDEN) + 256
    assert made(gpu, first) == [4 * output.numel(), 4 * state.numel(), kept]


SHAPE = (256, 512, 2)
# What an H100 requested for two layers, 128 steps of 16 rows (torch 2.11.0+cu130, cuDNN 9.19): reserve and workspace.
MEASURED = [
    (nn.LSTM, torch.float32, 46_137_600, 55_181_696),
    (nn.GRU, torch.float32, 54_526_208, 46_989_696),
    (nn.RNN, torch.float32, 12_583_168, 38_338_944),
    (nn.LSTM, torch.bfloat16, 23_068_928, 35_979_648),
    (nn.GRU, torch.bfloat16, 27_263_232, 31_883_648),
    (nn.RNN, torch.bfloat16, 6_291_712, 27_558_272),
]


@pytest.mark.usefixtures("recorded_release")
@pytest.mark.parametrize(("kind", "dtype", "reserve", "workspace"), MEASURED)
def test_cudnn_takes_what_an_h100_was_asked_for(kind, dtype, reserve, workspace):
    with VirtualGpu(find_gpu("h100-80gb"), workspaces=True) as gpu:
        layer = kind(*SHAPE, device="cuda", dtype=dtype)
        data = torch.randn(128, 16, 256, device="cuda", dtype=dtype, requires_grad=True)
        first = len(gpu.trace.storages)
        layer(data)[0].sum().backward()
        # A bfloat16 layer's parameters are apart: a buffer for them is made at every call.
        buffers = made(gpu, first)[-2:-1] if dtype is torch.bfloat16 else []
        assert buffers == [2 * sum(weight.numel() for weight in layer.parameters())] * len(buffers)
        assert made(gpu, first)[-1] == reserve
        assert made(gpu, first, hidden=True) == [workspace]
        assert made(gpu, first, "_cudnn_rnn_backward", hidden=True)[-2:] == [workspace] * 2


# What cuDNN 9.19 answered on an H100 (cudnnGetRNNTempSpaceSizes): (steps, batch, features, hidden size, layers,
# directions), workspace of the forward and of the backward pass in training, of inference, and the reserve space.
ANSWERED = [
    # The largest hidden sizes for which torch chooses the persistent algorithm, and the next.
    (nn.LSTM, torch.float32, (40, 24, 96, 192, 2, 1), 34_988_480, 23_265_728, 34_988_480, 8_110_336),
    (nn.LSTM, torch.float32, (40, 24, 96, 193, 2, 1), 23_306_880, 23_306_880, 23_306_880, 8_152_576),
    (nn.RNN, torch.float32, (40, 24, 96, 384, 2, 1), 40_518_080, 24_814_016, 28_205_504, 4_423_936),
    (nn.RNN, torch.float32, (40, 24, 96, 385, 2, 1), 24_837_664, 24_837_664, 22_251_424, 4_435_456),
    (nn.GRU, torch.float32, (40, 24, 96, 128, 2, 1), 27_738_560, 27_738_560, 25_846_208, 6_390_016),
    (nn.GRU, torch.float32, (40, 24, 96, 129, 2, 1), 27_823_104, 20_070_720, 25_918_848, 6_439_936),
    (nn.GRU, torch.float16, (40, 24, 96, 64, 1, 1), 11_110_848, 11_110_848, 10_613_184, 737_536),
    # The other persistent algorithm.
    (nn.LSTM, torch.float16, (128, 16, 512, 512, 1, 1), 58_851_712, 58_851_712, 58_851_712, 10_486_016),
    # Time steps that the layers work on at the same time, by rows.
    (nn.RNN, torch.bfloat16, (40, 8, 96, 448, 2, 1), 19_409_216, 19_409_216, 18_745_664, 860_416),
    (nn.RNN, torch.bfloat16, (117, 9, 848, 577, 4, 1), 47_605_696, 47_605_696, 43_535_328, 8_506_432),
    (nn.RNN, torch.bfloat16, (40, 16, 96, 448, 2, 1), 20_521_344, 20_521_344, 19_423_616, 1_720_576),
    (nn.RNN, torch.bfloat16, (40, 24, 96, 448, 2, 1), 21_576_128, 21_576_128, 20_101_568, 2_580_736),
    (nn.RNN, torch.bfloat16, (125, 96, 129, 632, 2, 1), 74_188_800, 74_188_800, 53_497_920, 45_504_256),
    (nn.RNN, torch.bfloat16, (51, 98, 8, 856, 5, 1), 88_191_072, 88_191_072, 74_856_800, 77_009_440),
    (nn.RNN, torch.bfloat16, (40, 100, 96, 448, 2, 1), 32_327_712, 32_327_712, 26_542_112, 10_752_256),
    (nn.RNN, torch.bfloat16, (128, 24, 96, 448, 2, 1), 28_236_224, 28_236_224, 24_291_776, 8_257_792),
    # Many steps, both directions, many features.
    (nn.LSTM, torch.bfloat16, (1000, 24, 96, 448, 1, 1), 105_807_296, 105_807_296, 58_685_888, 107_520_256),
    (nn.GRU, torch.bfloat16, (40, 24, 96, 100, 2, 2), 36_957_120, 36_957_120, 36_772_800, 4_992_256),
    (nn.LSTM, torch.float32, (40, 24, 96, 64, 1, 2), 24_957_376, 24_957_376, 24_957_376, 2_457_856),
    (nn.RNN, torch.float64, (40, 24, 96, 448, 1, 2), 57_762_240, 57_762_240, 49_799_616, 6_881_536),
    (nn.LSTM, torch.bfloat16, (40, 24, 2000, 448, 2, 1), 42_820_032, 42_820_032, 37_333_440, 9_462_016),
]


@pytest.mark.usefixtures("recorded_release")
@pytest.mark.parametrize(("kind", "dtype", "shape", "forward", "backward", "inference", "reserve"), ANSWERED)
def test_cudnn_takes_what_it_answered_on_an_h100(kind, dtype, shape, forward, backward, inference, reserve):
    steps, batch, features, hidden, layers, directions = shape
    with VirtualGpu(find_gpu("h100-80gb"), workspaces=True) as gpu:
        layer = kind(features, hidden, layers, bidirectional=directions == 2, device="cuda", dtype=dtype)
        data = torch.randn(steps, batch, features, device="cuda", dtype=dtype)
        first = len(gpu.trace.storages)
        layer(data)[0].sum().backward()
        assert made(gpu, first)[-1] == reserve
        assert made(gpu, first, hidden=True) == [forward]
        assert made(gpu, first, "_cudnn_rnn_backward", hidden=True)[-2:] == [backward] * 2
        first = len(gpu.trace.storages)
        layer.eval()(data)
        assert made(gpu, first, hidden=True) == [inference]


# Recorded on the same GPU (recurrences.jsonl): the same four, with dropout or a projection too.
RECORDED = [
    (nn.LSTM, torch.float32, (20, 8, 96, 200, 2, 1), 0.0, 24, 18_175_808, 18_175_808, 18_175_808, 1_694_976),
    (nn.LSTM, torch.float16, (20, 8, 96, 160, 1, 1), 0.0, 0, 9_843_008, 9_028_928, 9_843_008, 256_256),
    (nn.GRU, torch.float16, (20, 16, 128, 256, 1, 1), 0.0, 0, 9_838_976, 9_838_976, 9_757_056, 983_296),
    (nn.LSTM, torch.float16, (20, 16, 128, 256, 1, 1), 0.0, 0, 12_763_520, 12_763_520, 12_763_520, 819_456),
    (nn.LSTM, torch.float32, (50, 128, 100, 33, 1, 1), 0.0, 0, 29_014_880, 29_014_880, 28_896_096, 4_224_256),
    (nn.LSTM, torch.float16, (20, 8, 96, 160, 2, 2), 0.3, 0, 37_097_792, 36_309_312, 37_097_792, 1_139_456),
    (nn.LSTM, torch.float32, (35, 20, 650, 650, 2, 1), 0.5, 0, 57_597_632, 57_597_632, 55_777_632, 20_077_152),
]
NUMBERS = {nn.RNN: 1, nn.LSTM: 2, nn.GRU: 3}
HOPPER = DeviceProperties((9, 0), 132, 2048, (2, 11))


def arguments(kind, dtype, shape, dropout=0.0, projection=0, training=True, batch_sizes=()):
    """Arguments of `_cudnn_rnn`; (steps, batch, features, hidden size, layers, directions) is `shape`."""
    steps, batch, features, hidden, layers, directions = shape
    data = torch.empty(steps, batch, features, dtype=dtype, device="meta")
    options = hidden, projection, layers, False, dropout, training, directions == 2, list(batch_sizes), None
    return (data, *[None] * 5, NUMBERS[kind], *options)


@pytest.mark.parametrize(
    ("kind", "dtype", "shape", "dropout", "projection", "forward", "backward", "inference", "reserve"), RECORDED
)
def test_space_of_an_h100(kind, dtype, shape, dropout, projection, forward, backward, inference, reserve):
    launch = SimpleNamespace(gpu=HOPPER, device_state=SimpleNamespace(workspaces=True))
    trained, evaluated = (arguments(kind, dtype, shape, dropout, projection, each) for each in (True, False))
    spaces = [(trained, True, forward), (trained, False, backward), (evaluated, True, inference)]
    for args, is_forward, num_bytes in spaces:
        assert recurrent._workspace_bytes(launch, args, is_forward) == num_bytes
    assert recurrent._reserve_bytes(HOPPER, trained) == reserve


def test_a_relu_takes_what_a_tanh_takes():
    launch = SimpleNamespace(gpu=HOPPER, device_state=SimpleNamespace(workspaces=True))
    for options in ((torch.float32, (40, 24, 96, 384, 2, 1)), (torch.float16, (40, 24, 128, 512, 1, 1))):
        tanh = arguments(nn.RNN, *options)
        relu = (*tanh[:6], 0, *tanh[7:])
        for is_forward in (True, False):
            sizes = [recurrent._workspace_bytes(launch, args, is_forward) for args in (relu, tanh)]
            assert sizes[0] == sizes[1]


@pytest.mark.parametrize(("kind", "shape", "options", "persistent"), [
    # One layer in one direction of up to 1,024, features and hidden size in steps of 128, rows of 8 up to 128.
    (nn.LSTM, (9, 8, 128, 1024, 1, 1), {}, True), (nn.LSTM, (9, 8, 128, 1152, 1, 1), {}, False),
    (nn.LSTM, (9, 8, 128, 512, 2, 1), {}, False), (nn.LSTM, (9, 8, 128, 512, 1, 2), {}, False),
    (nn.LSTM, (9, 8, 128, 500, 1, 1), {}, False), (nn.LSTM, (9, 8, 100, 512, 1, 1), {}, False),
    (nn.LSTM, (9, 8, 100, 484, 1, 1), {}, False), (nn.LSTM, (9, 9, 128, 512, 1, 1), {}, False),
    (nn.LSTM, (9, 128, 128, 512, 1, 1), {}, True), (nn.LSTM, (9, 136, 128, 512, 1, 1), {}, False),
    (nn.LSTM, (9, 8, 128, 512, 1, 1), {"dtype": torch.float32}, False),
    (nn.LSTM, (9, 8, 128, 512, 1, 1), {"projection": 24}, False),
    (nn.LSTM, (9, 8, 128, 512, 1, 1), {"batch_sizes": [8]}, False),
    # A GRU never is; others are with fewer than 96 rows or 896 hidden values.
    (nn.GRU, (9, 8, 128, 512, 1, 1), {}, False), (nn.RNN, (9, 88, 128, 1024, 1, 1), {}, True),
    (nn.RNN, (9, 96, 128, 896, 1, 1), {}, False), (nn.RNN, (9, 96, 128, 768, 1, 1), {}, True),
    # Small hidden sizes in any other case.
    (nn.RNN, (9, 7, 100, 384, 2, 2), {"dtype": torch.float32}, True), (nn.RNN, (9, 7, 100, 385, 2, 2), {}, False),
    (nn.LSTM, (9, 7, 100, 192, 2, 2), {}, True), (nn.LSTM, (9, 7, 100, 193, 2, 2), {}, False),
    (nn.GRU, (9, 7, 100, 128, 1, 1), {"is_forward": False}, True),
    (nn.GRU, (9, 7, 100, 129, 1, 1), {"is_forward": False}, False),
    (nn.LSTM, (9, 7, 100, 100, 1, 1), {"dtype": torch.bfloat16}, False),
    (nn.LSTM, (9, 7, 100, 100, 1, 1), {"projection": 24}, False),
    (nn.LSTM, (9, 7, 100, 100, 1, 1), {"batch_sizes": [7]}, False),
    # The GPU.
    (nn.LSTM, (9, 8, 128, 512, 1, 1), {"gpu": ((8, 0), 98)}, True),
    (nn.LSTM, (9, 8, 128, 512, 1, 1), {"gpu": ((8, 0), 97)}, False),
    (nn.LSTM, (9, 8, 128, 512, 1, 1), {"gpu": ((7, 5), 98)}, False),
    (nn.LSTM, (9, 8, 128, 512, 1, 1), {"gpu": ((8, 6), 98)}, False),
    (nn.LSTM, (9, 8, 128, 512, 1, 1), {"gpu": ((8, 9), 128)}, True),
])  # fmt: skip
def test_which_layers_run_persistent_algorithms(kind, shape, options, persistent):
    options = {"dtype": torch.float16, "is_forward": True, "gpu": ((9, 0), 132)} | options
    (capability, sms), is_forward = options.pop("gpu"), options.pop("is_forward")
    gpu = DeviceProperties(capability, sms, 2048, (2, 11))
    args = arguments(kind, options.pop("dtype"), shape, **options)
    assert recurrent._is_persistent(gpu, args, is_forward) is persistent


@pytest.mark.parametrize(("kind", "shape", "projection", "values"), [
    # Gates and cells of every layer, and the outputs between layers, for each position.
    (nn.LSTM, (5, 3, 6, 8, 1, 1), 0, 15 * 5 * 8), (nn.LSTM, (5, 3, 6, 8, 3, 2), 0, 30 * (3 * 5 * 8 + 2 * 8)),
    (nn.LSTM, (5, 3, 6, 8, 3, 1), 4, 15 * (3 * 5 * 8 + 2 * 4)), (nn.GRU, (5, 3, 6, 8, 2, 1), 0, 15 * (2 * 4 * 8 + 8)),
    (nn.RNN, (5, 3, 6, 8, 2, 1), 0, 15 * (2 * 8 + 8)),
])  # fmt: skip
def test_the_reserve_space_of_other_versions_is_what_the_backward_needs(kind, shape, projection, values):
    gpu = DeviceProperties((9, 0), 132, 2048, (2, 10))
    args = arguments(kind, torch.float16, shape, 0.0, projection)
    assert recurrent._reserve_bytes(gpu, args) == 2 * values
    measured = SimpleNamespace(gpu=gpu, device_state=SimpleNamespace(workspaces=True))
    uncounted = SimpleNamespace(gpu=HOPPER, device_state=SimpleNamespace(workspaces=False))
    assert recurrent._workspace_bytes(measured, args, True) == recurrent._workspace_bytes(uncounted, args, True) == 0


@pytest.mark.parametrize(("release", "says"), [((2, 10), "2 MiB"), ((2, 11), None)])
def test_what_other_versions_of_cudnn_take_is_said(gpu, release, says):
    gpu.dispatch_mode.gpu = dataclasses.replace(gpu.dispatch_mode.gpu, release=release)
    layer = nn.GRU(INPUT, HIDDEN, num_layers=2, dropout=0.1).cuda()
    first = len(gpu.trace.storages)
    layer(torch.randn(STEPS, BATCH, INPUT, device="cuda"))
    sizes = [storage.num_bytes for storage in gpu.trace.storages[first:]]
    assert ((2 << 20) in sizes) is (says is not None)
    assumptions = set(gpu.trace.assumptions)
    older = {recurrent.DROPOUT_ASSUMPTION, recurrent.WORKSPACE_ASSUMPTION, recurrent.RESERVE_ASSUMPTION}
    assert assumptions & (older | {recurrent.MEASURED_WORKSPACE_ASSUMPTION}) == (
        older if says else {recurrent.MEASURED_WORKSPACE_ASSUMPTION}
    )


def test_bfloat16_runs_on_cudnn_from_9_13_and_compute_capability_8_on():
    cases = [((8, 0), (2, 11)), ((7, 5), (2, 11)), ((8, 0), (2, 10))]
    gpus = [DeviceProperties(capability, 132, 2048, release) for capability, release in cases]
    assert [recurrent._runs_on_cudnn(gpu, torch.bfloat16) for gpu in gpus] == [True, False, False]
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert recurrent._runs_on_cudnn(gpus[2], dtype)
    assert not recurrent._runs_on_cudnn(gpus[0], torch.int64)


@pytest.mark.parametrize("name", ["relu", "tanh"])
def test_layers_without_gates_have_one_matrix_for_each_input(gpu, name):
    layer = nn.RNN(INPUT, HIDDEN, nonlinearity=name).cuda()
    (buffer,) = {weight.untyped_storage().nbytes() for weight in layer.parameters()}
    assert buffer == 4 * (HIDDEN * (INPUT + HIDDEN) + 2 * HIDDEN)
    first = len(gpu.trace.storages)
    layer(torch.randn(STEPS, BATCH, INPUT, device="cuda"))
    assert made(gpu, first)[:2] == [4 * STEPS * BATCH * HIDDEN, 4 * BATCH * HIDDEN]


@pytest.mark.usefixtures("recorded_release")
def test_packed_sequences_need_no_copies_in_the_workspace():
    with VirtualGpu(find_gpu("h100-80gb"), workspaces=True) as gpu:
        layer = nn.LSTM(527, 334, num_layers=3, device="cuda")
        lengths = torch.tensor([74, 59, 38, 29, 22, 11])
        packed = nn.utils.rnn.pack_padded_sequence(torch.randn(74, 6, 527, device="cuda"), lengths)
        first = len(gpu.trace.storages)
        layer(packed)
        assert made(gpu, first)[-1] == 5_292_192
        assert made(gpu, first, hidden=True) == [38_296_288]


def test_gradients_of_weights_without_biases_are_copied_out_of_the_buffer(gpu):
    layer = nn.GRU(INPUT, HIDDEN, bias=False).cuda()
    output, _ = layer(torch.randn(STEPS, BATCH, INPUT, device="cuda"))
    first = len(gpu.trace.storages)
    output.sum().backward()
    weights = [4 * weight.numel() for weight in layer.parameters()]
    assert made(gpu, first, "_cudnn_rnn_backward")[-2:] == weights
    # A buffer that has room for both biases, for the time of the call.
    assert made(gpu, first, "_cudnn_rnn_backward", hidden=True)[-1] == sum(weights) + 4 * 2 * 3 * HIDDEN
    assert len(storages(weight.grad for weight in layer.parameters())) == 2


@pytest.mark.usefixtures("recorded_release")
def test_dropout_adds_a_bit_and_a_value_for_each_output_between_layers():
    with VirtualGpu(find_gpu("h100-80gb"), workspaces=True) as gpu:
        layer = nn.LSTM(*SHAPE, dropout=0.1, device="cuda")
        first = len(gpu.trace.storages)
        layer(torch.randn(128, 16, 256, device="cuda"))
        assert made(gpu, first)[-1] == 46_268_672
        assert made(gpu, first, hidden=True) == [59_376_000]
        assert 6_488_064 in [storage.num_bytes for storage in gpu.trace.storages[first:]]


def test_evaluation_keeps_nothing_for_a_backward(gpu):
    layer = nn.LSTM(INPUT, HIDDEN).cuda().eval()
    data = torch.randn(STEPS, BATCH, INPUT, device="cuda")
    first = len(gpu.trace.storages)
    with torch.no_grad():
        layer(data)
    assert made(gpu, first) == [4 * STEPS * BATCH * HIDDEN, 4 * BATCH * HIDDEN, 4 * BATCH * HIDDEN]


def test_a_batch_first_layer_copies_its_input_and_returns_a_transposed_output(gpu):
    layer = nn.GRU(INPUT, HIDDEN, batch_first=True).cuda()
    data = torch.randn(BATCH, STEPS, INPUT, device="cuda", requires_grad=True)
    first = len(gpu.trace.storages)
    output, _ = layer(data)
    assert made(gpu, first, hidden=True) == [4 * data.numel()]
    assert output.shape == (BATCH, STEPS, HIDDEN)
    assert output.stride() == (HIDDEN, BATCH * HIDDEN, 1)
    first = len(gpu.trace.storages)
    output.sum().backward()
    assert data.grad.shape == data.shape
    # Zeros for the last state's gradient, then copies of the input, of its gradient, and of the input once more.
    inputs, state = 4 * data.numel(), 4 * BATCH * HIDDEN
    assert made(gpu, first, "_cudnn_rnn_backward", hidden=True) == [state, inputs, STEPS * state, inputs]


def test_gradients_of_all_weights_are_parts_of_one_buffer(gpu):
    layer = nn.LSTM(INPUT, HIDDEN, num_layers=2).cuda()
    output, _ = layer(torch.randn(STEPS, BATCH, INPUT, device="cuda"))
    first = len(gpu.trace.storages)
    output.backward(torch.ones_like(output))
    grads = [parameter.grad for parameter in layer.parameters()]
    (shared,) = storages(grads)
    assert shared
    assert all(grad.shape == parameter.shape for grad, parameter in zip(grads, layer.parameters(), strict=True))
    weights = 4 * sum(parameter.numel() for parameter in layer.parameters())
    state = 4 * 2 * BATCH * HIDDEN
    assert made(gpu, first, "_cudnn_rnn_backward") == [4 * STEPS * BATCH * INPUT, state, state, weights]
    # The gradients of the last states, which nobody used, are zeros for the time of the call.
    assert made(gpu, first, "_cudnn_rnn_backward", hidden=True) == [state, state]
    torch.optim.AdamW(layer.parameters()).step()
    layer(torch.randn(STEPS, BATCH, INPUT, device="cuda"))[0].sum().backward()


@pytest.mark.usefixtures("recorded_release")
@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_sequences_run_their_rows_alone(gpu, batch_first):
    layer = nn.LSTM(INPUT, HIDDEN, batch_first=batch_first).cuda()
    data = torch.randn(BATCH, STEPS, INPUT, device="cuda", requires_grad=True)
    padded = data if batch_first else data.transpose(0, 1).contiguous()
    first = len(gpu.trace.storages)
    packed = nn.utils.rnn.pack_padded_sequence(padded, torch.tensor([5, 3, 2]), batch_first=batch_first)
    assert packed.data.shape == (10, INPUT)
    # Two steps of three rows, one of two, two of one: rows that are not neighbours are copied before they are joined.
    copies = [4 * INPUT * rows for rows in ((6, 2) if batch_first else (2,))]
    assert made(gpu, first, "_pack_padded_sequence", hidden=True) == copies
    first = len(gpu.trace.storages)
    output, _ = layer(packed)
    state = 4 * BATCH * HIDDEN
    assert made(gpu, first) == [4 * 10 * HIDDEN, state, state, 4 * 10 * HIDDEN * 5 + 256]
    result, lengths = nn.utils.rnn.pad_packed_sequence(output, batch_first=batch_first)
    assert lengths.tolist() == [5, 3, 2]
    result.sum().backward()
    assert data.grad.shape == data.shape
    assert not gpu.trace.mismatches


@pytest.mark.usefixtures("recorded_release")
def test_dropout_between_layers_keeps_its_state_once(gpu):
    layer = nn.GRU(INPUT, HIDDEN, num_layers=2, dropout=0.1).cuda()
    data = torch.randn(STEPS, BATCH, INPUT, device="cuda")
    first = len(gpu.trace.storages)
    layer(data)
    layer(data)
    state = 24 * GPU.num_sms * 1536
    sizes = [storage.num_bytes for storage in gpu.trace.storages[first:]]
    assert sizes.count(state) == 1 and sizes[sizes.index(state) - 1] == 8  # behind the seed


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_copies_the_weights_into_a_half_precision_buffer(gpu, dtype):
    layer = nn.LSTM(INPUT, HIDDEN).cuda()
    data = torch.randn(STEPS, BATCH, INPUT, device="cuda")
    first = len(gpu.trace.storages)
    with torch.autocast("cuda", dtype):
        output, _ = layer(data)
    assert output.dtype is dtype
    buffer = 2 * sum(parameter.numel() for parameter in layer.parameters())
    assert made(gpu, first, "zeros")[-1] == buffer
    output.sum().backward()
    assert all(parameter.grad.dtype is torch.float32 for parameter in layer.parameters())


def test_weights_apart_are_copied_into_a_buffer_at_every_call(gpu):
    weights = [parameter.detach().clone().requires_grad_() for parameter in nn.LSTM(INPUT, HIDDEN).cuda().parameters()]
    data = torch.randn(STEPS, BATCH, INPUT, device="cuda")
    state = torch.zeros(1, BATCH, HIDDEN, device="cuda")
    first = len(gpu.trace.storages)
    torch.lstm(data, (state, state), weights, True, 1, 0.0, True, False, False)[0].sum().backward()
    assert made(gpu, first)[3] == 4 * sum(weight.numel() for weight in weights)
    assert weights[0].grad.shape == weights[0].shape
    assert any("copied into one" in sentence for sentence in gpu.trace.assumptions)


@pytest.mark.parametrize("why", ["disabled", "bfloat16"])
def test_without_cudnn_a_layer_runs_step_by_step(why):
    # Of compute capability 7.5, on which cuDNN runs no layer in bfloat16.
    enabled = torch.backends.cudnn.flags(enabled=why != "disabled")
    with VirtualGpu(find_gpu("t4"), workspaces=False) as gpu, enabled:
        layer = nn.LSTM(INPUT, HIDDEN).cuda()
        if why == "bfloat16":
            layer = layer.bfloat16()
        assert len(storages(layer.parameters())) == 4
        data = torch.randn(STEPS, BATCH, INPUT, device="cuda", dtype=layer.weight_ih_l0.dtype)
        first = len(gpu.trace.storages)
        layer(data)[0].sum().backward()
        assert made(gpu, first) == []
        assert layer.weight_ih_l0.grad.shape == layer.weight_ih_l0.shape
