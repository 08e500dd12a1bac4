"""Operators that transformers' architectures use and that once ended their run (tests/benchmarks/architectures.py)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from memprof.device.catalog import find_gpu
from memprof.trace.events import FailureKind, Role
from memprof.virtual import VirtualGpu

CUDA = torch.device("cuda", 0)


# -- CTC: no meta kernel ----------------------------------------------------------------------------------------------

FRAMES, BATCH, CLASSES = 20, 2, 10


@pytest.mark.parametrize(
    "targets",
    [torch.ones(BATCH, 7, dtype=torch.int64), torch.ones(9, dtype=torch.int64)],
    ids=["padded", "concatenated"],
)
@pytest.mark.parametrize("as_tensors", [True, False])
def test_ctc_loss_trains(gpu, targets, as_tensors):
    lengths, target_lengths = (FRAMES, FRAMES), (5, 4)
    if as_tensors:
        lengths, target_lengths = (torch.tensor(each, device="cuda") for each in (lengths, target_lengths))
    log_probs = torch.randn(FRAMES, BATCH, CLASSES, device="cuda").requires_grad_()
    loss = nn.functional.ctc_loss(log_probs, targets.to("cuda"), lengths, target_lengths)
    assert loss.shape == ()
    assert loss.device == CUDA
    loss.backward()
    assert log_probs.grad.shape == log_probs.shape
    assert log_probs.grad.is_cuda


def test_ctc_loss_keeps_alpha_for_the_longest_target(gpu):
    log_probs = torch.randn(FRAMES, BATCH, CLASSES, device="cuda")
    targets = torch.ones(BATCH, 7, dtype=torch.int64, device="cuda")
    lengths = torch.tensor([FRAMES, FRAMES], device="cuda"), torch.tensor([5, 4], device="cuda")
    before = gpu.recorder.storages.live_bytes
    loss, alpha = torch.ops.aten._ctc_loss(log_probs, targets, *lengths)
    # The longest target that there is, not the width of the padded matrix: as the real operator does.
    real = torch.ops.aten._ctc_loss(
        torch.randn(FRAMES, BATCH, CLASSES), torch.ones(BATCH, 7, dtype=torch.int64), (FRAMES, FRAMES), (5, 4)
    )
    assert [loss.shape, alpha.shape] == [each.shape for each in real]
    assert gpu.recorder.storages.live_bytes - before == 4 * (loss.numel() + alpha.numel())


def test_ctc_targets_of_unknown_length_are_as_long_as_they_can_be(gpu):
    log_probs = torch.randn(FRAMES, BATCH, CLASSES, device="cuda")
    unknown = (torch.rand(BATCH, device="cuda") * 5).long()
    lengths = torch.tensor([FRAMES, FRAMES], device="cuda")
    targets = torch.ones(BATCH, 7, dtype=torch.int64, device="cuda")
    _, alpha = torch.ops.aten._ctc_loss(log_probs, targets, lengths, unknown)
    assert alpha.shape == (BATCH, FRAMES, 2 * 7 + 1)
    assert any("CTC" in sentence for sentence in gpu.trace.assumptions)


def test_ctc_backward_takes_beta_as_a_temporary(gpu):
    log_probs = torch.randn(FRAMES, BATCH, CLASSES, device="cuda").requires_grad_()
    targets = torch.ones(BATCH, 7, dtype=torch.int64, device="cuda")
    loss = nn.functional.ctc_loss(log_probs, targets, (FRAMES, FRAMES), (5, 4))
    first = len(gpu.trace.storages)
    loss.backward()
    sizes = [
        storage.num_bytes for storage in gpu.trace.storages[first:] if "_ctc_loss_backward" in gpu.trace.op(storage)
    ]
    assert sizes[:2] == [4 * BATCH * FRAMES * (2 * 5 + 1), 4 * log_probs.numel()]


# -- tensors whose shape changes in place ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        (lambda t: t.t_(), (3, 2)),
        (lambda t: t.transpose_(0, 1), (3, 2)),
        (lambda t: t.swapaxes_(0, 1), (3, 2)),
        (lambda t: t.unsqueeze_(0), (1, 2, 3)),
        (lambda t: t.as_strided_((6,), (1,)), (6,)),
    ],
)
def test_a_shape_changed_in_place_changes_every_time(gpu, change, shape):
    for _ in range(3):
        tensor = torch.empty(2, 3, device="cuda")
        change(tensor)
        assert tensor.shape == shape


def test_orthogonal_initialisation_of_several_wide_matrices(gpu):
    for _ in range(3):
        weight = nn.init.orthogonal_(torch.empty(4, 16, device="cuda"))
        assert weight.shape == (4, 16)


# -- a number on the host, and host tensors where only a number may be -------------------------------------------------


def test_masked_fill_takes_a_number_from_the_host(gpu):
    data = torch.ones(4, 4, device="cuda", requires_grad=True)
    mask = torch.eye(4, device="cuda") > 0
    filled = data.masked_fill(mask, torch.tensor(-1.0))
    assert filled.device == CUDA
    filled.sum().backward()
    assert data.grad.is_cuda
    in_place = torch.zeros(4, dtype=torch.int64, device="cuda")
    in_place.masked_fill_(torch.tensor([True, False, True, False], device="cuda"), torch.tensor(7))
    assert in_place.tolist() == [7, 0, 7, 0]
    assert not gpu.trace.mismatches


def test_a_model_left_on_the_host_is_reported_and_trains_on(gpu):
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(2, 4, device="cuda")).sum().backward()
    assert len(gpu.trace.mismatches) == 1
    assert layer.weight.grad.device == torch.device("cpu")
    optimizer.step()


def test_an_activation_left_on_the_host_is_reported_and_differentiated(gpu):
    weight = torch.ones(4, requires_grad=True)
    (weight * 2 + torch.ones(4, device="cuda", requires_grad=True)).sum().backward()
    assert len(gpu.trace.mismatches) == 1
    assert weight.grad.device == torch.device("cpu")


def test_a_host_parameter_of_an_operator_with_several_results_is_reported_and_differentiated(gpu):
    weight = torch.ones(4, requires_grad=True)
    torch.native_layer_norm(torch.ones(2, 4, device="cuda"), [4], weight, None, 1e-5)[0].sum().backward()
    assert len(gpu.trace.mismatches) == 1
    assert weight.grad.device == torch.device("cpu")


def test_a_host_parameter_assigned_at_a_mask_is_reported(gpu):
    data = torch.zeros(4, 4, device="cuda", requires_grad=True) * 2
    parameter = nn.Parameter(torch.ones(4))
    data[torch.tensor([True, False, True, False], device="cuda")] = parameter
    assert len(gpu.trace.mismatches) == 1
    data.sum().backward()
    assert parameter.grad.shape == (4,)


def test_a_host_parameter_may_be_assigned_to_a_slice(gpu):
    data = torch.zeros(4, 4, device="cuda", requires_grad=True) * 2
    parameter = nn.Parameter(torch.ones(4))
    data[1] = parameter
    data.sum().backward()
    assert parameter.grad.shape == (4,)
    assert not gpu.trace.mismatches


# -- torch.func --------------------------------------------------------------------------------------------------------


def test_tensors_inside_vmap_know_their_device(gpu):
    rows = torch.arange(3, device="cuda")

    def double(row):
        assert row.device == CUDA
        assert row.is_cuda
        return row.to(rows.device) * 2

    assert torch.vmap(double)(rows).tolist() == [0, 2, 4]


def test_tensors_inside_vmap_can_be_printed(gpu):
    printed = []

    def double(row):
        printed.append(str(row))
        return row * 2

    torch.vmap(double)(torch.arange(3, device="cuda"))
    assert "BatchedTensor" in printed[0] and "[0, 1, 2]" in printed[0]


def test_gradients_for_each_sample_of_a_module(gpu):
    """The module is called with wrappers for input and parameters, and returns one; the parameters are named."""
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).cuda()
    seen = []
    model.register_forward_hook(lambda module, args, output: seen.append(output.device))
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}
    data, labels = torch.randn(5, 4, device="cuda"), torch.randint(0, 3, (5,), device="cuda")

    def loss(parameters, row, label):
        output = torch.func.functional_call(model, parameters, (row[None],))
        return nn.functional.cross_entropy(output, label[None])

    for _ in range(3):
        grads = torch.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(parameters, data, labels)
    shapes = {name: tuple(grad.shape) for name, grad in grads.items()}
    assert shapes == {"0.weight": (5, 8, 4), "0.bias": (5, 8), "2.weight": (5, 3, 8), "2.bias": (5, 3)}
    assert seen == [CUDA] * 3
    owners = gpu.trace.owners.values()
    assert {owner.name for owner in owners if owner.role is Role.PARAMETER} == set(parameters)


def test_a_jacobian_of_a_module(gpu):
    model = nn.Linear(4, 3).cuda()
    row = torch.randn(4, device="cuda")
    assert torch.func.jacrev(model)(row).shape == (3, 4)
    assert torch.func.jacfwd(model)(row).shape == (3, 4)
    assert torch.func.hessian(lambda row: model(row).sum())(row).shape == (4, 4)


def test_an_ensemble_is_called_at_once(gpu):
    """Under vmap torch forbids a parameter's `.data`."""
    models = [nn.Linear(4, 3).cuda() for _ in range(2)]
    parameters, _ = torch.func.stack_module_state(models)
    data = torch.randn(5, 4, device="cuda")
    empty = nn.Linear(4, 3, device="meta")
    made = torch.vmap(lambda parameters: torch.func.functional_call(empty, parameters, (data,)))(parameters)
    assert made.shape == (2, 5, 3) and made.is_cuda


@pytest.mark.parametrize("rows", [(5, 4), (5, 2, 4), (5, 2, 6, 4)])
@pytest.mark.parametrize("with_bias", [False, True])
def test_a_linear_layer_under_vmap(gpu, rows, with_bias):
    weight, bias = torch.randn(5, 3, 4, device="cuda"), torch.randn(5, 3, device="cuda")
    data = torch.randn(rows, device="cuda")
    if with_bias:
        made = torch.vmap(nn.functional.linear)(data, weight, bias)
    else:
        made = torch.vmap(lambda row, weight: nn.functional.linear(row, weight, bias[0]))(data, weight)
    assert made.shape == (*rows[:-1], 3)


def test_a_module_that_fails_before_it_is_known_is_a_failure_of_the_run():
    class Model(nn.Linear):
        def get_output_embeddings(self):
            raise RuntimeError("not built yet")

    gpu = VirtualGpu(find_gpu("a100-80gb"))
    model = Model(2, 2)
    with pytest.raises(RuntimeError, match="not built yet"), gpu:
        model(torch.ones(2))
    assert gpu.trace.failure is not None and gpu.trace.failure.kind is FailureKind.ERROR
    assert gpu.trace.failure.module is None
