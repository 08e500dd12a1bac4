"""What is not imported for an eager run: each in a process of its own, which has to begin without torch."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.lanes import at_night

ROOT = Path(__file__).resolve().parents[3]


def _run(code: str, *arguments: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_runs_are_the_same_with_and_without_the_compiler():
    """Event by event; at night over families of models that differ in what they ask of torch."""
    _run(
        """
        import gc, importlib, sys
        from memprof.flows.profile import profile
        from memprof.spec import TargetSpec
        from memprof.watch.postponed import postpone

        def traces():
            for model, again in (("gpt2", True), ("gpt2", False), ("t5-small", False))[: int(sys.argv[1])]:
                trace, document = profile(TargetSpec(model=model, context_length=64, activation_checkpointing=again))
                yield trace.events, trace.storages, trace.ops, trace.sources, document

        postpone()
        without = list(traces())
        there = {"torch._dynamo", "sympy"} & set(sys.modules)
        assert not there, there
        importlib.import_module("torch._dynamo")
        assert "sympy" in sys.modules
        for before, after in zip(without, traces(), strict=True):
            for one, other in zip(before, after, strict=True):
                assert one == other
        """,
        "3" if at_night() else "1",
    )


def test_a_run_that_needs_it_after_all_is_run_again(tmp_path):
    """And holds nothing that the import held on to."""
    model = tmp_path / "model.py"
    model.write_text(
        textwrap.dedent("""
        import torch

        made = []

        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.layers = torch.nn.ModuleList(torch.nn.Linear(256, 256) for _ in range(2))

            def forward(self, x):
                torch._dynamo.is_compiling()
                for layer in self.layers:
                    x = layer(x)
                return x.sum()

        def build():
            made.append(1)
            return Model()

        def example_inputs(*args, **kwargs):
            return {"x": torch.randn(8, 256)}
        """)
    )
    _run(
        """
        import importlib, sys
        from memprof.flows.profile import profile
        from memprof.spec import TargetSpec
        from memprof.watch.postponed import postpone

        postpone()
        spec = TargetSpec(model=sys.argv[1] + ":build")
        first, _ = profile(spec)
        assert "torch._dynamo" in sys.modules
        assert len(sys.modules["model"].made) == 2, sys.modules["model"].made
        again, _ = profile(spec)
        assert len(sys.modules["model"].made) in (1, 3)  # of the module that was imported again
        assert (first.events, first.storages) == (again.events, again.storages)
        """,
        str(model),
    )


@pytest.mark.nightly
def test_it_is_told_of_what_was_marked_before_it_came():
    _run(
        """
        import sys
        from memprof.watch.postponed import postpone

        postpone()
        import torch

        @torch.compiler.disable
        def apart(x):
            return x + 1

        @torch.compiler.disable(recursive=False)
        def apart_alone(x):
            return x + 1

        assert apart(1) == apart_alone(1) == 2
        weight = torch.nn.Parameter(torch.ones(3))
        torch.optim.SGD([weight]).step()
        assert "torch._dynamo" not in sys.modules and not hasattr(sys.modules["torch"].__dict__, "_dynamo")

        import torch._dynamo
        from torch._dynamo.exc import Unsupported

        for function in (apart, apart_alone):
            try:
                torch.compile(lambda x: function(x) * 2, backend="eager", fullgraph=True)(torch.ones(3))
            except Unsupported:
                pass
            else:
                raise AssertionError(function)
        torch.optim.SGD([weight]).step()
        assert torch.compile(lambda x: x * 2, backend="eager", fullgraph=True)(torch.ones(3)).sum() == 6
        """
    )


@pytest.mark.nightly
def test_what_is_taken_from_others_is_theirs_when_it_is_used():
    _run(
        """
        import inspect, sys
        from memprof.watch.postponed import postpone

        postpone()
        import transformers.integrations.accelerate as user
        import transformers.distributed.checkpoint as saver
        import torch.utils.flop_counter as counter

        later = {"accelerate", "triton", "torch.distributed.checkpoint.hf_storage"}
        assert not later & set(sys.modules), later & set(sys.modules)
        assert not isinstance(1, counter._JITFunction)

        import accelerate, triton.runtime.jit
        from torch.distributed.checkpoint import hf_storage

        assert inspect.signature(user.dispatch_model) == inspect.signature(accelerate.dispatch_model)
        assert user.clean_device_map({"": 0}) == {"": 0}
        assert isinstance(saver.HuggingFaceStorageReader("folder"), hf_storage.HuggingFaceStorageReader)
        assert isinstance(object.__new__(triton.runtime.jit.JITFunction), counter._JITFunction)
        """
    )


@pytest.mark.nightly
def test_sizes_are_judged_as_the_real_module_does():
    _run(
        """
        import importlib, itertools, sys
        from memprof.watch import postponed

        postponed.postpone()
        import torch
        import torch.fx.experimental.symbolic_shapes as without

        tensors = [torch.ones(2, 2), torch.nn.Parameter(torch.ones(2))]
        values = [True, False, 0, 3, 1.5, None, (1, 2), [1, 2], (1, 3), (1,), *tensors]

        def outcomes(module):
            for name in postponed._PLAIN:
                for number in (1, 2):
                    for arguments in itertools.product(values, repeat=number):
                        plain, answer = postponed._PLAIN[name]
                        try:
                            if not plain(*arguments):
                                continue
                        except TypeError:  # not so many arguments
                            continue
                        yield name, [type(each) for each in arguments], getattr(module, name)(*arguments)
        ours = list(outcomes(without))
        assert type(without).__module__ == "memprof.watch.postponed"
        assert "sympy" not in sys.modules
        assert without.ShapeEnv.__module__ == "torch.fx.experimental.symbolic_shapes"
        real = importlib.import_module("torch.fx.experimental.symbolic_shapes")
        assert real is not without and len(ours) > 50
        for (name, kinds, one), (_, _, other) in zip(ours, outcomes(real), strict=True):
            assert one == other and (type(one) is type(other) or not other), (name, kinds, one, other)
        """
    )


@pytest.mark.nightly
def test_the_rules_of_spread_tensors_come_with_the_first_mesh():
    _run(
        """
        import sys
        from memprof.watch.postponed import postpone

        postpone(rules=True)
        import torch
        from torch.distributed.tensor import DeviceMesh, Replicate, distribute_tensor

        rules = "torch.distributed.tensor._ops._pointwise_ops"
        assert rules not in sys.modules
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        mesh = DeviceMesh("cpu", [0])
        assert rules in sys.modules and "memprof" not in DeviceMesh.__init__.__module__
        spread = distribute_tensor(torch.ones(4), mesh, [Replicate()])
        assert (spread + spread.sin()).full_tensor().equal(torch.ones(4) + torch.ones(4).sin())
        DeviceMesh("cpu", [0])
        """
    )


@pytest.mark.nightly
def test_gradients_of_custom_operators_are_theirs_when_they_are_called():
    _run(
        """
        from memprof.watch.postponed import postpone

        postpone()
        import torch

        @torch.library.custom_op("own::twice", mutates_args=())
        def twice(x: torch.Tensor) -> torch.Tensor:
            return x * 2

        twice.register_autograd(lambda ctx, gradient: gradient * 3)
        x = torch.ones(2, requires_grad=True)
        twice(x).sum().backward()
        assert x.grad.tolist() == [3, 3] and not twice(torch.ones(2)).requires_grad
        assert torch.ops.prims.sin(torch.ones(2)).equal(torch.ones(2).sin())
        try:
            torch.ops.prims.sin(x).sum().backward()
        except RuntimeError as error:
            assert "prims.sin" in str(error) or "prims::sin" in str(error), error
        else:
            raise AssertionError("it has no gradient")
        """
    )


@pytest.mark.nightly
def test_the_client_of_the_hub_is_the_real_one_when_it_is_asked():
    _run(
        """
        import sys
        from memprof.watch.postponed import postpone

        postpone()
        import transformers.utils.hub as user

        assert "huggingface_hub.hf_api" not in sys.modules
        import huggingface_hub

        made = user.HfApi(library_name="own")
        assert type(made) is huggingface_hub.HfApi and made.library_name == "own"
        """
    )


@pytest.mark.nightly
def test_a_frame_is_of_the_module_that_inspect_finds():
    _run(
        """
        import inspect, sys, types
        import json.decoder, logging

        plain = inspect.getmodule
        from memprof.watch.postponed import postpone

        postpone()
        assert inspect.getmodule is not plain and inspect.getmodule.__name__ == "getmodule"
        seen = []

        def look(*args, **kwargs):
            seen.append([(inspect.getmodule(frame), plain(frame)) for frame in (sys._getframe(), sys._getframe(1))])

        json.JSONDecoder(object_hook=look).decode('{"a": 1}')
        logging.Filter.filter = look
        elsewhere = types.ModuleType("elsewhere")
        elsewhere.look, elsewhere.__file__ = look, logging.__file__
        sys.modules["elsewhere"] = elsewhere
        exec(compile("look()", json.decoder.__file__, "exec"), vars(elsewhere))
        exec("look()", {"look": look})
        assert seen[0][1][0] is sys.modules["json.decoder"] and seen[1][1][0] is sys.modules["json.decoder"]
        assert len(seen) == 3 and all(ours is theirs for pair in seen for ours, theirs in pair), seen
        assert inspect.getmodule(look) is plain(look) is sys.modules["__main__"]
        """
    )
