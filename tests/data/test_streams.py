import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from safer_tta.data import DataError, Stream, StreamSpec, excerpt
from safer_tta.data.streams import DRAWS
from safer_tta.errors import InvalidTypeError, InvalidValueError, UnknownNameError
from tests.data.parts import domain


def stream(clean=None, offset=9, **spec):
    """Return a stream of one domain whose attacked copies are brighter by `offset`."""
    clean = domain() if clean is None else clean
    return Stream([clean], StreamSpec(**spec), [domain(len(clean), offset=offset).images])


def attacked(batches):
    return torch.cat([batch.attacked for batch in batches])


def counts(batches):
    return [int(batch.attacked.sum()) for batch in batches]


@settings(max_examples=40, deadline=None)
@given(count=st.integers(1, 150), batch=st.integers(1, 70), rate=st.integers(0, 100), seed=st.integers(0, 99))
def test_exactly_the_asked_share_of_each_batch_is_attacked(count, batch, rate, seed):
    seen = []
    for images, labels, mask in stream(domain(count), offset=100, attack_rate=rate, batch=batch, seed=seed):
        exact = rate / 100 * len(images)
        assert math.floor(exact) <= int(mask.sum()) <= math.ceil(exact - 1e-9)
        values = images[:, 0, 0, 0].int()
        original = torch.where(mask, (values - 100) % 256, values)
        assert torch.equal(original % 4, labels)
        seen += original.tolist()
    assert sorted(seen) == list(range(count))


@pytest.mark.parametrize("batch", [1, 3, 20, 64])
def test_small_batches_keep_the_attack_rate_and_a_higher_rate_attacks_the_same_images_and_more(batch):
    rates = range(0, 101, 5)
    masks = [attacked(stream(domain(250), offset=3, attack_rate=rate, batch=batch, seed=3)) for rate in rates]
    assert not masks[0].any()
    assert masks[-1].all()
    assert [float(100 * mask.double().mean()) for mask in masks] == pytest.approx(list(rates), abs=10)
    assert all((less <= more).all() for less, more in itertools.pairwise(masks))


def test_bernoulli_draws_each_image():
    found = counts(stream(domain(250), offset=3, attack_rate=20, draw="bernoulli", batch=25))
    assert len(set(found)) > 1
    assert 25 < sum(found) < 75  # four standard deviations about 50


@pytest.mark.parametrize(("batch", "clean_batches"), [(10, 5), (20, 2), (100, 0)])
def test_late_attacks_start_half_way(batch, clean_batches):
    """The first half, rounded down to whole batches, is clean; then the asked share of every batch is attacked."""
    found = counts(stream(attack_rate=30, draw="late", batch=batch))
    assert found == [0] * clean_batches + [round(0.3 * batch)] * (len(found) - clean_batches)


OWNED = {
    "draw": st.sampled_from(["batches", "batches-first"]),
    "batch": st.integers(1, 30),
    "rate": st.integers(0, 100),
}


@settings(max_examples=60, deadline=None)
@given(count=st.integers(1, 150), tail=st.integers(0, 160), **OWNED)
def test_an_attacker_owns_the_asked_share_of_batches_as_a_whole(count, tail, draw, batch, rate):
    """Whole batches lie before the tail; a short one at the end of a stream without a tail is whole too."""
    found = list(stream(domain(count), attack_rate=rate, draw=draw, batch=batch, tail=tail))
    owned = [bool(each.attacked.all()) for each in found]
    assert owned == [bool(each.attacked.any()) for each in found]
    attackable = max(0, count - tail) // batch if tail else len(found)
    assert abs(sum(owned) - rate / 100 * attackable) <= 0.5 + 1e-6
    assert not any(owned[attackable:])
    if draw == "batches-first":
        assert owned == sorted(owned, reverse=True)


@settings(max_examples=40, deadline=None)
@given(rate=st.integers(0, 100), first=st.integers(0, 40), length=st.integers(1, 40))
def test_batches_of_an_attacker_are_spread_evenly(rate, first, length):
    """Every part of the stream has its share of them, up to one batch."""
    owned = attacked(stream(domain(80), attack_rate=rate, draw="batches", batch=1))[first : first + length]
    assert abs(float(owned.double().sum()) - rate / 100 * len(owned)) < 1 + 1e-6


@settings(max_examples=60, deadline=None)
@given(
    draw=st.sampled_from(DRAWS), order=st.sampled_from(["shuffled", "correlated"]), rate=st.integers(0, 100),
    tail=st.integers(0, 120), batch=st.integers(1, 70),
)  # fmt: skip
def test_a_tail_is_never_attacked_and_moves_no_image(draw, order, rate, tail, batch):
    spec = {"draw": draw, "order": order, "batch": batch, "seed": 2}
    plain, clean = (list(stream(attack_rate=rate, **spec)), list(stream(attack_rate=0, **spec)))
    tailed = list(stream(attack_rate=rate, tail=tail, **spec))
    mask = attacked(tailed)
    assert not mask[max(0, 100 - tail) :].any()
    if tail == 0:
        assert torch.equal(mask, attacked(plain))
    images, original = (torch.cat([each.images for each in batches]) for batches in (tailed, clean))
    assert torch.equal(images[~mask], original[~mask])
    assert not mask.any() or (images[mask] != original[mask]).any()
    assert torch.equal(torch.cat([b.labels for b in tailed]), torch.cat([b.labels for b in clean]))


@pytest.mark.parametrize("order", ["shuffled", "correlated", "continual", "mixed"])
def test_seeds_differ_in_order_and_in_attacked_images(order):
    streams = [stream(order=order, attack_rate=30, batch=20, seed=seed) for seed in range(6)]
    assert len({each.order.tobytes() for each in streams}) == 6
    assert len({tuple(attacked(each).tolist()) for each in streams}) == 6


def test_classes_take_turns_by_seed():
    firsts = set()
    for seed in range(6):
        labels = next(iter(Stream([domain()], StreamSpec(order="correlated", batch=100, seed=seed)))).labels
        firsts.add(tuple(labels.unique_consecutive().tolist()))
    assert all(sorted(turn) == [0, 1, 2, 3] for turn in firsts)
    assert len(firsts) > 2


def test_orders():
    two = [domain(60, name="a"), domain(40, name="b", offset=60)]

    def seen(order, count=2):
        """Return the grey values of a stream's images, and how often the class changes."""
        batches = list(Stream(two[:count], StreamSpec(order=order)))
        labels = torch.cat([batch.labels for batch in batches])
        return torch.cat([batch.images[:, 0, 0, 0] for batch in batches]), int(labels.diff().ne(0).sum())

    assert seen("shuffled", count=1)[1] > 20
    assert seen("correlated", count=1)[1] == 3
    continual, (mixed, changes) = seen("continual")[0], seen("mixed")
    assert torch.equal(continual < 60, torch.arange(100) < 60)
    assert not (mixed[:60] < 60).all()
    assert changes > 40  # unlike correlated ones


def test_an_excerpt_is_drawn_by_a_seed_with_its_labels():
    whole = domain()
    one, again, other = (excerpt(whole, 30, seed) for seed in (1, 1, 2))
    assert np.array_equal(one.images[:, 0, 0, 0] % 4, one.labels)  # as `domain` labels them
    assert len(np.unique(one.images[:, 0, 0, 0])) == len(one) == 30
    assert np.array_equal(one.images, again.images)
    assert set(one.images[:, 0, 0, 0]) != set(other.images[:, 0, 0, 0])
    assert one.content == again.content
    assert len({whole.content, one.content, other.content, excerpt(whole, 20, 1).content}) == 4


def test_a_stream_is_determined_by_its_manifest_and_named_whatever_the_types_of_its_numbers():
    names = {stream(attack_rate=r, seed=s).name for r in (50, 50.0, np.float32(50)) for s in (1, np.int64(1))}
    assert len(names) == 1
    spec = {"attack_rate": 30, "seed": 5, "limit": 50, "batch": 16}
    one, two = stream(**spec), stream(**spec)
    assert one.manifest() == two.manifest()
    assert one.name == two.name
    assert all(torch.equal(a.images, b.images) for a, b in zip(one, two, strict=True))
    assert sum(len(b.labels) for b in one) == 50
    assert one.name != stream(**{**spec, "seed": 6}).name
    assert one.name != stream(offset=10, **spec).name
    assert len(one) == 4
    for first in range(5):  # a run that resumes sees the batches that it would have seen
        rest = zip(one.since(first), list(two)[first:], strict=True)
        assert all(torch.equal(a, b) for left, right in rest for a, b in zip(left, right, strict=True))


@pytest.mark.parametrize(
    ("spec", "error", "message"),
    [
        ({"order": "shufled"}, UnknownNameError, r"order 'shufled' is unknown \(did you mean 'shuffled'"),
        ({"draw": "some"}, UnknownNameError, "draw 'some' is unknown; expected .*bernoulli"),
        ({"attack_rate": 150.0}, InvalidValueError, "attack_rate is 150.0; expected .* 0 to 100"),
        ({"batch": 0}, InvalidValueError, "batch is 0; expected .* at least 1"),
        ({"limit": 0}, InvalidValueError, "limit is 0; expected .* at least 1"),
        ({"tail": -1}, InvalidValueError, "tail is -1; expected .* at least 0"),
        ({"tail": 2.5}, InvalidTypeError, "tail is 2.5; expected a whole number"),
        ({"batch": 2.5}, InvalidTypeError, "batch is 2.5; expected a whole number"),
    ],
)
def test_invalid_settings_are_refused(spec, error, message):
    with pytest.raises(error, match=message):
        StreamSpec(**spec)


@pytest.mark.parametrize(
    ("domains", "copies", "message"),
    [
        ([domain()], None, "no attacked images came; make them first"),
        ([domain(), domain()], None, "use continual or mixed"),
        ([domain()], [domain(7).images], r"expected uint8 \(100, 3, 2, 2\)"),
        ([domain()], [domain().images / 255], "Convert floats"),
        ([domain()], [], "0 arrays for 1 domains; expected one each"),
        (domain(), [domain().images], r"such as \[domain\]"),
    ],
)
def test_domains_and_copies_that_do_not_fit_are_refused(domains, copies, message):
    rate = 0 if len(domains) == 2 else 10
    with pytest.raises(DataError, match=message):
        Stream(domains, StreamSpec(attack_rate=rate), copies)
