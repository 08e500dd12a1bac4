"""Schemas are read from a shared library's read-only data, and from nowhere else in it."""

from __future__ import annotations

import struct
from pathlib import Path

from memprof.stubs.vllm.schemas import read_schemas

SCHEMA = b"silu_and_mul(Tensor! out,   Tensor input) -> ()"


def write_library(path: Path, sections: dict[str, bytes]) -> str:
    """Write a 64-bit ELF file with these sections, and the table of their names as the last one."""
    names = b"\0" + b"".join(name.encode() + b"\0" for name in (*sections, ".shstrtab"))
    contents = {**sections, ".shstrtab": names}
    body, headers, offset = b"", b"", 64
    for name, data in contents.items():
        headers += struct.pack(
            "<IIQQQQIIQQ", names.index(b"\0" + name.encode() + b"\0") + 1, 1, 0, 0, offset, len(data), 0, 0, 1, 0
        )
        body, offset = body + data, offset + len(data)
    start = b"\x7fELF\x02\x01\x01" + bytes(9)
    header = struct.pack("<HHIQQQIHHHHHH", 3, 62, 1, 0, 0, offset, 0, 64, 0, 0, 64, len(contents), len(contents) - 1)
    path.write_bytes(start + header + body + headers)
    return str(path)


def test_schemas_of_a_library(tmp_path):
    constants = (
        b"\0\x07" + SCHEMA + b"\0scaled.out(Tensor a, *, Tensor(a!) b) -> (Tensor, int)\0"
        b"usage: serve(model)\0void f(int) -> int\0meta_size() -> int\0no_text(\x01) -> ()\0"
    )
    path = write_library(tmp_path / "_C.so", {".text": b"\0other(Tensor x) -> ()\0", ".rodata": constants})
    assert read_schemas(path) == [
        "silu_and_mul(Tensor! out, Tensor input) -> ()",
        "scaled.out(Tensor a, *, Tensor(a!) b) -> (Tensor, int)",
        "meta_size() -> int",
    ]


def test_a_schema_is_listed_once_and_in_parts_of_the_data_too(tmp_path):
    sections = {".rodata": b"\0" + SCHEMA + b"\0", ".rodata.str1.8": b"\0" + SCHEMA + b"\0"}
    assert len(read_schemas(write_library(tmp_path / "_C.so", sections))) == 1


def test_a_file_that_is_no_library(tmp_path):
    path = tmp_path / "_C.so"
    path.write_bytes(SCHEMA)
    assert read_schemas(str(path)) == []
    path.write_bytes(b"")
    assert read_schemas(str(path)) == []
