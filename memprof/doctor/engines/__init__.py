"""The inference engines and other runtimes whose errors `memprof doctor` explains: messages, figures, own options.

`find_engine` says which one an error is of; each has a file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from memprof.doctor.engines.engine import Engine, EngineError, Stage
from memprof.doctor.engines.llama_cpp import LLAMA_CPP, OLLAMA
from memprof.doctor.engines.sglang import SGLANG
from memprof.doctor.engines.tensorrt_llm import TENSORRT_LLM
from memprof.doctor.engines.tgi import TGI
from memprof.doctor.engines.vllm import VLLM
from memprof.doctor.engines.xla import JAX, TENSORFLOW, TORCH_XLA
from memprof.doctor.tracebacks import TracebackFrame

__all__ = ["ENGINES", "ENGINE_SIGNATURES", "Engine", "EngineError", "Stage", "find_engine"]

ENGINES = (VLLM, SGLANG, TGI, TENSORRT_LLM, OLLAMA, LLAMA_CPP, TORCH_XLA, TENSORFLOW, JAX)
ENGINE_SIGNATURES = tuple(signature for engine in ENGINES for signature in engine.signatures)
# Engines by the source of their errors; for a source of several, the log decides, and else the last one.
_ENGINES_BY_SOURCE: dict[str, tuple[Engine, ...]] = {
    **{engine.name: (engine,) for engine in ENGINES},
    "ggml": (OLLAMA, LLAMA_CPP),
    "XLA": (TORCH_XLA, TENSORFLOW, JAX),
}
_SERVERS = (VLLM, SGLANG, TGI, TENSORRT_LLM)  # Those whose memory torch allocates.
# Sources of errors that an engine's process may have; its engine is in the traceback, or in its line of the log.
_TORCH_SOURCES = ("torch", "CUDA", "cuBLAS", "cuDNN")


def find_engine(source: str, frames: Sequence[TracebackFrame], first_line: str, log: str) -> Engine | None:
    """Return the engine in which an error occurred; None if in none.

    `source` is of the error's signature, `frames` are of its traceback (outermost first), `first_line` is its line with
    prefixes, and `log` the text around.
    """
    if source in _ENGINES_BY_SOURCE:
        engines = _ENGINES_BY_SOURCE[source]
        by_path = (
            engine for engine in engines if engine.paths and any(re.search(engine.paths, f.file) for f in frames)
        )
        by_log = (engine for engine in engines if engine.log_marks and re.search(engine.log_marks, log))
        return next(by_path, None) or next(by_log, None) or engines[-1]
    if source not in _TORCH_SOURCES:
        return None
    for frame in reversed(frames):
        for engine in _SERVERS:
            if re.search(engine.paths, frame.file):
                return engine
        if not frame.is_in_library:
            return None
    text = first_line if frames else log
    return next((engine for engine in _SERVERS if re.search(engine.log_marks, text)), None)
