"""Test files that are complete or absent."""

import errno
import os

import pytest

from safer_tta._internal.files import atomic_write


def test_a_file_is_complete_or_absent(tmp_path):
    def write(content):
        with atomic_write(tmp_path / "x") as file:
            file.write(b"half")
            file.write(content)

    with pytest.raises(TypeError):
        write("text")
    assert not list(tmp_path.iterdir())
    write(b" and half")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [b"half and half"]


def test_a_full_disk_is_reported_with_the_name_of_the_file(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError) as caught, atomic_write(tmp_path / "model.safetensors") as file:
        file.write(b"whole")
    assert caught.value.errno == errno.ENOSPC
    assert caught.value.filename == str(tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_other_errors_keep_the_name_that_they_have(tmp_path):
    with pytest.raises(FileNotFoundError) as caught, atomic_write(tmp_path / "x"):
        (tmp_path / "elsewhere").read_bytes()
    assert caught.value.filename == str(tmp_path / "elsewhere")
