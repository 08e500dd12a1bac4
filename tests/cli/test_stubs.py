"""A verdict that rests on the stub of a package that is not installed says so."""

import importlib.util

import pytest

SCRIPT = """
import torch
try:
    from {package}.normalization import FusedLayerNorm as Norm
except ImportError:
    Norm = torch.nn.LayerNorm
model = torch.nn.Sequential(torch.nn.Linear(64, 64), Norm(64)).cuda()
model(torch.randn(8, 64, device="cuda")).sum().backward()
"""


@pytest.mark.skipif(importlib.util.find_spec("apex") is not None, reason="apex is installed")
def test_a_stub_of_an_optional_package_is_told_below_the_verdict(memprof, script):
    sentence = "apex is not installed: it is replaced by a stub, allocating as its release "
    name = script(SCRIPT.format(package="apex"))
    told = memprof("run", name).stdout
    verdict, note = told.index("Fits: "), told.index(f"\nNote: {sentence}")
    assert verdict < note < told.index("At the peak") and told.count("\nNote: ") == 1
    assert memprof("run", "--explain", name).stdout.count(sentence) == 1
    assert "Note: " not in memprof("run", "--no-stubs", name).stdout
    assert "Note: " not in memprof("run", script(SCRIPT.format(package="no_such_package"))).stdout


UNUSED = """
import torch
try:
    from flash_attn import flash_attn_func
    from xformers.ops import memory_efficient_attention
except ImportError:
    flash_attn_func = None
query = torch.ones(2, 16, 4, 64, device="cuda", dtype=torch.float16)
if {uses}:
    flash_attn_func(query, query, query)
"""


@pytest.mark.parametrize("uses", [False, True])
def test_a_stub_that_is_imported_and_not_called_is_an_assumption_alone(memprof, script, uses):
    """What the program called of one decides what it takes."""
    name = script(UNUSED.format(uses=uses))
    told = memprof("run", name).stdout
    assert told.count("\nNote: ") == uses and ("Note: flash_attn is not installed" in told) == uses
    explained = memprof("run", "--explain", name).stdout
    for package in ("flash_attn", "xformers"):
        assert f"{package} is not installed: the program finds a stub of it." in " ".join(explained.split())
