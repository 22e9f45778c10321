"""Tensors on disk in the safetensors format: eight bytes of length, a JSON header, raw bytes. No pickle.

The core depends only on torch and numpy, so it has an implementation of its own.
"""

import functools
import io
import json
import logging
import math
import os
import reprlib
import struct
from collections.abc import Iterator, Mapping
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..errors import InvalidTypeError, TensorFileError
from .files import FilePath, atomic_write
from .hashing import hash_bytes

log = logging.getLogger("safer_tta")

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
Content = tuple[dict[str, Tensor], dict[str, str]]
_LARGEST_HEADER = 10_000_000  # some 100,000 tensors; a parsed header takes many times its size
CONTENT = "blake2b"  # the key of the hash of all tensors' bytes in the metadata
HEADER = "blake2b_header"  # the key of the hash of the rest of the header: names, types, shapes and metadata


def write(path: FilePath, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write named tensors and text about them to `path`."""
    with atomic_write(path) as file:
        for part in _encode(tensors, metadata):
            file.write(part)


def dumps(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """Return the bytes that `write` would write."""
    return b"".join(_encode(tensors, metadata))


def _encode(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[bytes]:
    parts = [raw_bytes(tensor) for tensor in tensors.values()]
    header: dict[str, Any] = {"__metadata__": {**(metadata or {}), CONTENT: hash_bytes(parts).hex()}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise InvalidTypeError(f"tensor {name!r} is {tensor.dtype}; the format holds {', '.join(map(str, _NAMES))}")
        size = tensor.numel() * tensor.element_size()
        offsets = [offset, offset + size]
        header[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        offset += size
    header["__metadata__"][HEADER] = _hash_header(header)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format requires data to start on an eight-byte boundary
    yield struct.pack("<Q", len(encoded))
    yield encoded
    yield from parts


def read(path: FilePath) -> Content:
    """Read (tensors, metadata) from `path`. Tensors own their memory."""
    with open(path, "rb") as file:
        return _decode(file, path)


def loads(content: bytes, name: str = "bytes") -> Content:
    """Read (tensors, metadata) from the bytes of `dumps`; errors call them `name`."""
    return _decode(io.BytesIO(content), name)


def read_metadata(path: FilePath) -> dict[str, str]:
    """Read only the text in the header."""
    with open(path, "rb") as file:
        metadata = _read_header(file, path)[1]
    metadata.pop(CONTENT, None)
    return metadata


def _decode(file: IO[bytes], path: FilePath) -> Content:
    header, metadata = _read_header(file, path)
    data = np.frombuffer(file.read(), dtype=np.uint8)
    written = metadata.pop(CONTENT, None)  # files of other libraries have none
    if written is not None and written != hash_bytes([data.data]).hex():
        raise TensorFileError(f"{path} is damaged: its content is not what was written. Restore it from a copy")
    tensors, end = {}, 0
    for name, entry in sorted(header.items(), key=lambda item: _offsets(path, *item)):
        begin, after = _offsets(path, name, entry)
        if begin != end:
            raise TensorFileError(
                f"{path}: tensor {name!r} starts at byte {begin}; expected {end}, the end of the one before. Tensors "
                "may not overlap or leave gaps; write the file again"
            )
        tensors[name], end = _tensor(path, name, entry, data[begin:after]), after
    if end != len(data):
        raise TensorFileError(
            f"{path} holds {len(data)} bytes of numbers, and its tensors {end}; expected the same. It is damaged or "
            "was cut off: restore it from a copy"
        )
    return {name: tensors[name] for name in header}, metadata


def _read_header(file: IO[bytes], path: FilePath) -> tuple[dict[str, Any], dict[str, str]]:
    size = file.seek(0, os.SEEK_END)
    file.seek(0)
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
        raise TensorFileError(f"{path} is not a safetensors file (header of {length} bytes in a file of {size})")
    encoded = file.read(length)
    try:
        header = json.loads(encoded, object_pairs_hook=_unique)
        written = header.get("__metadata__", {}).pop(HEADER, None)
        if written is not None and written != _hash_header(header):
            raise TensorFileError(f"{path} is damaged: its header is not what was written. Restore it from a copy")
        if written is None and CONTENT in header.get("__metadata__", {}):
            _say_old(os.fspath(path))
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
    except TensorFileError:
        raise
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise TensorFileError(f"{path} is not a safetensors file (its header is not a JSON object)") from error
    return header, metadata


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of the header; of two entries with one name, readers would disagree about which counts."""
    content = dict(pairs)
    if len(content) != len(pairs):
        raise ValueError("a name occurs twice")
    return content


@functools.cache  # once for each file
def _say_old(path: str) -> None:
    problem = "was written by an earlier version of safer-tta, without a hash of its header"
    log.warning("%s %s; damage to names and shapes may go unnoticed. Write it again with this version", path, problem)


def _hash_header(header: Mapping[str, Any]) -> str:
    return hash_bytes([json.dumps(header, sort_keys=True).encode()]).hex()


def _offsets(path: FilePath, name: str, entry: Any) -> tuple[int, int]:
    """Return where the bytes of a tensor begin and end."""
    found = entry.get("data_offsets") if isinstance(entry, dict) else None
    if not isinstance(found, list) or len(found) != 2 or not all(type(place) is int for place in found):
        raise TensorFileError(f"{path}: tensor {name!r} is {reprlib.repr(entry)}; expected a dict with data_offsets")
    return found[0], found[1]


def _tensor(path: FilePath, name: str, entry: Mapping[str, Any], raw: NDArray[np.uint8]) -> Tensor:
    try:
        dtype, shape = _DTYPES[entry["dtype"]], tuple(entry["shape"])
        begin, end = entry["data_offsets"]
        if not all(type(side) is int and side >= 0 for side in shape):
            raise ValueError("its shape has something else than whole numbers of at least 0")
        if not end - begin == math.prod(shape) * dtype.itemsize == len(raw):
            raise ValueError(f"{math.prod(shape)} numbers in {len(raw)} bytes; the file is truncated or damaged")
        flat = torch.from_numpy(raw.copy()).view(dtype) if len(raw) else torch.empty(0, dtype=dtype)
        return flat.reshape(shape)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        given = reprlib.repr(entry)
        raise TensorFileError(f"{path}: tensor {name!r} does not match its header {given} ({error})") from error


def check_finite(path: FilePath, tensors: Mapping[str, Tensor]) -> None:
    """Refuse numbers that are NaN or infinite, and say where they are."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            wrong = int((~tensor.isfinite()).sum())
            raise TensorFileError(
                f"{path}: {name} has {wrong} of {tensor.numel()} numbers that are NaN or infinite; expected finite "
                "ones. Use a state from before the values diverged"
            )


def raw_bytes(tensor: Tensor) -> bytes:
    """Return the numbers of a tensor as bytes, row by row."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
