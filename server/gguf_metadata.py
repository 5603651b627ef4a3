"""The metadata at the head of a GGUF file, read without its tensors.

The gguf package makes several array views for each of the hundred thousand strings of a
vocabulary, which takes seconds; this takes a tenth of one.
Layout: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import mmap
import struct
from pathlib import Path

from adaflash.engine.errors import CheckpointError

Scalar = bool | int | float | str
Value = Scalar | list[Scalar]

MAGIC = b"GGUF"
VERSIONS = (2, 3)  # version 1 has shorter lengths
NUMBERS = {  # type code: as the struct module writes it
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
STRING, ARRAY = 8, 9


def read_metadata(path: Path) -> dict[str, Value]:
    """All key/value pairs. Raises CheckpointError if the file is no little-endian GGUF 2 or 3."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Reader(data).metadata()
    except (OSError, ValueError, struct.error) as error:
        raise CheckpointError(f"cannot read {path} as GGUF: {error}") from error


class _Reader:
    """Walks over the file's bytes from its start."""

    def __init__(self, data: mmap.mmap) -> None:
        self._data = data
        self._position = 0

    def metadata(self) -> dict[str, Value]:
        magic = self._bytes(len(MAGIC))
        (version,) = self._numbers("I", 1)
        if magic != MAGIC or version not in VERSIONS:
            raise ValueError("it does not start like one of version 2 or 3")
        _num_tensors, num_pairs = self._numbers("Q", 2)
        return {self._string(): self._value() for _ in range(int(num_pairs))}

    def _value(self) -> Value:
        (code,) = self._numbers("I", 1)
        if code != ARRAY:
            return self._items(int(code), 1)[0]
        (item_code,) = self._numbers("I", 1)
        return self._items(int(item_code), self._length())

    def _items(self, code: int, count: int) -> list[Scalar]:
        if code == STRING:
            return [self._string() for _ in range(count)]
        if code not in NUMBERS:
            raise ValueError(f"unknown value type {code}")
        return [*self._numbers(NUMBERS[code], count)]

    def _numbers(self, letter: str, count: int) -> tuple[bool | int | float, ...]:
        layout = struct.Struct(f"<{count}{letter}")
        found = layout.unpack_from(self._data, self._position)
        self._position += layout.size
        return found

    def _string(self) -> str:
        return self._bytes(self._length()).decode()

    def _length(self) -> int:
        (length,) = struct.unpack_from("<Q", self._data, self._position)
        self._position += 8
        return int(length)

    def _bytes(self, count: int) -> bytes:
        start, self._position = self._position, self._position + count
        if self._position > len(self._data):
            raise ValueError("it ends too early")
        return self._data[start : self._position]
