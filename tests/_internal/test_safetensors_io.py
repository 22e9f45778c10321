"""Compare our safetensors with the reference library, in both directions, and read damaged files."""

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
