"""Compare our safetensors with the reference library, in both directions, and read damaged files."""

import json
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safer_tta._internal import safetensors_io
from safer_tta.errors import InvalidTypeError, TensorFileError

NAMES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8", "bool")
tensors = st.builds(
    lambda dtype, shape, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype),
    st.sampled_from([getattr(torch, name) for name in NAMES]),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 1000),
)


@settings(max_examples=50, deadline=None)
@given(named=st.dictionaries(st.text("abc.é", min_size=1, max_size=6), tensors, max_size=5), note=st.text(max_size=9))
def test_each_library_reads_the_files_of_the_other(tmp_path_factory, named, note):
    reference = pytest.importorskip("safetensors.torch")
    path = tmp_path_factory.mktemp("t") / "x.safetensors"
    safetensors_io.write(path, named, {"note": note})
    for loaded in (reference.load_file(path), safetensors_io.read(path)[0]):
        assert loaded.keys() == named.keys()
        assert all(torch.equal(loaded[n], t) and loaded[n].dtype == t.dtype for n, t in named.items())
    assert safetensors_io.read_metadata(path) == {"note": note}
    reference.save_file(named, path)
    assert all(torch.equal(safetensors_io.read(path)[0][n], t) for n, t in named.items())


def test_a_tensor_with_strides_is_written_row_by_row(tmp_path):
    x = torch.arange(12.0).view(3, 4).T
    safetensors_io.write(tmp_path / "x", {"x": x})
    assert torch.equal(safetensors_io.read(tmp_path / "x")[0]["x"], x)


@pytest.mark.parametrize(
    ("header", "says"),
    [
        *((damaged, "x") for damaged in (b'{"a":5}', b'{"a":{}}', b"[1]")),
        (b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}', "x"),
        (b'{"__metadata__":7}', "x.*not a JSON object"),
    ],
)
def test_a_damaged_header_is_refused_with_the_files_name(tmp_path, header, says):
    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(TensorFileError, match=says):
        safetensors_io.read(tmp_path / "x")


@pytest.mark.parametrize(
    ("places", "says"),
    [
        ({"a": [0, 16], "b": [0, 16]}, "'b' starts at byte 0; expected 16"),
        ({"a": [0, 8], "b": [4, 16]}, "'b' starts at byte 4; expected 8"),
        ({"a": [0, 4], "b": [8, 16]}, "'b' starts at byte 8; expected 4"),
        ({"a": [4, 16]}, "'a' starts at byte 4; expected 0"),
        ({"a": [0, 12]}, "16 bytes of numbers, and its tensors 12"),
        ({"a": [0, 20]}, "truncated"),
        ({"a": [0, 2**70]}, "truncated"),
        ({"a": [0, 16.0]}, "expected a dict with data_offsets"),
        ({"a": [False, 16]}, "expected a dict with data_offsets"),
        ({}, "16 bytes of numbers, and its tensors 0"),
    ],
)
def test_tensors_fill_the_file_without_gaps_and_overlaps(places, says):
    header = {n: {"dtype": "U8", "shape": [int(p[1] - p[0])], "data_offsets": p} for n, p in places.items()}
    encoded = json.dumps(header).encode()
    with pytest.raises(TensorFileError, match=says):
        safetensors_io.loads(struct.pack("<Q", len(encoded)) + encoded + bytes(16))


@pytest.mark.parametrize("shape", ["[Infinity]", "[NaN]", "[-1]", "[4.0]", "[-2,-2]", "[1e999]", "4", "[[4]]", '["4"]'])
def test_a_shape_of_something_else_than_whole_numbers_is_refused(shape):
    encoded = f'{{"a":{{"dtype":"F32","shape":{shape},"data_offsets":[0,16]}}}}'.encode()
    with pytest.raises(TensorFileError, match="does not match its header"):
        safetensors_io.loads(struct.pack("<Q", len(encoded)) + encoded + bytes(16))


def test_an_empty_tensor_of_a_huge_shape_is_refused():
    encoded = f'{{"a":{{"dtype":"F32","shape":[0,{2**70}],"data_offsets":[0,0]}}}}'.encode()
    with pytest.raises(TensorFileError, match="does not match its header"):
        safetensors_io.loads(struct.pack("<Q", len(encoded)) + encoded)


def test_the_header_may_name_tensors_in_another_order():
    header = {n: {"dtype": "U8", "shape": [8], "data_offsets": p} for n, p in {"b": [8, 16], "a": [0, 8]}.items()}
    encoded = json.dumps(header).encode()
    found = safetensors_io.loads(struct.pack("<Q", len(encoded)) + encoded + bytes(range(16)))[0]
    assert {name: tensor.tolist() for name, tensor in found.items()} == {"b": [*range(8, 16)], "a": [*range(8)]}


def test_a_dtype_outside_the_format_is_refused_and_leaves_no_file(tmp_path):
    with pytest.raises(InvalidTypeError, match="complex64"):
        safetensors_io.write(tmp_path / "x", {"x": torch.zeros(1, dtype=torch.complex64)})
    assert not list(tmp_path.iterdir())


@settings(max_examples=30, deadline=None)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_never_changes_the_numbers(place, bit):
    written = bytearray(safetensors_io.dumps({"a": torch.arange(40.0), "b": torch.ones(3, 3)}, {"note": "x"}))
    written[place % len(written)] ^= 1 << bit
    try:
        tensors, _ = safetensors_io.loads(bytes(written))
    except TensorFileError:
        return
    # A header may survive a flip in a name or a note.
    assert sorted(t.flatten().tolist() for t in tensors.values()) == [list(map(float, range(40))), [1.0] * 9]


def test_a_folder_that_does_not_exist_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a folder; .*a.safetensors"):
        safetensors_io.write(tmp_path / "nowhere" / "a.safetensors", {"a": torch.ones(1)})
