"""Scripts that end before any model is called: whose memory it was, and what they were doing."""

from __future__ import annotations

import pytest

LARGE = """
    import torch
    from torch import nn

    model = nn.Sequential(*[nn.Linear(16384, 16384, device="cuda") for _ in range(100)])
"""
LOADED = """
    import torch
    from torch import nn

    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(16384, 16384) for _ in range(100)])
    for layer in model:
        for name, weight in list(layer.named_parameters()):
            setattr(layer, name, nn.Parameter(torch.empty(weight.shape).to("cuda")))
"""


@pytest.mark.parametrize("text", [LARGE, LOADED], ids=["made", "loaded"])
def test_a_model_that_is_too_large_is_parameters(memprof, script, text):
    result = memprof("run", "--gpu", "rtx-4090", "--json", script(text))
    assert result.exit_code == 3
    assert set(result.json["peak"]["categories"]) == {"parameters"}
    found = next(one for one in result.json["findings"] if one["id"] == "does-not-fit")
    assert found["fixes"] == ["bfloat16"]  # no layers are known yet, and no batch


EARLY = """
    import torch
    from torch import nn

    model = nn.Sequential(nn.Linear(4096, 4096, device="cuda"), nn.BatchNorm1d(1024 * 1024, device="cuda"))
    data = torch.zeros(1024, 4096, device="cuda")
    for batch in torch.utils.data.DataLoader([1, "one"], batch_size=2):
        model(batch)
"""


def test_an_error_of_a_loader_is_not_of_the_model(memprof, script):
    result = memprof("run", "--gpu", "rtx-4090", "--json", script(EARLY))
    assert result.exit_code == 1
    assert result.json["failure"]["phase"] == "the program's own code, before its first step"
    mib = {name: num_bytes >> 20 for name, num_bytes in result.json["peak"]["categories"].items()}
    assert mib == {"parameters": 72, "buffers": 8, "inputs": 16}


BUILDING = """
    import torch
    from torch import nn

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64, device="cuda")
            self.other = self.layers

    Model()
"""


def test_an_error_of_a_constructor_is_of_the_model(memprof, script):
    result = memprof("run", "--gpu", "rtx-4090", "--json", script(BUILDING))
    assert result.json["failure"]["phase"] == "building the model"
