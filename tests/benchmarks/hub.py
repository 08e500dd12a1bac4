"""A model hub on this machine, for tools that read configurations and headers of weights from one.

It answers what huggingface_hub and hf-mem ask of huggingface.co about a model of the catalog: its record, its files,
its config.json, and the beginning of a model.safetensors whose header names every parameter of the model that
transformers builds, in its data type, shape and place. Of the weights themselves there is nothing.
"""

from __future__ import annotations

import json
import re
import struct
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from memprof.workload.catalog import find_model

COMMIT = "0" * 40
_DTYPES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}


def header(key: str) -> tuple[bytes, int]:
    """What a model.safetensors of a catalog model begins with, and how many parameters it has, tied ones once."""
    import torch

    from memprof.spec import TargetSpec
    from memprof.workload.models import find_source

    with torch.device("meta"):
        model = find_source(TargetSpec(model=key)).build()
    tensors, end = {}, 0
    for name, parameter in model.named_parameters():
        size = parameter.numel() * parameter.element_size()
        dtype = _DTYPES[str(parameter.dtype).removeprefix("torch.")]
        tensors[name] = {"dtype": dtype, "shape": list(parameter.shape), "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(tensors).encode()
    return struct.pack("<Q", len(text)) + text, sum(parameter.numel() for parameter in model.parameters())


def files(key: str) -> tuple[str, dict[str, bytes], int]:
    """A catalog model's name on the hub, its files, and its number of parameters."""
    entry = find_model(key)
    beginning, parameters = header(key)
    config = json.dumps(entry.load_config()).encode()
    return entry.hf_id, {"config.json": config, "model.safetensors": beginning}, parameters


@contextmanager
def served(keys: Sequence[str]) -> Iterator[str]:
    """The address of a hub that has the models."""
    models = {name: (content, count) for name, content, count in map(files, keys)}

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(body=True)

        def do_HEAD(self) -> None:
            self._answer(body=False)

        def log_message(self, *arguments: object) -> None:
            """Nothing is printed."""

        def _answer(self, *, body: bool) -> None:
            path = self.path.partition("?")[0]
            for name, (content, count) in models.items():
                if path == f"/api/models/{name}":
                    siblings = [{"rfilename": file} for file in content]
                    self._send(body, _record(name, content, count, siblings))
                elif path.startswith(f"/api/models/{name}/tree/"):
                    self._send(body, [{"type": "file", "path": f, "size": len(data)} for f, data in content.items()])
                elif (asked := re.fullmatch(f"/{name}/resolve/[^/]+/(.+)", path)) and asked[1] in content:
                    self._send(body, content[asked[1]])
                else:
                    continue
                return
            self.send_error(404)

        def _send(self, body: bool, what: Any) -> None:
            data = what if isinstance(what, bytes) else json.dumps(what).encode()
            total = len(data)
            asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
            if asked:
                data = data[int(asked[1]) : int(asked[2]) + 1]
            self.send_response(206 if asked else 200)
            if asked:
                self.send_header("Content-Range", f"bytes {asked[1]}-{int(asked[1]) + len(data) - 1}/{total}")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("X-Repo-Commit", COMMIT)
            self.send_header("ETag", f'"{len(data)}"')
            self.end_headers()
            if body:
                self.wfile.write(data)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()


def _record(name: str, content: dict[str, bytes], count: int, siblings: list[dict[str, str]]) -> dict[str, Any]:
    return {
        "id": name,
        "modelId": name,
        "sha": COMMIT,
        "library_name": "transformers",
        "tags": [],
        "siblings": siblings,
        "config": json.loads(content["config.json"]),
        "safetensors": {"parameters": {"BF16": count}, "total": count},
    }
