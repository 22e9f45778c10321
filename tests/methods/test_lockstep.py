"""A step for several streams gives each what it would have got alone."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import safer_tta
from safer_tta.errors import InvalidValueError
from safer_tta.methods import METHODS, Lockstep, Method
from safer_tta.models import statistics
from tests.conftest import LEARNING, adapt_small, batches, same, small_net

GATE = {"name": "safer-g", "views": 3}
TOGETHER = {"tent", "none", "bn"}


@pytest.fixture(autouse=True)
def learn_from_few_classes(monkeypatch):
    """A network with random weights names few classes, and norm "stream" learns nothing from those."""
    monkeypatch.setattr(statistics, "LEAST_DIVERSE", 0.0)


def build(method="tent", predictor=GATE, norm=None, *, dtype=torch.float64, model=None) -> Method:
    model = small_net() if model is None else model
    return safer_tta.adapt(model.to(dtype), method, predictor, norm=norm, seed=0, mean=0.4, std=0.3)


def states_of(method: Method, histories: list[int]) -> list[dict[str, torch.Tensor]]:
    """States of streams that have seen so many batches each."""
    states = []
    for number, length in enumerate(histories):
        method.reset()
        method.state.generator.manual_seed(number)
        for images in batches(length, seed=50 + number):
            method(images)
        states.append(method.state_dict())
    return states


def alone(method: Method, state, images, *, learn: bool = True):
    method.load_state_dict(state)
    method.frozen = not learn
    prediction = method(images)
    method.unfreeze()
    return prediction, method.state_dict()


def check(method: Method, states, rounds, *, learn: bool = True, atol: float = 1e-9) -> None:
    """Step streams together and alone, and compare answers and states."""
    lockstep, expected = Lockstep(method), list(states)
    for images in rounds:
        taken = lockstep.step(states, images, learn=learn)
        states = [one.state for one in taken]
        for number, one in enumerate(taken):
            prediction, expected[number] = alone(method, expected[number], images[number], learn=learn)
            assert one.prediction.report.pipelines == prediction.report.pipelines
            assert one.finite
            assert one.refused == ""
            for part in ("probs", "logits", "features", "suspicion"):
                got, wanted = getattr(one.prediction, part), getattr(prediction, part)
                torch.testing.assert_close(got, wanted, rtol=0, atol=atol)
            torch.testing.assert_close(one.state, expected[number], rtol=atol, atol=atol)


def rounds(streams: int, sizes: list[int], seed: int = 0) -> list[torch.Tensor]:
    return [
        torch.stack([batches(1, size=size, seed=seed + 100 * number + stream)[0] for stream in range(streams)])
        for number, size in enumerate(sizes)
    ]


@pytest.mark.parametrize("norm", ["model", "stream", "medbn"])
@pytest.mark.parametrize("predictor", ["plain", "jpeg", "safer", "safer-a", "safer-g"])
def test_streams_of_tent_step_together_as_alone(predictor, norm):
    """They have seen 0, 1 and 5 batches before, so that optimisers and windows differ; the last batch is large."""
    method = build("tent", predictor, norm)
    check(method, states_of(method, [0, 1, 5]), rounds(3, [6, 6, 3, 20]))


@pytest.mark.parametrize(("name", "norm"), [("none", None), ("none", "model"), ("bn", "stream")])
def test_methods_without_a_loss_step_together(name, norm):
    method = build(name, GATE, norm)
    check(method, states_of(method, [0, 3]), rounds(2, [6, 4]))


def test_frozen_streams_are_answered_together():
    method = build()
    check(method, states_of(method, [0, 2, 1]), rounds(3, [6, 6]), learn=False)


@pytest.mark.parametrize("predictor", ["plain", "safer-g"])
def test_in_single_precision_answers_agree_to_six_digits(predictor):
    method = build("tent", predictor, dtype=torch.float32)
    lockstep, states = Lockstep(method), states_of(method, [0, 1, 5])
    for images in rounds(3, [6, 6, 6]):
        taken = lockstep.step(states, images)
        for one, state, batch in zip(taken, states, images, strict=True):
            prediction, _ = alone(method, state, batch)  # from the same state
            torch.testing.assert_close(one.prediction.probs, prediction.probs, rtol=0, atol=1e-6)
        states = [one.state for one in taken]


class Tokens(nn.Module):
    """Layer norm over the features of every place, with the places of all images in the first dimension or not."""

    def __init__(self, split: bool) -> None:
        super().__init__()
        self.split, self.conv, self.norm, self.fc = split, nn.Conv2d(3, 8, 8, 8), nn.LayerNorm(8), nn.Linear(8, 5)
        self.group = nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.group(self.conv(x)).flatten(2).transpose(1, 2)
        x = self.norm(x.flatten(0, 1)).unflatten(0, x.shape[:2]) if self.split else self.norm(x)
        return self.fc(x.mean(dim=1))


@pytest.mark.parametrize("split", [False, True])
def test_norms_of_images_step_together(split):
    torch.manual_seed(0)
    method = build(model=Tokens(split))
    assert Lockstep(method).agrees(24)
    check(method, states_of(method, [0, 2]), rounds(2, [6, 4]))


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), streams=st.integers(2, 5), size=st.integers(2, 7))
def test_the_company_of_a_stream_does_not_matter(data, streams, size):
    method = build()
    states = states_of(method, data.draw(st.lists(st.integers(0, 2), min_size=streams, max_size=streams)))
    (images,) = rounds(streams, [size])
    order = data.draw(st.permutations(range(streams)))
    some = order[: data.draw(st.integers(1, streams))]
    lockstep = Lockstep(method)
    everybody = lockstep.step(states, images)
    for number, one in zip(some, lockstep.step([states[n] for n in some], images[some]), strict=True):
        torch.testing.assert_close(one.prediction.probs, everybody[number].prediction.probs, rtol=0, atol=1e-9)
        torch.testing.assert_close(one.state, everybody[number].state, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("broken", ["weights", "statistics"])
def test_a_broken_stream_does_not_touch_the_others(broken):
    method = build()
    states, (images,) = states_of(method, [2, 2, 2]), rounds(3, [6])
    healthy = Lockstep(method).step(states, images)
    name = next(n for n in states[1] if n.endswith("weight" if broken == "weights" else "deviations"))
    states[1] = {**states[1], name: torch.full_like(states[1][name], torch.nan)}
    first, bad, last = Lockstep(method).step(states, images)
    assert (bad.refused, bad.finite) == ("losses", False)
    assert torch.equal(bad.state["optimizer.0.step"], states[1]["optimizer.0.step"])
    assert not torch.equal(bad.state["generator"], states[1]["generator"])  # as of any refused batch
    alone(method, states[1], images[1])
    assert method.refused["losses"] == 1
    for number, one in ((0, first), (2, last)):
        torch.testing.assert_close(one.prediction.probs, healthy[number].prediction.probs, rtol=0, atol=1e-12)
        torch.testing.assert_close(one.state, healthy[number].state, rtol=1e-12, atol=1e-12)


def test_gradients_that_are_not_finite_are_not_learnt_from(monkeypatch):
    method = build()
    states, (images,) = states_of(method, [1, 2]), rounds(2, [6])
    monkeypatch.setattr(method, "objective", lambda seen: (seen.lesson.probs - seen.lesson.probs.detach()).sum().sqrt())
    for number, one in enumerate(Lockstep(method).step(states, images)):
        _, expected = alone(method, states[number], images[number])
        assert one.refused == "gradients"
        assert same(one.state, states[number])
        torch.testing.assert_close(one.state, expected, rtol=0, atol=0)
    assert method.refused["gradients"] == 2


def test_a_stream_with_too_few_classes_notes_but_does_not_learn(monkeypatch):
    """While its neighbour learns."""
    method = build()
    diverse = torch.tensor([False, True])
    states, (images,) = states_of(method, [2, 2]), rounds(2, [6])
    monkeypatch.setattr(statistics.StreamStatistics, "diverse", lambda self: diverse)
    dull, lively = Lockstep(method).step(states, images)
    assert same_weights(dull.state, states[0])
    assert not same(dull.state, states[0])
    assert not same_weights(lively.state, states[1])


def same_weights(one, other) -> bool:
    names = [name for name in one if name.startswith("optimizer") or name.rpartition(".")[2] in ("weight", "bias")]
    return all(torch.equal(one[name], other[name]) for name in names)


def test_the_state_in_the_method_and_those_given_are_left_alone():
    method = build()
    states, (images,) = states_of(method, [1, 2]), rounds(2, [6])
    before, copies = method.state_dict(), [{n: t.clone() for n, t in state.items()} for state in states]
    taken = Lockstep(method).step(states, images)
    assert all(torch.equal(before[name], tensor) for name, tensor in method.state_dict().items())
    for state, copied in zip(states, copies, strict=True):
        assert all(torch.equal(state[name], copied[name]) for name in copied)
    storages = [{t.untyped_storage().data_ptr() for t in one.state.values()} for one in taken]
    assert not storages[0] & storages[1]  # a stream that is deleted takes its memory with it


@pytest.mark.parametrize("name", sorted(METHODS))
def test_methods_that_cannot_do_so_say_why(name):
    method = adapt_small(name, **LEARNING.get(name, {}))
    if name in TOGETHER - {"bn"}:  # bn moves running statistics, unless they follow the stream
        assert Lockstep(method).agrees(24)
    else:
        with pytest.raises(InvalidValueError, match=r"several streams|kept apart"):
            Lockstep(method)


def test_a_predictor_in_chunks_is_refused():
    with pytest.raises(InvalidValueError, match="predictor"):
        Lockstep(build("tent", {"name": "safer", "chunk": 4}))


class Mixed(nn.Module):
    """A model in which the images of a batch see each other, beside the norms."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = small_net()
        self.fc = nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc(self.inner(x + x.mean(dim=0, keepdim=True)))


def test_a_model_that_mixes_images_is_found_out():
    assert not Lockstep(build("tent", "plain", model=Mixed())).agrees(24)
    assert Lockstep(build("tent", "plain")).agrees(24)


def test_a_state_of_another_method_is_refused():
    method = build()
    (images,) = rounds(1, [6])
    state = method.state_dict()
    state.pop("predictor.seen")
    with pytest.raises(InvalidValueError, match="state"):
        Lockstep(method).step([state], images)
