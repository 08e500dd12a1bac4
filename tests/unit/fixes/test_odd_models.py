"""`apply` on models as people have them: wrapped, compiled, copied, pickled, hooked, in any mode, with any outputs."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional

import memprof
from memprof.errors import MemprofError, UsageError
from memprof.fixes.catalog import FIXES, Numerics
from tests.lanes import by_day
from tests.unit.fixes import models

# The fixes that put forwards in place of the model's.
FORWARDS = ["chunked-loss", "activation-checkpointing", "cpu-offload-activations", "cpu-offload-weights"]


def loss_and_gradients(model):
    loss = model(**models.batch())[0]
    loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return loss.detach(), found


def assert_alike(found, wanted):
    torch.testing.assert_close(found[0], wanted[0], rtol=2e-6, atol=0)
    assert found[1].keys() == wanted[1].keys()
    for name, grad in wanted[1].items():
        torch.testing.assert_close(found[1][name], grad, rtol=1e-4, atol=1e-6)


# -- copies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
@pytest.mark.parametrize("name", FORWARDS)
def test_a_copy_of_an_applied_model(name, how):
    """It computes with its own weights, and the fix is on in it."""
    model = models.llama()
    wanted = loss_and_gradients(model)
    memprof.apply(model, name)
    if how == "deepcopy":
        twin = copy.deepcopy(model)
    elif how == "pickle":
        twin = pickle.loads(pickle.dumps(model))
    else:
        file = io.BytesIO()
        torch.save(model, file)
        file.seek(0)
        twin = torch.load(file, weights_only=False)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(float("nan"))
    assert_alike(loss_and_gradients(twin), wanted)
    with pytest.raises(UsageError, match=r"already on|a forward of its own"):
        memprof.apply(twin, name)


RENAME = {"lora", "qlora", "8-bit-weights", "4-bit-weights"}  # These put other modules in the place of layers.
# A package, a GPU, NPT components, a dataset.
NEED_MORE = {"8-bit-optimizer", "expandable-segments", "low-rank-npt", "cpu-offload-npt-delta", "streamed-batches"}


@pytest.mark.parametrize("name", [name for name in FIXES if name not in RENAME | NEED_MORE])
def test_a_state_dict_has_the_names_of_before(name):
    options = {
        "vocabulary-cap": {"vocab_size": 90}, "freeze": {"frozen": "*norm*"},
        "optimizer-in-backward": {"optimizer": torch.optim.SGD},
    }.get(name, {})  # fmt: skip
    model = models.llama(attn_implementation="eager")
    names = list(model.state_dict())
    applied = memprof.apply(model, name, **options)
    assert list(model.state_dict()) == names
    state = {key: value.clone() for key, value in model.state_dict().items()}
    model.load_state_dict(state)
    applied.undo()
    assert list(model.state_dict()) == names


# -- modes -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORWARDS)
def test_eval_and_no_grad(name):
    model = models.llama().eval()
    with torch.no_grad():
        wanted = model(**models.batch())
    with memprof.apply(model, name):
        with torch.no_grad():
            found = model(**models.batch())
            torch.testing.assert_close(found.loss, wanted.loss, rtol=2e-6, atol=0)
            assert torch.equal(found.logits + 0, wanted.logits)
        with torch.inference_mode():
            torch.testing.assert_close(model(**models.batch()).loss, wanted.loss, rtol=2e-6, atol=0)
        assert not model.training
        trained = loss_and_gradients(model)
    assert_alike(trained, loss_and_gradients(model))


@pytest.mark.parametrize("name", FORWARDS)
def test_frozen_altogether(name):
    model = models.llama().requires_grad_(False)
    wanted = model(**models.batch()).loss
    with memprof.apply(model, name):
        found = model(**models.batch()).loss
    torch.testing.assert_close(found.detach(), wanted, rtol=2e-6, atol=0)


# -- outputs -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Output:
    loss: torch.Tensor
    logits: torch.Tensor


class Any(models.Handwritten):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, input_ids, labels=None):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        logits = self.head(x)
        loss = functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        if self.kind == "dict":
            return {"loss": loss, "logits": logits}
        if self.kind == "dataclass":
            return Output(loss, logits)
        return (loss, logits) if self.kind == "tuple" else [loss, (logits,)]


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "dataclass"])
def test_any_output(kind):
    model = Any(kind)

    def parts(output):
        if kind == "dict":
            return output["loss"], output["logits"]
        if kind == "dataclass":
            return output.loss, output.logits
        return (output[0], output[1][0]) if kind == "list" else output

    wanted = parts(model(**models.batch()))
    with memprof.apply(model, ["chunked-loss", "activation-checkpointing"], chunk_size=4):
        loss, logits = parts(model(**models.batch()))
        torch.testing.assert_close(loss, wanted[0], rtol=2e-6, atol=0)
        assert torch.equal(logits.detach(), wanted[1].detach())


# -- wrapped -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORWARDS)
def test_a_wrapped_model_is_refused(name):
    for wrapped in (torch.compile(models.llama(), backend="eager"), nn.DataParallel(models.llama())):
        before = models.state(wrapped)
        with pytest.raises(UsageError, match=r"before torch\.compile|do not go with torch\.nn\.DataParallel"):
            memprof.apply(wrapped, name)
        assert models.state(wrapped) == before


@pytest.mark.parametrize("name", by_day(["chunked-loss", "activation-checkpointing"]))
def test_compiled_afterwards(name):
    model = models.llama()
    wanted = loss_and_gradients(model)
    memprof.apply(model, name)
    compiled = torch.compile(model, backend="eager")
    try:
        loss = compiled(**models.batch()).loss
        loss.backward()
    finally:
        torch.compiler.reset()
    assert_alike((loss.detach(), {n: p.grad for n, p in model.named_parameters()}), wanted)


class WithAdapter(nn.Module):
    """A head as LoRA wraps it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, x):
        return self.base(x) + self.up(self.down(x))


def _hooked(register):
    def change(model):
        getattr(model.lm_head, register)(lambda *args: None)

    return change


HEADS = {
    "forward hook": _hooked("register_forward_hook"),
    "forward pre-hook": _hooked("register_forward_pre_hook"),
    "backward hook": _hooked("register_full_backward_hook"),
    "backward pre-hook": _hooked("register_full_backward_pre_hook"),
    "adapter": lambda model: setattr(model, "lm_head", WithAdapter(model.lm_head)),
    "own forward": lambda model: setattr(model.lm_head, "forward", model.lm_head.forward),
}


@pytest.mark.parametrize("head", HEADS)
def test_a_head_with_something_on_it_is_refused(head):
    model = models.llama()
    HEADS[head](model)
    before = models.state(model)
    with pytest.raises(UsageError, match=r"has hooks|no plain torch\.nn\.Linear") as raised:
        memprof.apply(model, "chunked-loss")
    assert raised.value.hint
    assert models.state(model) == before


def test_a_head_wrapped_by_peft_is_refused():
    peft = pytest.importorskip("peft")
    model = models.llama()
    peft.LoraModel(model, peft.LoraConfig(r=2, target_modules=["lm_head"]), "default")
    with pytest.raises(UsageError, match=r"no plain torch\.nn\.Linear"):
        memprof.apply(model, "chunked-loss")


@pytest.mark.parametrize(
    "parametrize", [nn.utils.parametrizations.weight_norm, nn.utils.parametrizations.spectral_norm]
)
def test_a_parametrized_head(parametrize):
    """Its weight is computed anew for each forward, and has its gradient; its vocabulary cannot be cut."""
    model = models.llama().eval()  # spectral_norm's vectors change in training
    parametrize(model.lm_head)
    wanted = loss_and_gradients(model)
    with memprof.apply(model, "chunked-loss", chunk_size=4):
        assert_alike(loss_and_gradients(model), wanted)
    before = models.state(model)
    with pytest.raises(UsageError, match="weight is computed"):
        memprof.apply(model, "vocabulary-cap", vocab_size=50)
    assert models.state(model) == before


# -- order -------------------------------------------------------------------------------------------------------------


def test_undo_out_of_order_changes_nothing():
    model = models.llama()
    first = memprof.apply(model, "chunked-loss")
    second = memprof.apply(model, "activation-checkpointing")
    before = models.state(model)
    with pytest.raises(MemprofError, match="last first") as raised:
        first.undo()
    assert "activation-checkpointing" in str(raised.value)
    assert models.state(model) == before
    second.undo()
    first.undo()
    first.undo()
    memprof.apply(model, ["chunked-loss", "activation-checkpointing"]).undo()


def test_an_undone_fix_can_be_applied_again_though_it_changed_no_module(monkeypatch):
    from memprof.fixes import eight_bit

    monkeypatch.setattr(eight_bit, "_find_adamw8bit", lambda: ("a package", lambda parameters, lr: object()))
    model = models.llama()
    for _ in range(2):
        with memprof.apply(model, "8-bit-optimizer"), pytest.raises(UsageError, match="already on"):
            memprof.apply(model, "8-bit-optimizer")


def test_undo_goes_on_when_one_action_fails():
    model = models.llama()
    before = models.state(model)
    applied = memprof.apply(model, "activation-checkpointing")

    def fail():
        raise RuntimeError("no")

    applied._undo.append(fail)
    with pytest.raises(RuntimeError, match="no"):
        applied.undo()
    assert models.state(model) == before
    memprof.apply(model, "activation-checkpointing").undo()


def test_a_name_with_a_typing_error_is_named():
    for name in FIXES:
        with pytest.raises(UsageError) as raised:
            memprof.apply(models.llama(), name[:-1] + ("x" if name[-1] != "x" else "y"))
        assert f"did you mean {name!r}" in str(raised.value)


@pytest.mark.parametrize("size", [25, 26, 27, 10**9])
def test_a_chunk_above_the_sequence_is_one_chunk(size):
    model = models.gemma2()
    wanted = loss_and_gradients(model)
    with memprof.apply(model, "chunked-loss", chunk_size=size):
        assert_alike(loss_and_gradients(model), wanted)


EXACT = [name for name in FORWARDS if FIXES[name].numerics is Numerics.EXACT]


@pytest.mark.parametrize("name", EXACT)
def test_all_labels_ignored(name):
    batch = models.batch()
    batch["labels"] = torch.full_like(batch["labels"], -100)
    model = models.llama()
    with memprof.apply(model, name):
        loss = model(**batch).loss
        loss.backward()
    assert loss.isnan()
    ours = {n: p.grad for n, p in model.named_parameters()}
    model.zero_grad()
    model(**batch).loss.backward()
    assert all(torch.equal(ours[n].nan_to_num(1), p.grad.nan_to_num(1)) for n, p in model.named_parameters())
