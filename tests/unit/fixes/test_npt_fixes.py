"""low-rank-npt and cpu-offload-npt-delta: the same numbers, and no delta on the GPU."""

from __future__ import annotations

import copy

import pytest
import torch

import memprof
from memprof.errors import UsageError
from memprof.spec import TargetSpec
from memprof.workload.npt import NptComponent
from memprof.workload.npt_layers import add_npt
from tests.unit.fixes import models


def with_npt(mode: str = "dense", num_ranks: int | None = None, **config: object) -> torch.nn.Module:
    model = models.llama(**config)
    torch.manual_seed(2)
    add_npt(model, TargetSpec(model="llama", npt=mode, npt_rank=2, npt_num_ranks=num_ranks))
    return model


@pytest.mark.parametrize("num_ranks", [None, 3])
@pytest.mark.parametrize(
    ("name", "mode"),
    [("low-rank-npt", mode) for mode in ("dense", "per-token", "chunked")] + [("cpu-offload-npt-delta", "dense")],
)
def test_the_same_numbers(name, mode, num_ranks):
    model = with_npt(mode, num_ranks).double()
    twin = copy.deepcopy(model)
    memprof.apply(twin, name)
    for one in (model, twin):
        one(**models.batch()).logits.square().mean().backward()
    found, wanted = ({n: p.grad for n, p in one.named_parameters() if p.grad is not None} for one in (twin, model))
    assert wanted
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-14)


def test_only_what_is_not_low_rank_is_switched():
    model = with_npt()
    first = next(m for m in model.modules() if isinstance(m, NptComponent))
    first.mode = "low-rank"
    applied = memprof.apply(model, "low-rank-npt")
    assert "3 NPT components: dense became low-rank" in str(applied)
    applied.undo()
    assert [m.mode for m in model.modules() if isinstance(m, NptComponent)] == ["low-rank", *["dense"] * 3]


def test_deltas_are_on_the_gpu_one_at_a_time():
    def peak(name, layers):
        with memprof.virtual_gpu("h100-80gb") as gpu:
            model = with_npt(hidden_size=64, intermediate_size=256, num_hidden_layers=layers).to("cuda")
            if name:
                memprof.apply(model, name)
            ids = torch.zeros(1, 256, dtype=torch.int64, device="cuda")
            model(input_ids=ids, labels=ids).loss.backward()
        return gpu.report().peak.allocated_bytes, gpu.report().host_peak_bytes

    delta = 256 * 64 * 256 * 4
    plain, offloaded, low_rank = peak(None, 8), peak("cpu-offload-npt-delta", 8), peak("low-rank-npt", 8)
    assert plain[0] - offloaded[0] >= 6 * delta
    # The first layer's input has no gradient, so that its delta is not kept.
    assert plain[1] < delta and offloaded[1] >= 7 * delta
    # Eight more layers have their weights and activations, and no more deltas.
    assert peak("cpu-offload-npt-delta", 16)[0] - offloaded[0] < 2 * delta
    assert low_rank[0] < offloaded[0] - delta


@pytest.mark.parametrize(
    ("names", "mode", "problem"),
    [
        ("low-rank-npt", "low-rank", "already on"),
        ("low-rank-npt", None, "no NPT component"),
        ("cpu-offload-npt-delta", None, "no NPT component"),
        ("cpu-offload-npt-delta", "chunked", "no delta is kept"),
        ("cpu-offload-npt-delta,low-rank-npt", "dense", "do not go together"),
        ("cpu-offload-npt-delta,activation-checkpointing", "dense", "do not go together"),
    ],
)
def test_wrong_use(names, mode, problem):
    model = models.llama() if mode is None else with_npt(mode)
    before = models.state(model)
    with pytest.raises(UsageError) as raised:
        memprof.apply(model, names)
    assert problem in str(raised.value)
    assert models.state(model) == before
