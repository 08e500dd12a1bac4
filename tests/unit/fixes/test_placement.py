"""device-placement, expandable-segments and streamed-batches."""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

import memprof
from memprof.errors import UsageError
from memprof.fixes.device_placement import move_stray_tensors
from memprof.fixes.expandable_segments import split_settings
from tests.unit.fixes import models

Pair = collections.namedtuple("Pair", "cos sin")


class Rotary(nn.Module):
    """Case study 5, in its forms: positions made in the forward, a cache that grows there, and caches made before."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        inv_freq = 1.0 / (10000 ** (torch.arange(0, 64, 2).float() / 64))
        self.register_buffer("inv_freq", inv_freq, persistent=False)
        made = torch.outer(torch.arange(16).float(), inv_freq)
        self.plain = made
        self.listed = [made, [made]]
        self.named = {"cos": made, "pair": Pair(made, made)}
        self.grown: torch.Tensor | None = None

    def forward(self, length: int) -> torch.Tensor:
        if self.kind == "positions":
            return torch.outer(torch.arange(length, dtype=self.inv_freq.dtype), self.inv_freq)
        if self.kind == "grown":
            if self.grown is None:
                self.grown = torch.arange(length).float()[:, None].expand(length, 32).contiguous()
            return self.grown * self.inv_freq
        found = {
            "plain": self.plain,
            "listed": self.listed[1][0],
            "named": self.named["cos"],
            "pair": self.named["pair"].sin,
        }
        return found[self.kind][:length] * self.inv_freq


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.proj = nn.Linear(32, 32)
        self.rotary = Rotary(kind)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(x) * self.rotary(x.shape[-2])


KINDS = ("positions", "grown", "plain", "listed", "named", "pair")


def mismatches(kind: str, fixes: list[str], before_the_move: bool = False) -> list[object]:
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = Model(kind)
        if not before_the_move:
            model.to("cuda")
        if fixes:
            memprof.apply(model, fixes)
        model.to("cuda")
        model(torch.zeros(2, 12, 32, device="cuda")).sum().backward()
        if kind != "positions" and "device-placement" in fixes:
            stored = model.rotary.grown if kind == "grown" else model.rotary.plain
            assert stored.is_cuda
    return [finding for finding in gpu.report().findings if finding.id == "device-mismatch"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_mismatch_before_and_none_after(kind):
    [finding] = mismatches(kind, [])
    assert finding.fixes == ("device-placement",)
    assert not mismatches(kind, ["device-placement"])
    assert not mismatches(kind, ["device-placement"], before_the_move=True)


def test_what_runs_again_in_the_backward_is_placed_too():
    with memprof.virtual_gpu("h100-80gb") as gpu:
        model = nn.Sequential(Rotated(), Rotated()).to("cuda")
        memprof.apply(model, ["device-placement", "activation-checkpointing"])
        model(torch.zeros(2, 12, 32, device="cuda")).sum().backward()
    assert not [finding for finding in gpu.report().findings if finding.id == "device-mismatch"]


class Rotated(Model):
    def __init__(self) -> None:
        super().__init__("positions")


def test_undo_puts_everything_back():
    with memprof.virtual_gpu("h100-80gb"):
        model = Model("plain").to("cuda")
        held = (model.rotary.plain, model.rotary.listed[0], model.rotary.named["pair"].cos)
        applied = memprof.apply(model, "device-placement")
        assert "5 tensors were moved" in str(applied) or "6 tensors were moved" in str(applied)
        applied.undo()
        assert held[0] is model.rotary.plain and held[1] is model.rotary.listed[0]
        assert not model.rotary.named["pair"].cos.is_cuda
        assert "forward" not in vars(model) and "forward" not in vars(model.rotary)


def test_what_is_to_stay_on_the_host_stays():
    with memprof.virtual_gpu("h100-80gb"):
        model = Model("plain").to("cuda")
        memprof.apply(model, "device-placement", keep_on_host="rotary.listed*, rotary.named*")
        assert model.rotary.plain.is_cuda
        assert not model.rotary.listed[0].is_cuda and not model.rotary.named["cos"].is_cuda


def test_a_loop_of_containers_ends():
    model = Model("plain")
    model.rotary.listed.append(model.rotary.listed)
    assert move_stray_tensors(model) == []


def test_it_needs_a_device():
    with pytest.raises(UsageError, match="no parameters or buffers"):
        memprof.apply(nn.ReLU(), "device-placement")
    with pytest.raises(UsageError, match="do not go together"):
        memprof.apply(models.llama(), ["device-placement", "cpu-offload-weights"])


# -- expandable-segments -----------------------------------------------------------------------------------------------


def fragmented(before: bool = False, after: bool = False, **options: object):
    """Growing tensors, each too large for what the one before has left."""
    with memprof.virtual_gpu("h100-80gb", **options) as gpu:
        model = nn.Linear(4, 4)
        applied = memprof.apply(model, "expandable-segments") if before else None
        for size in range(30, 60, 3):
            torch.zeros(size << 20, dtype=torch.uint8, device="cuda")
        if after:
            applied = memprof.apply(model, "expandable-segments")
        if applied is not None:
            reserved = torch.cuda.memory_reserved()
    report = gpu.report()
    return report.peak.reserved_bytes, report, reserved if applied else None


def test_it_takes_effect_on_the_virtual_gpu():
    plain, _, _ = fragmented()
    set_before, report, said = fragmented(before=True)
    wanted, _, _ = fragmented(alloc_conf="expandable_segments:True")
    assert set_before == wanted == said < plain / 2
    assert report.allocator.alloc_conf == "expandable_segments:True"
    assert not [sentence for sentence in report.assumptions if "The program set allocator settings" in sentence]


def test_set_late_it_is_said_to_hold_from_the_beginning():
    reserved, report, _ = fragmented(after=True)
    assert reserved == fragmented(alloc_conf="expandable_segments:True")[0]
    assert [sentence for sentence in report.assumptions if "The program set allocator settings" in sentence]


def test_other_settings_stay_and_undo_restores():
    with memprof.virtual_gpu("h100-80gb", alloc_conf="max_split_size_mb:64,expandable_segments:False") as gpu:
        applied = memprof.apply(nn.Linear(4, 4), "expandable-segments")
        assert gpu._settings.now.config.expandable_segments
        assert gpu._settings.now.config.max_split_size == 64 << 20
        with pytest.raises(UsageError, match="already on"):
            memprof.apply(nn.Linear(4, 4), "expandable-segments")
        applied.undo()
        assert gpu._settings.now.config.max_split_size == 64 << 20
        assert not gpu._settings.now.config.expandable_segments


def test_without_cuda_it_says_what_to_write():
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(UsageError) as raised:
        memprof.apply(nn.Linear(4, 4), "expandable-segments")
    assert "export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in str(raised.value)


def test_settings_are_split_at_the_commas_between_them():
    text = "a:1, roundup_power2_divisions:[256:1,512:2,>:4],b:2"
    assert split_settings(text) == ["a:1", "roundup_power2_divisions:[256:1,512:2,>:4]", "b:2"]
    assert split_settings("") == []


# -- streamed-batches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dataset",
    [
        torch.arange(35).view(7, 5),
        [torch.arange(5) + 5 * index for index in range(7)],
        torch.utils.data.TensorDataset(torch.arange(35).view(7, 5)),
        {"ids": torch.arange(35).view(7, 5), "labels": list(range(7))},
    ],
    ids=["tensor", "list", "Dataset", "columns"],
)
def test_all_samples_come_in_order_and_again(dataset):
    batches = memprof.apply(nn.Linear(2, 2), "streamed-batches", dataset=dataset, batch_size=3).results[
        "streamed-batches"
    ]
    assert len(batches) == 3
    for _ in range(2):
        parts = [b["ids"] if isinstance(b, dict) else b[0] if isinstance(b, list) else b for b in batches]
        assert [len(part) for part in parts] == [3, 3, 1]
        assert torch.equal(torch.cat(parts), torch.arange(35).view(7, 5))


def test_one_batch_at_a_time_in_host_memory():
    """Samples that are made when requested: nothing but one batch is ever there."""

    class Made(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, index):
            return torch.full((256, 1024), float(index))

    def peak(streamed):
        with memprof.virtual_gpu("h100-80gb") as gpu:
            model = nn.Linear(1024, 1).to("cuda")
            if streamed:
                batches = memprof.apply(model, "streamed-batches", dataset=Made(), batch_size=4).results[
                    "streamed-batches"
                ]
            else:
                batches = list(torch.utils.data.DataLoader(Made(), batch_size=4))
            for batch in batches:
                model(batch.to("cuda"))
        return gpu.report().host_peak_bytes

    sample = 256 * 1024 * 4
    assert peak(False) >= 64 * sample
    assert peak(True) <= 12 * sample


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({}, "needs an option"),
        ({"dataset": [], "batch_size": 2}, "no samples"),
        ({"dataset": [1], "batch_size": 0}, "at least 1"),
        ({"dataset": iter([1])}, "must be samples"),
        ({"dataset": "text"}, "must be samples"),
        ({"dataset": {"a": [1], "b": [1, 2]}}, "different lengths"),
    ],
)
def test_what_is_no_set_of_samples(given, problem):
    with pytest.raises(UsageError) as raised:
        memprof.apply(nn.Linear(2, 2), "streamed-batches", **given)
    assert problem in str(raised.value)
