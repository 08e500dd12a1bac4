"""torch's libraries beside other imports: in processes of their own, which have to begin without torch."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest


def _run(code: str) -> None:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(sys.platform != "linux", reason="what is loaded is read from /proc")
def test_python_runs_on_while_torch_is_loaded():
    _run(
        """
        import sys, threading, time
        from pathlib import Path
        from memprof.watch.loading import torch_loads

        with torch_loads():
            (loader,) = set(threading.enumerate()) - {threading.current_thread()}
            begin = time.thread_time()
            while loader.is_alive():
                pass
            worked = time.thread_time() - begin
        assert "libtorch_cpu" in Path("/proc/self/maps").read_text() and "torch" not in sys.modules
        assert worked > 0.02, worked  # a lock that is held all the time leaves 0.006 seconds of 0.18
        assert threading.active_count() == 1

        import torch

        weight = torch.ones(2, 2, requires_grad=True)
        (weight @ weight).sum().backward()
        assert weight.grad.tolist() == [[4, 4], [4, 4]]
        with torch_loads():
            assert torch.ones(2).sum() == 2
        """
    )


def test_without_torch_nothing_is_loaded():
    _run(
        """
        import importlib.util
        from memprof.watch.loading import torch_loads

        importlib.util.find_spec = lambda name: None
        with torch_loads():
            pass
        """
    )
