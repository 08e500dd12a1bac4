"""Real files, of which adversarial ones are made."""

from __future__ import annotations

import functools
import gzip
import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

from memprof.report.export.memory_viz import convert_snapshot
from memprof.trace.facts import DeviceFacts, Facts
from memprof.trace.io import save_trace
from tests.golden.test_report import training_run
from tests.unit.snapshots.builder import training

# The configuration of the smallest model.
TINY = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 16, "intermediate_size": 32,
    "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 64, "max_position_embeddings": 32,
}  # fmt: skip


@functools.cache
def _capture() -> bytes:
    trace = training_run()
    trace.facts = Facts(device=DeviceFacts("GPU", 8 << 30, 7 << 30))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run"
        save_trace(trace, file)
        return file.read_bytes()


def write_capture(file: Path) -> Path:
    file.write_bytes(_capture())
    return file


def capture() -> dict[str, Any]:
    return json.loads(gzip.decompress(_capture()))


def snapshot() -> dict[str, Any]:
    return pickle.loads(pickle.dumps(convert_snapshot(training(leak=True).snapshot())))
