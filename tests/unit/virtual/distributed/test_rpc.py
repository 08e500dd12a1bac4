"""A program of processes that call each other ends with a line, and waits for nobody."""

from __future__ import annotations

import pytest
import torch

from memprof.device.catalog import find_gpu
from memprof.errors import MemprofError
from memprof.virtual import VirtualGpu

rpc = pytest.importorskip("torch.distributed.rpc")


@pytest.mark.skipif(not hasattr(rpc, "init_rpc"), reason="torch was built without RPC")
def test_others_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    begun = rpc.init_rpc
    with VirtualGpu(find_gpu("a100-80gb"), gpus=2):
        torch.ones(1, device="cuda")
        with pytest.raises(MemprofError, match=r"not yet: .*test_rpc.* calls other processes .*\(ps of 2\)"):
            rpc.init_rpc("ps", rank=0, world_size=2)
        monkeypatch.setenv("WORLD_SIZE", "3")
        with pytest.raises(MemprofError, match="trainer of 3"):
            rpc.init_rpc("trainer")
    assert rpc.init_rpc is begun
