"""Test saved states: in a new process, killed half-way, damaged, of another method or model, on a full disk."""

import errno
import os
import resource
import signal
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch

import safer_tta
from safer_tta import Classifier
from safer_tta._internal import safetensors_io
from safer_tta.errors import InvalidValueError, TensorFileError
from safer_tta.methods._frame import state
from tests.conftest import adapt_small, batches, identical, same, small_net
from tests.processes import CONTEXT, call, running


def saved(folder: Path, method: str = "tent") -> tuple[safer_tta.Method, Path]:
    adapted = adapt_small(method, "safer-g")
    list(adapted.stream(batches(2)))
    adapted.save(folder / "state.safetensors")
    return adapted, folder / "state.safetensors"


def write_answers(folder: Path) -> None:
    for method in ("tent", "pl"):
        adapted = adapt_small(method, "safer-g").load(folder / method)
        answers = [p.probs for p in adapted.stream(batches(6)[3:])]
        safetensors_io.write(folder / f"{method}-answers", {str(i): a for i, a in enumerate(answers)})


def test_a_new_process_continues_bit_for_bit(tmp_path):
    stream, expected = batches(6), {}
    for method in ("tent", "pl"):
        whole, half = (adapt_small(method, "safer-g") for _ in range(2))
        expected[method] = [p.probs for p in whole.stream(stream)][3:]
        list(half.stream(stream[:3]))
        half.save(tmp_path / method)
    assert call(write_answers, tmp_path) == 0
    for method, probs in expected.items():
        answers, _ = safetensors_io.read(tmp_path / f"{method}-answers")
        assert all(torch.equal(answers[str(i)], probs[i]) for i in range(3))


def save_for_ever(folder: Path, connection: Connection) -> None:
    adapted, path = saved(folder, "pl")
    connection.send("saved")
    while not connection.poll():  # until the test kills it, or has ended itself
        adapted.save(path)


def test_a_process_killed_while_saving_leaves_a_whole_file(tmp_path):
    """SIGKILL comes at several moments of an endless loop of saves; what has the name afterwards can be loaded."""
    for delay in (0.0, 0.003, 0.011, 0.029):
        here, there = CONTEXT.Pipe()
        with running(save_for_ever, tmp_path, there) as process:
            there.close()
            assert here.recv() == "saved"
            time.sleep(delay)
            process.kill()
            process.join()
            assert process.exitcode == -signal.SIGKILL, "it was not killed while it saved"
        adapt_small("pl", "safer-g").load(tmp_path / "state.safetensors")


def test_a_full_disk_leaves_the_old_state_in_place(tmp_path):
    """The write error is real, from a limit on the size of files: the old file is whole, and no other is left."""
    adapted, path = saved(tmp_path)
    before = path.read_bytes()
    list(adapted.stream(batches(1)))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError) as failure:
            adapted.save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert failure.value.errno == errno.EFBIG
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == [path.name]


@pytest.mark.parametrize(("norm", "share"), [("model", 300), ("stream", 80)])
def test_a_state_of_tent_is_small(norm, share):
    adapted = safer_tta.adapt(safer_tta.models.zoo.create("resnet18", num_classes=7), norm=norm, seed=0)
    adapted(torch.rand(2, 3, 32, 32))
    model_bytes = sum(p.numel() * 4 for p in adapted.classifier.parameters())
    assert adapted.state_bytes < model_bytes / share


def test_state_bytes_are_those_of_the_file(tmp_path):
    """A safetensors file is the length of its header in 8 bytes, the header, and the numbers that count here."""
    adapted, path = saved(tmp_path)
    raw = path.read_bytes()
    assert len(raw) == 8 + int.from_bytes(raw[:8], "little") + adapted.state_bytes


def test_a_state_fits_only_a_model_with_the_same_statistics(tmp_path):
    """The running statistics of batch norms are a part of the source model."""
    for method in ("none", "pl"):
        _, path = saved(tmp_path, method)
        other = small_net()
        other.norm2.running_var *= 2
        with pytest.raises(InvalidValueError, match="another source model"):
            safer_tta.adapt(other, method).load(path)


def test_a_state_loaded_into_its_own_method_takes_back_everything():
    """The same stream is then learnt again alike; Adam's count of steps is taken back too."""
    adapted, stream = adapt_small(), batches(6)
    list(adapted.stream(stream[:2]))
    there = adapted.state_dict()
    list(adapted.stream(stream[2:]))
    expected = adapted.state_dict()
    adapted.load_state_dict(there)
    assert same(adapted.state_dict(), there)
    list(adapted.stream(stream[2:]))
    assert same(adapted.state_dict(), expected)


@pytest.mark.parametrize("part", ["model", "teacher", "policy", "memory", "optimizer", "policy_optimizer"])
def test_one_number_that_is_not_finite_is_found_in_any_part(part):
    """TeSLA has a tensor of every kind."""
    adapted = adapt_small("tesla")
    list(adapted.stream(batches(2)))
    assert adapted.state.finite()
    good = adapted.state_dict()
    name = next(n for n, t in good.items() if n.startswith(f"{part}.") and t.dim())
    spoilt = good[name].clone()
    spoilt.view(-1)[-1] = torch.inf
    adapted.load_state_dict({**good, name: spoilt})
    assert not adapted.state.finite()


def test_states_of_other_methods_models_versions_and_formats_are_refused(tmp_path):
    adapted, path = saved(tmp_path)
    before = adapted.state_dict()
    with pytest.raises(InvalidValueError, match="'tent'"):
        safer_tta.adapt(small_net(), "pl").load(path)
    with pytest.raises(InvalidValueError, match="another source model"):
        safer_tta.adapt(small_net(seed=3), "tent").load(path)
    tensors, header = safetensors_io.read(path)
    safetensors_io.write(tmp_path / "newer", tensors, {**header, "version": str(state.VERSION + 1)})
    with pytest.raises(InvalidValueError, match="Upgrade"):
        adapted.load(tmp_path / "newer")
    safetensors_io.write(tmp_path / "foreign", tensors)
    with pytest.raises(InvalidValueError, match="not a saved state"):
        adapted.load(tmp_path / "foreign")
    assert identical(adapted.state_dict(), before)


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
        with pytest.raises(InvalidValueError, match="does not fit"):
            adapted.load_state_dict(wrong)
    assert identical(adapted.state_dict(), before)


def test_a_model_with_shared_layers_can_be_saved_and_loaded(tmp_path):
    net = small_net()
    net.again = net.norm1
    adapted = safer_tta.adapt(net, seed=0)
    list(adapted.stream(batches(1)))
    adapted.save(tmp_path / "s")
    safer_tta.adapt(net).load(tmp_path / "s")


def test_a_state_fits_only_its_own_norms_and_normalisation(tmp_path):
    safer_tta.adapt(small_net(), norm="medbn").save(tmp_path / "s")
    with pytest.raises(InvalidValueError, match="norms"):
        safer_tta.adapt(small_net()).load(tmp_path / "s")
    safer_tta.adapt(small_net()).save(tmp_path / "s")
    with pytest.raises(InvalidValueError, match="normalisation"):
        safer_tta.adapt(Classifier(small_net(), mean=0.5, std=0.5)).load(tmp_path / "s")


def test_other_users_may_read_a_saved_file(tmp_path):
    earlier = os.umask(0o022)
    try:
        _, path = saved(tmp_path)
    finally:
        os.umask(earlier)
    assert path.stat().st_mode & 0o777 == 0o644


@pytest.mark.parametrize("keep", [0, 5, 50, 400, -1, "no JSON"])
def test_a_damaged_file_is_refused_with_its_name(tmp_path, keep):
    adapted, path = saved(tmp_path)
    raw = path.read_bytes()
    path.write_bytes(raw[:8] + b"\xff" * 4 + raw[12:] if keep == "no JSON" else raw[:keep])
    with pytest.raises(TensorFileError, match="not a safetensors file" if keep == "no JSON" else r"state\.safetensors"):
        adapted.load(path)


def test_loaded_moments_have_the_memory_layout_of_their_parameters(tmp_path):
    """Fused optimisers of a GPU need it; with passes in bfloat16 the weights are stored channels last."""
    first, second = (adapt_small("pl", precision="bfloat16") for _ in range(2))
    list(first.stream(batches(2)))
    first.save(tmp_path / "state.safetensors")
    second.load(tmp_path / "state.safetensors")
    moments = [(p, s["exp_avg"]) for p, s in second.optimizer.state.items()]
    assert any(p.is_contiguous(memory_format=torch.channels_last) and not p.is_contiguous() for p, _ in moments)
    assert all(p.stride() == moment.stride() for p, moment in moments)
