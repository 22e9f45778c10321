"""Test that memory is kept only after somebody asked for it."""

import platform
import subprocess
import sys

import pytest

PROGRAM = """
import torch
from safer_tta import keep_freed_memory

def kept_of_200_megabytes():
    before = resident()
    block = torch.ones(50_000_000)
    del block
    return resident() - before

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096

returned = kept_of_200_megabytes()
assert keep_freed_memory()
print(returned, kept_of_200_megabytes())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_only_on_request():
    result = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True)
    before, after = map(int, result.stdout.split())
    assert before < 50e6
    assert after > 150e6
