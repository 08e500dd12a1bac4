"""Subclasses of torch.Tensor, as programs and their libraries have them, on the virtual GPU."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader

from memprof.trace.events import Role
from memprof.virtual import VirtualGpu

pytestmark = pytest.mark.usefixtures("gpu")


class Plain(torch.Tensor):
    """With what torch.Tensor has for subclasses."""


class Base(torch.Tensor):
    """As fastai's TensorBase: it hands on another list of types."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return super().__torch_function__(func, (torch.Tensor,), args, kwargs or {})


class Annotated(torch.Tensor):
    """As MONAI's MetaTensor: what it knows beside its numbers goes along."""

    about = "nothing"

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        result = super().__torch_function__(func, types, args, kwargs)
        if isinstance(result, cls):
            result.about = next((arg.about for arg in args if isinstance(arg, cls)), "nothing")
        return result


class Image(torch.Tensor):
    """As torchvision's tv_tensors: results are plain, but for those of some methods."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if not all(issubclass(cls, kind) for kind in types):
            return NotImplemented
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs or {})
        if not isinstance(result, torch.Tensor):
            return result
        return result.as_subclass(cls if func in (torch.Tensor.clone, torch.Tensor.to) else torch.Tensor)

    @property
    def device(self):
        with torch._C.DisableTorchFunctionSubclass():
            return super().device

    def __deepcopy__(self, memo):
        return self.detach().clone().as_subclass(Image)


class Disabled(torch.Tensor):
    """Results are plain."""

    __torch_function__ = torch._C._disabled_torch_function_impl


class Keywords(torch.Tensor):
    """Relies on its default."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs={}):  # noqa: B006
        return super().__torch_function__(func, types, args, dict(**kwargs))


KINDS = (Plain, Base, Annotated, Image, Disabled, Keywords)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_trained_on_it(kind: type, gpu: VirtualGpu) -> None:
    """Functions of torch in Python and in C, whose results are of the same class as without the virtual GPU."""
    expected = torch.Tensor if kind in (Image, Disabled) else kind
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GELU(), nn.LayerNorm(30), nn.Flatten(), nn.Linear(7200, 10)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        images = torch.randn(4, 3, 32, 32).cuda().as_subclass(kind)
        labels = torch.zeros(4, dtype=torch.long, device="cuda").as_subclass(kind)
        scores = model(F.dropout(images, 0.1))
        loss = F.cross_entropy(scores, labels)
        assert type(scores) is type(loss) is expected
        assert images.device == loss.device == torch.device("cuda:0") and images.is_cuda
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert gpu.phases.num_completed_steps == 2
    outside = F.dropout(images, 0.1)
    model(outside)
    with torch._C.DisableTorchFunction():
        assert gpu.trace.owners[gpu.recorder.storages.get_index(outside)].role is Role.INPUT


@pytest.mark.parametrize("kind", KINDS)
def test_torch_functions_may_be_off(kind: type) -> None:
    x = torch.zeros(4, 8, device="cuda").as_subclass(kind)
    target = torch.zeros(4, dtype=torch.long, device="cuda")
    for off in (torch._C.DisableTorchFunctionSubclass, torch._C.DisableTorchFunction):
        with off():
            assert type(F.cross_entropy(x, target)) is type(F.gelu(x)) is torch.Tensor


def test_one_that_answers_for_another_is_asked_next() -> None:
    class Stranger(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            return NotImplemented

    x, stranger = torch.zeros(4, device="cuda").as_subclass(Base), torch.zeros(4, device="cuda").as_subclass(Stranger)
    assert type(torch.add(stranger, x)) is Base
    with pytest.raises(TypeError, match="Stranger") as refused:
        torch.add(stranger, 1)
    assert "memprof" not in str(refused.value)


def test_what_it_knows_goes_along() -> None:
    x = torch.zeros(4, 4, device="cuda").as_subclass(Annotated)
    x.about = "a scan"
    assert [one.about for one in (x + 1, F.gelu(x), x.half(), x.cpu(), x[0], nn.Linear(4, 4).cuda()(x))] == [
        "a scan"
    ] * 6


@pytest.mark.parametrize("kind", [Plain, Base, Image])
def test_copies_and_pickles_are_of_its_class(kind: type) -> None:
    large = torch.zeros(1 << 19).as_subclass(kind)  # on the host, and without data
    small = torch.arange(3.0, device="cuda").as_subclass(kind)
    small.about = "it"
    again = pickle.loads(pickle.dumps(large))
    assert type(again) is kind and again.device.type == "cpu"
    again = pickle.loads(pickle.dumps(small))
    assert type(again) is kind and again.is_cuda and again.tolist() == [0, 1, 2] and again.about == "it"
    assert type(copy.deepcopy(small)) is kind and copy.deepcopy(small).is_cuda
    tagged = torch.arange(3.0, device="cuda")
    tagged.about = "it"
    assert pickle.loads(pickle.dumps(tagged)).about == "it"


def test_it_is_printed_under_its_name() -> None:
    assert repr(torch.arange(2.0, device="cuda").as_subclass(Plain)) == "Plain([0., 1.], device='cuda:0')"
    unknown = torch.randn(2, device="cuda").as_subclass(Plain)
    assert repr(unknown) == "Plain(..., device='cuda:0', size=(2,), dtype=torch.float32)"


@pytest.mark.parametrize("kind", [Plain, Base, Annotated])
def test_it_may_be_a_parameter(kind: type) -> None:
    linear = nn.Linear(8, 8)
    linear.weight = nn.Parameter(torch.ones(8, 8).as_subclass(kind))
    linear = linear.cuda()
    optimizer = torch.optim.SGD(linear.parameters(), lr=0.1, momentum=0.9)
    for _ in range(2):
        linear(torch.ones(2, 8, device="cuda")).sum().backward()
        optimizer.step()
    assert linear.weight.is_cuda and linear.weight.grad.is_cuda


def test_a_loader_gives_them() -> None:
    data = [torch.ones(3).as_subclass(Base) for _ in range(4)]
    assert [type(batch.cuda()) for batch in DataLoader(data, batch_size=2)] == [Base, Base]


def test_a_mode_of_the_program_sees_torchs_functions_in_python() -> None:
    class Seen(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            seen.append(func)
            return func(*args, **(kwargs or {}))

    seen = []
    x = torch.zeros(2, 3, device="cuda")
    with Seen():
        F.dropout(x)
        F.gelu(x.as_subclass(Plain))
    assert {F.dropout, F.gelu} <= set(seen)
