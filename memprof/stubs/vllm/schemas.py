"""Schemas of the operators that a compiled module defines, read from its file.

`TORCH_LIBRARY` compiles each schema into the module as text. So the file says which operators its release has, and
memprof needs no list for each release. Only read-only data is read: the rest, hundreds of MiB, is GPU code.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path

_MAGIC = b"\x7fELF\x02\x01"  # 64 bits, little endian
_SECTION_TABLE = struct.Struct("<40xQ10xHHH")  # e_shoff, e_shentsize, e_shnum, e_shstrndx of the file's header
_SECTION = struct.Struct("<IIQQQQ")  # sh_name, sh_type, sh_flags, sh_addr, sh_offset, sh_size
_SCHEMA = re.compile(rb"(?<![\x20-\x7e])[A-Za-z_]\w*(?:\.\w+)?\([^\x00-\x1f\x7f-\xff]*?\)\s*->[\x20-\x7e]+(?=\x00)")


def read_schemas(path: str) -> list[str]:
    """Return the schemas of the operators in the shared library `path`, such as "silu_and_mul(Tensor! out, ...) -> ()".
    Empty if the file is no 64-bit ELF file, or defines no operators."""
    schemas: dict[bytes, None] = {}
    for data in _read_constants(Path(path)):
        schemas.update(dict.fromkeys(_SCHEMA.findall(data)))
    return [re.sub(r"\s+", " ", schema.decode("ascii")).strip() for schema in schemas]


def _read_constants(path: Path) -> Iterator[bytes]:
    """Yield the contents of the sections with read-only data."""
    with path.open("rb") as file:
        header = file.read(64)
        if not header.startswith(_MAGIC):
            return
        table_offset, entry_size, num_sections, names_index = _SECTION_TABLE.unpack(header)
        file.seek(table_offset)
        table = file.read(entry_size * num_sections)
        sections = [_SECTION.unpack_from(table, index * entry_size) for index in range(num_sections)]
        if not sections:
            return
        file.seek(sections[names_index][4])
        names = file.read(sections[names_index][5])
        for name_offset, _, _, _, offset, num_bytes in sections:
            if names[name_offset:].startswith(b".rodata"):
                file.seek(offset)
                yield file.read(num_bytes)
