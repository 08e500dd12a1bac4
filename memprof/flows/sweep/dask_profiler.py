"""Keeps dask's profiler away from the cells of a sweep."""

from __future__ import annotations

from typing import Any

from distributed import Worker, WorkerPlugin


class ProfilerPause(WorkerPlugin):  # type: ignore[misc]  # distributed has no types
    """Stops a worker's profiler (`distributed.worker.profile`) for as long as it is registered.

    Every 10 ms the profiler holds the frames of the functions that run, and with them their variables: tensors are then
    freed a little later than the program frees them. Of 96 small cells, one needed 2 MiB more.
    """

    name = "memprof-profiler-pause"
    _callback: Any = None

    def setup(self, worker: Worker) -> None:
        """Take the profiler from what a worker calls again and again, and stop it if it has begun."""
        self._callback = worker.periodic_callbacks.pop("profile", None)
        if self._callback is not None:
            self._callback.stop()

    def teardown(self, worker: Worker) -> None:
        """Start the profiler again."""
        if self._callback is not None:
            worker.periodic_callbacks["profile"] = self._callback
            self._callback.start()
