"""Probe in every Python that a command of `memprof monitor` starts: sends the CUDA allocator's counters to memprof.

Also in each Python that a program on the virtual GPU starts: there the probe refuses CUDA (no_gpu.py), and installs
memprof's stubs of packages, if memprof can be imported.

Python imports a module of this name at start; memprof puts this folder at the head of PYTHONPATH. The probe must not
disturb the program:

* it imports only standard modules, never torch: it waits until the program imports `torch.cuda`, and registers a
  callback for the program's initialization of CUDA, as torch itself defers CUDA calls (`torch.cuda._lazy_call`).
  Until then there is no thread, no file and no socket;
* then a daemon thread reads `torch.cuda.memory_stats_as_nested_dict`, counters of the allocator, and never resets them:
  ten times a second at most, and sends them only when they have changed, in a datagram that never waits;
* a forked process has no such thread and sends nothing, until the process starts a Python of its own;
* a `sitecustomize` hidden by the probe is run, and the probe's folder leaves sys.path. PYTHONPATH
  stays, for child processes.

The file imports nothing of memprof and may run in another, older Python than memprof.
"""

import os
import sys

# Annotations are strings: `from __future__` would leave a module in the program that it does not have alone, as would
# typing. mypy takes this name as true.
TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from types import ModuleType
    from typing import Any

SOCKET = "MEMPROF_MONITOR_SOCKET"
INTERVAL = "MEMPROF_MONITOR_INTERVAL"
REFUSALS = "MEMPROF_REFUSALS"  # a file of the run that started this process
STUBS = "MEMPROF_STUBS"  # packages that the run replaces by stubs
# The PYTHON* variables of a Python that ignores its environment (-I, -E), restored once the probe runs.
HIDDEN = "MEMPROF_HIDDEN"
SEPARATOR = "\x1f"
_MAX_ERROR_LENGTH = 200
_FOLDER = os.path.dirname(__file__)
_STUBS = "memprof.stubs.finder"


class _TorchCudaImportHook:
    """Import hook that calls `callback(module)` once `torch.cuda` has been imported."""

    def __init__(self, callback: "Callable[[Any], None]") -> None:
        self._callback = callback

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Return the spec of `torch.cuda` from the other finders, with the callback added; None for other modules."""
        if name != "torch.cuda":
            return None
        spec = None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    break
        loader: Any = getattr(spec, "loader", None)
        original_exec_module = getattr(loader, "exec_module", None)
        if original_exec_module is None or not hasattr(loader, "__dict__") or isinstance(loader, type):
            return spec

        def exec_module(module: "ModuleType") -> None:
            # The loader belongs to this module alone, and is restored before the module can see it.
            del loader.exec_module
            original_exec_module(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._callback(module)

        loader.exec_module = exec_module
        return spec


class _StubFinder:
    """Import finder that installs memprof's finder of stubs when a stubbed package is imported.

    A process that multiprocessing starts anew imports the program before it does its own part.
    """

    def __init__(self, packages: "list[str]") -> None:
        self._packages = packages

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Return the spec of memprof's stub for a stubbed package; None for other modules."""
        if name.partition(".")[0] not in self._packages:
            return None
        sys.meta_path.remove(self)
        try:
            __import__(_STUBS)
        except ImportError:
            return None
        finder = sys.modules[_STUBS].StubFinder(
            lambda line: None, lambda tensor: None, lambda tensors: None, lambda num_bytes, name: None
        )
        sys.meta_path.append(finder)
        return finder.find_spec(name, path, target)


def _start_on_cuda_init(cuda: "Any") -> None:
    """Start the sender when the program initializes CUDA; where torch cannot defer a call, start it now."""
    try:
        cuda._lazy_call(lambda: _start_sender(cuda))
    except Exception:  # no error of the probe may end the program
        _start_sender(cuda)


def _start_sender(cuda: "Any") -> None:
    try:
        import atexit
        import threading

        sender = _CounterSender(cuda, os.environ[SOCKET])
        threading.Thread(target=sender.run, name="memprof-monitor", daemon=True).start()
        atexit.register(sender.finish)
    except Exception:
        return


class _CounterSender:
    """Sender of the CUDA allocator's counters to memprof's socket."""

    def __init__(self, cuda: "Any", address: str) -> None:
        import json
        import socket
        import threading
        import time

        self._lock = threading.Lock()
        self._cuda = cuda
        self._pid = os.getpid()
        self._encode = json.dumps
        self._sleep = time.sleep
        self._interval = min(max(float(os.environ.get(INTERVAL, "1")) / 10, 0.01), 0.1)
        self._last_counters: dict[int, Any] | None = None
        self._devices: dict[int, Any] = {}
        self._num_devices = -1
        self._identity = {"pid": self._pid, "started": time.time(), "rank": os.environ.get("RANK")}
        self._address = address
        # Python's sockets are not inherited by programs started from here; a forked process has it and does not use it.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def run(self) -> None:
        """Send changed counters until memprof no longer receives; runs in a thread."""
        try:
            while self._send_changes():
                self._sleep(self._interval)
        except Exception as error:  # an allocator of the program's own may have no counters
            self._send_error(error)
        self._socket.close()

    def _send_error(self, error: Exception) -> None:
        description = f"{type(error).__name__}: {error}".splitlines()[0][:_MAX_ERROR_LENGTH]
        try:
            self._send(devices={}, gpus={}, error=description)
        except Exception:  # memprof has gone, or the program is at its end
            return

    def finish(self) -> None:
        """Send the last counters at the program's end."""
        try:
            if os.getpid() == self._pid:
                self._send_changes()
        except Exception:
            pass
        # Python would warn of a socket that is left open.
        self._socket.close()

    def _send_changes(self) -> bool:
        """Send changed counters; return whether memprof still receives."""
        # At the end the thread may be sending: older counters must not be sent after the newest.
        with self._lock:
            counters = self._read_counters()
            if counters is None or counters == self._last_counters:
                return True
            try:
                self._send(devices=counters, gpus=self._devices)
            except BlockingIOError:  # memprof is behind: counters are cumulative, so the next message is enough
                return True
            except OSError:
                return False
            self._last_counters = counters
            return True

    def _send(self, **message: "Any") -> None:
        self._socket.sendto(self._encode(dict(self._identity, **message)).encode(), self._address)

    def _read_counters(self) -> "dict[int, Any] | None":
        cuda = self._cuda
        if not cuda.is_initialized():
            return None
        if self._num_devices < 0:
            # Not torch.cuda.device_count(), which may load NVML into the program.
            count = getattr(getattr(sys.modules.get("torch"), "_C", None), "_cuda_getDeviceCount", cuda.device_count)
            self._num_devices = count()
        counters: dict[int, Any] = {}
        for device in range(self._num_devices):
            stats = cuda.memory_stats_as_nested_dict(device)
            if not stats or not stats["reserved_bytes"]["all"]["peak"]:
                continue
            counters[device] = {
                name: [stats[name]["all"]["current"], stats[name]["all"]["peak"]]
                for name in ("requested_bytes", "allocated_bytes", "reserved_bytes")
                if name in stats
            }
            counters[device]["num_alloc_retries"] = stats.get("num_alloc_retries", 0)
            counters[device]["num_ooms"] = stats.get("num_ooms", 0)
            if device not in self._devices:
                self._devices[device] = self._describe_gpu(device)
        return counters

    def _describe_gpu(self, device: int) -> "dict[str, Any]":
        try:
            gpu = self._cuda.get_device_properties(device)
            return {"name": gpu.name, "uuid": str(getattr(gpu, "uuid", "")), "total_bytes": gpu.total_memory}
        except Exception:
            return {}


def _refuse_cuda(cuda: "Any") -> None:
    """Make CUDA raise errors, by no_gpu.py; it is run by path because memprof may not be importable here."""
    import runpy

    runpy.run_path(os.path.join(_FOLDER, "no_gpu.py"), run_name="memprof.monitor.probe.no_gpu")["refuse"](
        cuda, os.environ[REFUSALS]
    )


def _install() -> None:
    sys.path[:] = [folder for folder in sys.path if folder != _FOLDER]
    hidden_variables = os.environ.pop(HIDDEN, None)
    if hidden_variables is not None:
        for name in [name for name in os.environ if name.startswith("PYTHON")]:
            del os.environ[name]
        for pair in filter(None, hidden_variables.split(SEPARATOR)):
            name, _, value = pair.partition("=")
            os.environ[name] = value
    packages = os.environ.get(STUBS)
    if packages:
        sys.meta_path.append(_StubFinder(packages.split()))
    callbacks = [
        callback for name, callback in ((SOCKET, _start_on_cuda_init), (REFUSALS, _refuse_cuda)) if os.environ.get(name)
    ]
    if not callbacks:
        return

    def run_callbacks(cuda: "Any") -> None:
        for callback in callbacks:
            callback(cuda)

    cuda_module = sys.modules.get("torch.cuda")
    if cuda_module is not None:  # a .pth file has imported it
        run_callbacks(cuda_module)
    else:
        sys.meta_path.insert(0, _TorchCudaImportHook(run_callbacks))


# Only where Python imports this file at its start, not where a tool imports it as a part of memprof.
if __name__ == "sitecustomize":
    _install()
    # The hidden sitecustomize, if any, takes this module's place; if there is none, `site` gets the usual ImportError.
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")
