"""Runs in every Python that a command of `memprof monitor` starts, and tells memprof what its CUDA allocator holds.

Also in those that a program on the virtual GPU starts: there it has no_gpu.py say that nobody can use the GPU, and
memprof, if that can be imported, stand in for what the program imports there too.

Python imports a module of this name at start; memprof puts this folder at the head of PYTHONPATH. It must not be
noticed:

* it imports nothing that Python has not, and never torch: it waits until the program imports `torch.cuda`, and asks
  torch to call it when the program initialises CUDA, as torch itself defers what needs CUDA (`torch.cuda._lazy_call`).
  Until then there is no thread, no file and no socket;
* then a daemon thread reads `torch.cuda.memory_stats_as_nested_dict`, counters of the allocator, and never resets them:
  ten times a second at most, and sends them only when they have changed, in a datagram that never waits;
* a process that is forked has no such thread, and tells nothing, until it starts a Python of its own;
* a `sitecustomize` that it hides is run, and its folder leaves sys.path. PYTHONPATH stays, for processes started here.

It stands alone and may run in another, older Python than memprof.
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
STUBS = "MEMPROF_STUBS"  # packages that the run stands in for, where they are not installed
# What a Python that was told to ignore its environment (-I, -E) finds there all the same, once the probe is in it.
HIDDEN = "MEMPROF_HIDDEN"
SEPARATOR = "\x1f"
_LONGEST_ERROR = 200
_FOLDER = os.path.dirname(__file__)
_STUBS = "memprof.stubs.finder"


class _BeforeTorchCuda:
    """Finds nothing itself: waits for the import of `torch.cuda`, and has `then(module)` called when it is done."""

    def __init__(self, then: "Callable[[Any], None]") -> None:
        self._then = then

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Return what the other finders find of `torch.cuda`; None for all else."""
        if name != "torch.cuda":
            return None
        spec = None
        for finder in sys.meta_path:
            if finder is not self and hasattr(finder, "find_spec"):
                spec = finder.find_spec(name, path, target)
                if spec is not None:
                    break
        loader: Any = getattr(spec, "loader", None)
        execute = getattr(loader, "exec_module", None)
        if execute is None or not hasattr(loader, "__dict__") or isinstance(loader, type):
            return spec

        def exec_module(module: "ModuleType") -> None:
            # The loader belongs to this module alone, and is as it was before the module can look at it.
            del loader.exec_module
            execute(module)
            if self in sys.meta_path:
                sys.meta_path.remove(self)
            self._then(module)

        loader.exec_module = exec_module
        return spec


class _Stubs:
    """Finds what no other finder does: once a package that is replaced by a stub is imported, memprof's finder does.

    A process that multiprocessing starts anew imports the program before it does its own part.
    """

    def __init__(self, packages: "list[str]") -> None:
        self._packages = packages

    def find_spec(self, name: str, path: "Any" = None, target: "Any" = None) -> "Any":
        """Return None for all but these packages."""
        if name.partition(".")[0] not in self._packages:
            return None
        sys.meta_path.remove(self)
        try:
            __import__(_STUBS)
        except ImportError:
            return None
        finder = sys.modules[_STUBS].StubFinder(lambda line: None, lambda tensor: None, lambda num_bytes, name: None)
        sys.meta_path.append(finder)
        return finder.find_spec(name, path, target)


def _watch(cuda: "Any") -> None:
    """Start when CUDA is initialised; on releases that cannot defer, start and wait."""
    try:
        cuda._lazy_call(lambda: _start(cuda))
    except Exception:  # whatever it is, the program is not to fail of it
        _start(cuda)


def _start(cuda: "Any") -> None:
    try:
        import atexit
        import threading

        sender = _Sender(cuda, os.environ[SOCKET])
        threading.Thread(target=sender.run, name="memprof-monitor", daemon=True).start()
        atexit.register(sender.finish)
    except Exception:
        return


class _Sender:
    """Reads the allocator's counters and sends them to memprof."""

    def __init__(self, cuda: "Any", address: str) -> None:
        import json
        import socket
        import threading
        import time

        self._turn = threading.Lock()
        self._cuda = cuda
        self._pid = os.getpid()
        self._encode = json.dumps
        self._sleep = time.sleep
        self._pause = min(max(float(os.environ.get(INTERVAL, "1")) / 10, 0.01), 0.1)
        self._last: dict[int, Any] | None = None
        self._devices: dict[int, Any] = {}
        self._num_devices = -1
        self._identity = {"pid": self._pid, "started": time.time(), "rank": os.environ.get("RANK")}
        self._address = address
        # Python's sockets are not inherited by programs started from here; a forked process has it and does not use it.
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.setblocking(False)

    def run(self) -> None:
        """The thread: until memprof has gone."""
        try:
            while self._tell():
                self._sleep(self._pause)
        except Exception as error:  # torch refuses: an allocator of the program's own may have no counters
            self._give_up(error)
        self._socket.close()

    def _give_up(self, error: Exception) -> None:
        text = f"{type(error).__name__}: {error}".splitlines()[0][:_LONGEST_ERROR]
        try:
            self._send(devices={}, gpus={}, error=text)
        except Exception:  # memprof has gone, or the program is at its end
            return

    def finish(self) -> None:
        """Send at the program's end what the last tenth of a second did to the peaks."""
        try:
            if os.getpid() == self._pid:
                self._tell()
        except Exception:
            pass
        # Python would warn of a socket that is left open.
        self._socket.close()

    def _tell(self) -> bool:
        """Send what has changed; whether to go on."""
        # At the end the thread may be halfway: its older counters must not be sent after the newest.
        with self._turn:
            counters = self._read()
            if counters is None or counters == self._last:
                return True
            try:
                self._send(devices=counters, gpus=self._devices)
            except BlockingIOError:  # memprof is behind: the counters are cumulative, the next message says as much
                return True
            except OSError:
                return False
            self._last = counters
            return True

    def _send(self, **message: "Any") -> None:
        self._socket.sendto(self._encode(dict(self._identity, **message)).encode(), self._address)

    def _read(self) -> "dict[int, Any] | None":
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
                self._devices[device] = self._describe(device)
        return counters

    def _describe(self, device: int) -> "dict[str, Any]":
        try:
            found = self._cuda.get_device_properties(device)
            return {"name": found.name, "uuid": str(getattr(found, "uuid", "")), "total_bytes": found.total_memory}
        except Exception:
            return {}


def _refuse(cuda: "Any") -> None:
    """Write a refusal, without memprof, which may not be importable here."""
    import runpy

    runpy.run_path(os.path.join(_FOLDER, "no_gpu.py"), run_name="memprof.monitor.probe.no_gpu")["refuse"](
        cuda, os.environ[REFUSALS]
    )


def _begin() -> None:
    sys.path[:] = [folder for folder in sys.path if folder != _FOLDER]
    hidden = os.environ.pop(HIDDEN, None)
    if hidden is not None:
        for name in [name for name in os.environ if name.startswith("PYTHON")]:
            del os.environ[name]
        for pair in filter(None, hidden.split(SEPARATOR)):
            name, _, value = pair.partition("=")
            os.environ[name] = value
    packages = os.environ.get(STUBS)
    if packages:
        sys.meta_path.append(_Stubs(packages.split()))
    asked = [then for name, then in ((SOCKET, _watch), (REFUSALS, _refuse)) if os.environ.get(name)]
    if not asked:
        return

    def imported(cuda: "Any") -> None:
        for then in asked:
            then(cuda)

    loaded = sys.modules.get("torch.cuda")
    if loaded is not None:  # a .pth file has imported it
        imported(loaded)
    else:
        sys.meta_path.insert(0, _BeforeTorchCuda(imported))


# Only where Python imports it at its start, and not where a tool looks at it as a part of memprof.
if __name__ == "sitecustomize":
    _begin()
    # The one that this hides, if there is one, takes its place; if not, `site` hears what it would have heard.
    del sys.modules["sitecustomize"]
    __import__("sitecustomize")
