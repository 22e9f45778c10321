"""Saved states: in a new process, killed half-way, damaged, foreign, on a full disk."""

from __future__ import annotations

import os
import platform
import signal
import subprocess
import sys
import textwrap
import time

import pytest
import torch

import safer_tta
from safer_tta._internal import safetensors_io as tensorfile
from safer_tta.methods._frame import state
from tests.conftest import LEARNING, batches, learnt, same, small_net


def run(code: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("method", ["tent", "pl"])
def test_a_new_process_continues_bit_for_bit(method, tmp_path):
    stream = batches(6)
    whole = safer_tta.adapt(small_net(), method, seed=0)
    expected = [p.probs for p in whole.stream(stream)]
    half = safer_tta.adapt(small_net(), method, seed=0)
    list(half.stream(stream[:3]))
    half.save(tmp_path / "half.safetensors")
    result = run(
        """
        import sys, torch, safer_tta
        from safer_tta import tensorfile
        from tests.conftest import batches, same, small_net
        method, folder = sys.argv[1:]
        adapted = safer_tta.adapt(small_net(), method).load(f"{folder}/half.safetensors")
        answers = [p.probs for p in adapted.stream(batches(6)[3:])]
        tensorfile.write(f"{folder}/answers.safetensors", {str(i): a for i, a in enumerate(answers)})
        """,
        method,
        tmp_path,
    )
    assert result.returncode == 0, result.stderr
    answers, _ = tensorfile.read(tmp_path / "answers.safetensors")
    assert all(torch.equal(answers[str(i)], expected[3 + i]) for i in range(3))


def test_tent_state_is_small():
    adapted = safer_tta.adapt(safer_tta.models.zoo.create("resnet18", num_classes=7), seed=0)
    adapted(torch.rand(2, 3, 32, 32))
    model_bytes = sum(p.numel() * 4 for p in adapted.classifier.parameters())
    assert adapted.state_bytes < model_bytes / 300


def saved(tmp_path, method="tent"):
    adapted = safer_tta.adapt(small_net(), method, seed=0)
    list(adapted.stream(batches(2)))
    adapted.save(tmp_path / "state.safetensors")
    return adapted, tmp_path / "state.safetensors"


def test_state_bytes_are_those_of_the_file(tmp_path):
    """All that is saved counts: weights, moments, generator. A safetensors file is its header's length in 8 bytes, the
    header, the numbers."""
    adapted, path = saved(tmp_path)
    raw = path.read_bytes()
    assert len(raw) == 8 + int.from_bytes(raw[:8], "little") + adapted.state_bytes


def test_a_state_fits_only_a_model_with_the_same_statistics(tmp_path):
    """Weights alone are not the source model: what a batch norm remembers of the source is a part of it."""
    for method in ("none", "pl"):
        _, path = saved(tmp_path, method)
        other = small_net()
        other.norm2.running_var *= 2
        with pytest.raises(ValueError, match="another source model"):
            safer_tta.adapt(other, method).load(path)


def test_going_back_over_what_was_learnt_since_is_complete():
    """Into the very tensors that went on, Adam's count of steps among them: the same stream is learnt again alike."""
    adapted = safer_tta.adapt(small_net(), "tent", "plain", seed=0)
    stream = batches(6)
    list(adapted.stream(stream[:2]))
    there = adapted.state_dict()
    list(adapted.stream(stream[2:]))
    expected = adapted.state_dict()
    adapted.load_state_dict(there)
    assert same(adapted.state_dict(), there)
    list(adapted.stream(stream[2:]))
    assert same(adapted.state_dict(), expected)


@pytest.mark.parametrize("part", ["model", "teacher", "policy", "memory", "optimizer", "policy_optimizer"])
def test_one_number_anywhere_that_is_not_finite_is_found(part):
    """TeSLA has a tensor of every kind."""
    adapted = safer_tta.adapt(small_net(), "tesla", "plain", seed=0)
    list(adapted.stream(batches(2)))
    assert adapted.state.finite()
    good = adapted.state_dict()
    name = next(n for n, t in good.items() if n.startswith(f"{part}.") and t.dim())
    spoilt = good[name].clone()
    spoilt.view(-1)[-1] = torch.inf
    adapted.load_state_dict({**good, name: spoilt})
    assert not adapted.state.finite()


def test_other_methods_models_versions_and_formats_are_refused(tmp_path):
    adapted, path = saved(tmp_path)
    before = adapted.state_dict()
    with pytest.raises(ValueError, match="'tent'"):
        safer_tta.adapt(small_net(), "pl").load(path)
    with pytest.raises(ValueError, match="another source model"):
        safer_tta.adapt(small_net(seed=3), "tent").load(path)
    tensors, header = tensorfile.read(path)
    tensorfile.write(tmp_path / "newer", tensors, {**header, "version": str(state.VERSION + 1)})
    with pytest.raises(ValueError, match="Upgrade"):
        adapted.load(tmp_path / "newer")
    tensorfile.write(tmp_path / "foreign", tensors)
    with pytest.raises(ValueError, match="not a saved state"):
        adapted.load(tmp_path / "foreign")
    assert all(torch.equal(t, before[n]) for n, t in adapted.state_dict().items())


def test_a_state_that_does_not_fit_changes_nothing(tmp_path):
    adapted, _ = saved(tmp_path)
    before = adapted.state_dict()
    missing = {n: t for n, t in before.items() if n != "model.norm1.weight"}
    misshapen = {**before, "model.norm2.bias": torch.zeros(3)}
    others = (
        {"model.fc.weight": torch.zeros(1)},
        {"optimizer.99.exp_avg": torch.zeros(1)},
        {"optimizer.0.exp_avg": torch.zeros(1)},
        {"generator": torch.zeros(3, dtype=torch.uint8)},
    )
    for wrong in (missing, misshapen, *({**before, **other} for other in others)):
        with pytest.raises(ValueError, match="does not fit"):
            adapted.load_state_dict(wrong)
    assert all(torch.equal(t, before[n]) for n, t in adapted.state_dict().items())


def test_a_model_with_shared_layers_saves_and_loads(tmp_path):
    def twice() -> torch.nn.Module:
        net = small_net()
        net.again = net.norm1
        return net

    adapted = safer_tta.adapt(twice(), seed=0)
    list(adapted.stream(batches(1)))
    adapted.save(tmp_path / "s")
    safer_tta.adapt(twice()).load(tmp_path / "s")


def test_a_state_fits_only_its_own_norms_and_normalisation(tmp_path):
    safer_tta.adapt(small_net(), norm="medbn").save(tmp_path / "s")
    with pytest.raises(ValueError, match="norms"):
        safer_tta.adapt(small_net()).load(tmp_path / "s")
    safer_tta.adapt(small_net()).save(tmp_path / "s")
    with pytest.raises(ValueError, match="normalisation"):
        safer_tta.adapt(safer_tta.Classifier(small_net(), mean=0.5, std=0.5)).load(tmp_path / "s")


def test_saved_files_may_be_read_by_others(tmp_path):
    earlier = os.umask(0o022)
    try:
        _, path = saved(tmp_path)
    finally:
        os.umask(earlier)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("keep", [0, 5, 50, 400, -1])
def test_a_file_cut_short_is_named(tmp_path, keep):
    adapted, path = saved(tmp_path)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(tensorfile.TensorFileError, match=r"state\.safetensors"):
        adapted.load(path)


def test_a_header_that_is_not_json_is_named(tmp_path):
    adapted, path = saved(tmp_path)
    raw = bytearray(path.read_bytes())
    raw[8:12] = b"\xff\xff\xff\xff"
    path.write_bytes(raw)
    with pytest.raises(tensorfile.TensorFileError, match="not a safetensors file"):
        adapted.load(path)


def test_a_full_disk_leaves_the_old_state_in_place(tmp_path):
    """A real write error, from a limit on the size of files: the earlier file is whole and nothing lies beside it."""
    _, path = saved(tmp_path)
    earlier = path.read_bytes()
    result = run(
        """
        import resource, signal, sys, safer_tta
        from tests.conftest import batches, same, small_net
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        adapted = safer_tta.adapt(small_net(), seed=0)
        list(adapted.stream(batches(1)))
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
        try:
            adapted.save(sys.argv[1])
        except OSError as error:
            print("OSError", error.errno)
        """,
        path,
    )
    assert result.stdout.startswith("OSError"), result.stderr
    assert path.read_bytes() == earlier
    assert os.listdir(tmp_path) == [path.name]


def test_killed_while_saving_the_file_is_whole(tmp_path):
    """SIGKILL at several moments of an endless loop of saves: whatever stands under the name can be loaded."""
    path = tmp_path / "state.safetensors"
    code = """
        import sys, safer_tta
        from tests.conftest import batches, same, small_net
        adapted = safer_tta.adapt(small_net(), "pl", seed=0)
        list(adapted.stream(batches(1)))
        adapted.save(sys.argv[1])
        print("saving", flush=True)
        while True:
            adapted.save(sys.argv[1])
    """
    for delay in (0.0, 0.003, 0.011, 0.029):
        command = [sys.executable, "-c", textwrap.dedent(code), str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout.readline() == "saving\n"
            time.sleep(delay)
            process.send_signal(signal.SIGKILL)
        safer_tta.adapt(small_net(), "pl").load(path)


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library")
def test_freed_memory_is_kept_when_asked_for():
    program = """
import sys, torch
from safer_tta import keep_freed_memory
if sys.argv[1] == "keep":
    assert keep_freed_memory()
def resident():
    return int(open("/proc/self/statm").read().split()[1]) * 4096
before = resident()
block = torch.ones(50_000_000)
del block
print(resident() - before)
"""
    kept, returned = (
        int(subprocess.run([sys.executable, "-c", program, how], capture_output=True, text=True, check=True).stdout)
        for how in ("keep", "as it is")
    )
    assert kept > 150e6
    assert returned < 50e6


def test_what_the_source_taught_stays_after_a_load_and_a_reset(tmp_path):
    fitted = safer_tta.adapt(small_net(), "eata", seed=0)
    fitted.fit_source(batches(2))
    fitted.save(tmp_path / "fitted.safetensors")
    loaded = safer_tta.adapt(small_net(), "eata", seed=0).load(tmp_path / "fitted.safetensors")
    loaded.reset()
    expected, got = (sum(float(t.sum()) for n, t in m.state_dict().items() if "fisher" in n) for m in (fitted, loaded))
    assert got == expected > 0
    with pytest.raises(TypeError, match="no Fisher penalty"):
        safer_tta.adapt(small_net(), "rdumb", seed=0).fit_source(batches(1))


def test_what_the_source_taught_is_the_start_to_which_a_method_goes_back():
    fitted = safer_tta.adapt(small_net(), "eata", seed=0, **LEARNING["eata"])
    fitted.fit_source(batches(2))
    start = fitted.state_dict()
    first = learnt(fitted, batches(3))
    fitted.reset()
    assert all(torch.equal(t, start[n]) for n, t in fitted.state_dict().items())
    assert any(t.any() for n, t in start.items() if "fisher" in n)
    assert all(torch.equal(a, b) for a, b in zip(first, learnt(fitted, batches(3)), strict=True))


def test_moments_lie_in_memory_as_their_parameters_do(tmp_path):
    """Fused optimisers, those of a GPU, refuse others; weights lie channels last when passes are in bfloat16."""
    first, second = (safer_tta.adapt(small_net(), "pl", False, seed=0, precision="bfloat16") for _ in range(2))
    list(first.stream(batches(2)))
    first.save(tmp_path / "state.safetensors")
    second.load(tmp_path / "state.safetensors")
    moments = [(p, s["exp_avg"]) for p, s in second.optimizer.state.items()]
    assert any(p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous() for p, _ in moments)
    assert all(p.stride() == moment.stride() for p, moment in moments)
