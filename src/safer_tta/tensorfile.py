"""Tensors on disk in the safetensors format: eight bytes of length, a JSON header, raw bytes. No pickle.

Written here because the core needs torch and numpy alone. A file appears under its name only when it is complete:
it is written beside, flushed to the disk and then renamed.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import os
import secrets
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

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
_LARGEST_HEADER = 100_000_000
CONTENT = "blake2b"  # of all tensors' bytes, in the metadata


class TensorFileError(ValueError):
    """A file that is damaged, cut short or not in the safetensors format."""


@contextlib.contextmanager
def atomic_write(path: str | os.PathLike[str]) -> Iterator[IO[bytes]]:
    """Open a temporary neighbour of `path`; it takes that name only if the block ends well."""
    path = Path(path)
    if not path.parent.is_dir():
        raise FileNotFoundError(f"{path.parent} is not a folder; create it before {path.name} is written there")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(8)}.part")
    try:
        with temporary.open("xb") as file:  # readable by whom the user lets read; mkstemp keeps its files to itself
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def write(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors, and text about them, to `path`."""
    with atomic_write(path) as file:
        for part in _encoded(tensors, metadata):
            file.write(part)


def dumps(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> bytes:
    """The bytes that `write` would write."""
    return b"".join(_encoded(tensors, metadata))


def _encoded(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None) -> Iterator[bytes]:
    parts = [raw_bytes(tensor) for tensor in tensors.values()]
    header: dict[str, Any] = {"__metadata__": {**(metadata or {}), CONTENT: _digest(parts)}}
    offset = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TypeError(f"tensor {name!r} is {tensor.dtype}; the format holds {', '.join(map(str, _NAMES))}")
        size = tensor.numel() * tensor.element_size()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        offset += size
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # data starts on an eight-byte boundary, as the format asks
    yield struct.pack("<Q", len(encoded))
    yield encoded
    yield from parts


def _digest(parts: Iterable[bytes | memoryview]) -> str:
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(part)
    return state.hexdigest()


def _undamaged(data: NDArray[np.uint8], metadata: dict[str, str], path: str | os.PathLike[str]) -> dict[str, str]:
    """The metadata that was written, once the bytes behind it are known to be those; files of others say nothing."""
    if CONTENT in metadata and metadata[CONTENT] != _digest([data.data]):
        raise TensorFileError(f"{path} is damaged: its content is not what was written. Take a copy from before")
    return {name: text for name, text in metadata.items() if name != CONTENT}


def read(path: str | os.PathLike[str]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Read (tensors, metadata) from `path`. Tensors own their memory."""
    header, metadata, start = _read_header(path)
    data = np.fromfile(path, dtype=np.uint8, offset=start)
    metadata = _undamaged(data, metadata, path)
    return {name: _tensor(path, name, entry, data) for name, entry in header.items()}, metadata


def loads(content: bytes, name: str = "bytes") -> tuple[dict[str, Tensor], dict[str, str]]:
    """What `dumps` was given; name: what to call it in an error."""
    header, metadata, start = _header(io.BytesIO(content), len(content), name)
    data = np.frombuffer(content, dtype=np.uint8, offset=start)
    metadata = _undamaged(data, metadata, name)
    return {key: _tensor(name, key, entry, data) for key, entry in header.items()}, metadata


def read_metadata(path: str | os.PathLike[str]) -> dict[str, str]:
    """Read only the text in the header."""
    return {name: text for name, text in _read_header(path)[1].items() if name != CONTENT}


def _read_header(path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str], int]:
    with open(path, "rb") as file:
        return _header(file, os.fstat(file.fileno()).st_size, path)


def _header(file: IO[bytes], size: int, path: str | os.PathLike[str]) -> tuple[dict[str, Any], dict[str, str], int]:
    prefix = file.read(8)
    length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
    if not 2 <= length <= min(_LARGEST_HEADER, size - 8):
        raise TensorFileError(f"{path}: not a safetensors file (header of {length} bytes in a file of {size})")
    encoded = file.read(length)
    try:
        header = json.loads(encoded)
        metadata = {str(key): str(value) for key, value in header.pop("__metadata__", {}).items()}
    except (ValueError, AttributeError, TypeError) as error:
        raise TensorFileError(f"{path}: not a safetensors file (its header is not a JSON object)") from error
    return header, metadata, 8 + length


def _tensor(path: str | os.PathLike[str], name: str, entry: Any, data: np.ndarray[Any, Any]) -> Tensor:
    try:
        begin, end = entry["data_offsets"]
        if not 0 <= begin <= end <= len(data):
            raise ValueError(f"bytes {begin} to {end} of {len(data)}: the file is cut short or damaged")
        raw = data[begin:end]
        dtype, shape = _DTYPES[entry["dtype"]], tuple(int(side) for side in entry["shape"])
        flat = torch.from_numpy(raw.copy()).view(dtype) if len(raw) else torch.empty(0, dtype=dtype)
        return flat.reshape(shape)
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise TensorFileError(f"{path}: tensor {name!r} does not fit its description {entry} ({error})") from error


def raw_bytes(tensor: Tensor) -> bytes:
    """The numbers of a tensor as they lie in memory, row by row."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if flat.numel() else b""
