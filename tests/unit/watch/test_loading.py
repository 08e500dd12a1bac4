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


@pytest.mark.slow
def test_nothing_waits_for_the_linker_beside():
    """Whatever a profile imports meanwhile is Python: a library would be loaded when torch's are, and not before."""
    _run(
        """
        import contextlib, importlib.machinery, os, sys
        from memprof.watch import loading

        plain = loading.torch_loads

        @contextlib.contextmanager
        def torch_loads():
            with plain():
                before = set(sys.modules)
                yield
                imported = sys.modules.keys() - before
            endings = tuple(importlib.machinery.EXTENSION_SUFFIXES)
            assert "memprof.flows.account" in imported
            assert not [name for name in imported if str(getattr(sys.modules[name], "__file__", "")).endswith(endings)]
            os._exit(0)

        loading.torch_loads = torch_loads
        sys.argv = ["memprof", "profile", "--model", "gpt2", "--no-cache"]
        from memprof.cli.main import run

        run()
        """
    )
