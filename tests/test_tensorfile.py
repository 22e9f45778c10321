"""Our safetensors against the reference library, both ways."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safer_tta._internal import safetensors_io as tensorfile

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.uint8,
    torch.bool,
]

tensors = st.builds(
    lambda dtype, shape, seed: (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 9).to(dtype),
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 4), max_size=3),
    st.integers(0, 1000),
)


@settings(max_examples=50, deadline=None)
@given(
    named=st.dictionaries(st.text("abc.é", min_size=1, max_size=6), tensors, max_size=5),
    note=st.text(max_size=9),
)
def test_both_libraries_read_both(tmp_path_factory, named, note):
    reference = pytest.importorskip("safetensors.torch")
    path = tmp_path_factory.mktemp("t") / "x.safetensors"
    tensorfile.write(path, named, {"note": note})
    for loaded in (reference.load_file(path), tensorfile.read(path)[0]):
        assert loaded.keys() == named.keys()
        assert all(torch.equal(loaded[n], t) and loaded[n].dtype == t.dtype for n, t in named.items())
    assert tensorfile.read_metadata(path) == {"note": note}
    reference.save_file(named, path)
    assert all(torch.equal(tensorfile.read(path)[0][n], t) for n, t in named.items())


def test_views_and_strides_are_written_as_they_look(tmp_path):
    x = torch.arange(12.0).view(3, 4).T
    tensorfile.write(tmp_path / "x", {"x": x})
    assert torch.equal(tensorfile.read(tmp_path / "x")[0]["x"], x)


@pytest.mark.parametrize(
    "header", [b'{"a":5}', b'{"a":{}}', b"[1]", b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[-8,0]}}']
)
def test_damaged_headers_are_named(tmp_path, header):
    import struct

    (tmp_path / "x").write_bytes(struct.pack("<Q", len(header)) + header + bytes(16))
    with pytest.raises(tensorfile.TensorFileError, match="x"):
        tensorfile.read(tmp_path / "x")


def test_unknown_dtype_is_named(tmp_path):
    with pytest.raises(TypeError, match="complex64"):
        tensorfile.write(tmp_path / "x", {"x": torch.zeros(1, dtype=torch.complex64)})
    assert not list(tmp_path.iterdir())


@settings(max_examples=30, deadline=None)
@given(place=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_a_flipped_bit_is_noticed_wherever_it_is(place, bit):
    written = bytearray(tensorfile.dumps({"a": torch.arange(40.0), "b": torch.ones(3, 3)}, {"note": "x"}))
    written[place % len(written)] ^= 1 << bit
    try:
        tensors, _ = tensorfile.loads(bytes(written))
    except tensorfile.TensorFileError:
        return
    # A header may survive a flip in a name or a note; the numbers are never others.
    assert sorted(t.flatten().tolist() for t in tensors.values()) == [list(map(float, range(40))), [1.0] * 9]


def test_metadata_that_is_none_is_named():
    import struct

    header = b'{"__metadata__":7}'
    with pytest.raises(tensorfile.TensorFileError, match="not a JSON object"):
        tensorfile.loads(struct.pack("<Q", len(header)) + header)


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere is not a folder; create it before a.safetensors"):
        tensorfile.write(tmp_path / "nowhere" / "a.safetensors", {"a": torch.ones(1)})
