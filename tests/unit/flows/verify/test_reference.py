"""The float64 reference: nothing in it is smaller, though the model casts."""

from __future__ import annotations

import copy
from collections import namedtuple

import pytest
import torch
from torch.nn import functional

from memprof.flows.verify.peaks import measure_peak
from memprof.flows.verify.reference import compute_in_float64
from memprof.flows.verify.specimens import SPECIMENS, make_batches


@pytest.mark.parametrize("name", SPECIMENS)
def test_every_small_model_stays_in_float64(name):
    specimen = SPECIMENS[name]
    torch.manual_seed(0)
    model = specimen.build().float()
    original = {case: model(**make_batches(specimen, case, 0)[0])[0].detach().double() for case in specimen.cases}
    reference = copy.deepcopy(model).double()
    for case in specimen.cases:
        narrow, batch = set(), make_batches(specimen, case, 0)[0]  # drawn outside: the default dtype is another inside
        with compute_in_float64(narrow):
            loss = reference(**batch)[0]
            loss.backward()
        assert loss.dtype == torch.float64
        assert narrow == set()
        if case == "all ignored":
            assert loss.isnan()
        else:
            assert 0 < float((original[case] - loss.detach()).abs()) < 2e-6
    assert torch.get_default_dtype() == torch.float32


def test_casts_of_every_kind():
    x = torch.tensor([1 + 2**-40], dtype=torch.float64)
    with compute_in_float64():
        made = [
            x.float(), x.half(), x.bfloat16(), x.to(torch.float32), x.to(dtype=torch.bfloat16), x.to("cpu", torch.half),
            x.type(torch.float32), x.type("torch.FloatTensor"), functional.softmax(x, 0, dtype=torch.float32) * x,
            torch.tensor([1 + 2**-40]), torch.tensor([1 + 2**-40], dtype=torch.float32),
            torch.ones(1, dtype=torch.float16) * x,
        ]  # fmt: skip
        assert (x > 0).to(torch.int32).dtype == torch.int32
    for tensor in made:
        assert tensor.dtype == torch.float64
        assert torch.equal(tensor, x)
    assert x.float().dtype == torch.float32


def test_what_stays_small_is_named():
    class Rounding(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            with torch._C.DisableTorchFunction():
                return x.float()

        @staticmethod
        def backward(ctx, grad):
            return grad

    narrow = set()
    with compute_in_float64(narrow):
        Rounding.apply(torch.ones(1))
    assert narrow == {"aten._to_copy.default"}


def test_the_measured_peak_is_the_sum_of_what_lives():
    def program(device):
        kept = torch.zeros(1 << 20)  # 4 MiB
        torch.zeros(1 << 21)  # 8 MiB, gone at once
        (kept + 1).sum()

    assert measure_peak(program, "cpu") == 12 << 20


def test_dtypes_inside_of_containers():
    Pair = namedtuple("Pair", "first second")

    def asked(x, *args, **options):
        if torch.overrides.has_torch_function((x,)):
            return torch.overrides.handle_torch_function(asked, (x,), x, *args, **options)
        return args, options

    small, wide = torch.float32, torch.float64
    with compute_in_float64():
        args, options = asked(
            torch.ones(1),
            (small, [torch.half, 3]),
            {"a": torch.bfloat16},
            Pair("torch.FloatTensor", torch.int8),
            o=small,
        )
    assert args == ((wide, [wide, 3]), {"a": wide}, Pair("torch.DoubleTensor", torch.int8))
    assert options == {"o": wide}
