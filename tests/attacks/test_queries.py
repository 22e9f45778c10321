"""Square and RayS: against a classifier whose margin is known, against counters, and where nothing has a gradient."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import safer_tta
from safer_tta.attacks import ATTACKS, full_threat, pgd, rays, square
from safer_tta.errors import InvalidTypeError, InvalidValueError
from tests.attacks.parts import EPS, eight_bit, generator, labels
from tests.conftest import batches, classifier, identical, small_net

BOTH = pytest.mark.parametrize("attack", [square, rays])
SIDE, SIZE = 8, 6


def linear(margin: float):
    """Images, labels and a function that answers wrongly where every pixel has moved by more than the margin (l∞)."""
    images = 100 + eight_bit(size=SIZE, side=SIDE) // 5  # far from black and white
    rows = torch.arange(3 * SIDE).reshape(3, SIDE, 1) // 2 % 2  # weights in blocks, as of edges and colours
    signs = (2.0 * rows - 1).expand(3, SIDE, SIDE)
    bias = (images / 255 * signs).mean(dim=(1, 2, 3)) + margin
    asked = []

    def predict(x):
        asked.append(x.clone())
        score = (x * signs).mean(dim=(1, 2, 3)) - bias
        return torch.stack([-50 * score, 50 * score], dim=1)

    return images, torch.zeros(SIZE, dtype=torch.long), predict, asked


@BOTH
def test_what_can_be_misread_is_found(attack):
    images, y, predict, _ = linear(margin=5.5 / 255)
    found = attack(predict, images, y, queries=800, generator=generator())
    assert found.misread.all()
    assert torch.equal(predict(found.images).argmax(dim=1), 1 - y)
    assert ((found.images * 255).round().int() - images.int()).abs().max() <= 8


@BOTH
def test_what_cannot_be_misread_within_the_budget_is_not(attack):
    images, y, predict, _ = linear(margin=8.5 / 255)
    found = attack(predict, images, y, queries=300, generator=generator())
    assert not found.misread.any()
    assert torch.equal(predict(found.images).argmax(dim=1), y)
    assert torch.equal(found.queries, torch.full([SIZE], 300))
    assert ((found.images * 255).round().int() - images.int()).abs().amax(dim=(1, 2, 3)).tolist() == [8] * SIZE


@BOTH
@pytest.mark.parametrize("average", [1, 3])
def test_queries_are_counted_exactly(attack, average):
    """Every query shows the whole batch. An image has taken those up to the one by which it is misread."""
    images, y, predict, asked = linear(margin=4.5 / 255)
    y[0] = 1  # misread to begin with
    found = attack(predict, images, y, queries=400 * average, average=average, generator=generator())
    assert found.misread.all()
    assert len(asked) == found.queries.max() <= 400 * average
    assert all(len(shown) == SIZE for shown in asked)
    for i in range(SIZE):
        shown = [torch.equal(x[i], found.images[i]) for x in asked]
        assert shown.index(True) == found.queries[i] - average
        assert all(shown[found.queries[i] - average :]), "once misread, it stays as it is"
    assert found.queries[0] == average
    assert torch.equal(found.images[0], images[0] / 255)


def test_square_starts_from_vertical_stripes_and_stays_at_the_edge_of_the_budget():
    images, y, predict, asked = linear(margin=20 / 255)
    square(predict, images, y, queries=40, generator=generator())
    moved = [(x * 255).round() - images for x in asked]
    assert not moved[0].any()
    assert torch.equal(moved[1], moved[1][:, :, :1].expand_as(moved[1]))
    assert len({tuple(stripes[0].tolist()) for stripes in moved[1].flatten(0, 1)}) > SIZE
    assert all(bool((change.abs() == 8).all()) for change in moved[1:])


def test_square_goes_on_from_its_stripes_even_if_they_are_worse_than_the_images():
    images, asked = eight_bit() / 255, []

    def predict(x):
        asked.append(x.clone())
        lead = 1 + (x - images).abs().mean(dim=(1, 2, 3))
        return torch.stack([lead, -lead], dim=1)

    found = square(predict, images, torch.zeros(6, dtype=torch.long), queries=2, generator=generator())
    assert torch.equal(found.images, asked[1])
    assert not torch.equal(found.images, images)


def test_rays_keeps_what_is_found_at_a_radius_as_large_as_the_budget():
    """The first image is misread where it is nearly white, the second nowhere."""

    def predict(x):
        wrong = (x.mean(dim=(1, 2, 3)) > 0.9) & torch.tensor([True, False])
        return torch.stack([~wrong, wrong], dim=1).float()

    found = rays(predict, eight_bit(size=2), torch.zeros(2, dtype=torch.long), eps=1.0, queries=12)
    assert found.misread.tolist() == [True, False]
    assert found.queries.tolist() == [3, 12], "as it is, at the best radius so far, at the budget"


@BOTH
def test_queries_that_average_does_not_divide_are_left(attack):
    images, y, predict, asked = linear(margin=20 / 255)
    assert attack(predict, images, y, queries=20, average=3, generator=generator()).queries.tolist() == [18] * SIZE
    assert len(asked) == 18


@BOTH
def test_more_queries_leave_fewer_right_and_no_fewer_than_gradients(attack):
    model = small_net().eval()
    images = (torch.cat(batches(6)) * 255).round() / 255
    own = model(images).argmax(dim=1)
    left = [
        attack(model, images, own, queries=n, generator=generator()).misread.logical_not().sum() for n in (1, 40, 400)
    ]
    assert left[0] == len(images)
    assert left[0] > left[1] > left[2]
    white = pgd(model, images, own, eps=EPS, step=1 / 255, steps=40, generator=generator())
    assert left[2] >= (model(white).argmax(dim=1) == own).sum()


@BOTH
def test_no_gradients_are_asked_for(attack):
    """The model answers in whole numbers, under inference mode, and what is asked needs no gradient."""
    net, seen = small_net().eval(), []

    def predict(x):
        seen.append(x.requires_grad or torch.is_grad_enabled())
        return (10 * net(x)).round().int()

    images = eight_bit()
    own = predict(images / 255).argmax(dim=1)
    with torch.inference_mode():
        found = attack(predict, images, own, queries=100, generator=generator())
    assert found.misread.any()
    assert not any(seen[1:])


@BOTH
@pytest.mark.parametrize("name", ["safer", "safer-g"])
def test_a_predictor_draws_afresh_and_is_not_moved(attack, name, monkeypatch):
    adapted = safer_tta.adapt(small_net(), "tent", name, seed=0)
    adapted(batches(1)[0])
    before, images = adapted.state_dict(), eight_bit(side=24)
    views, original = [], type(adapted.predictor).show
    with monkeypatch.context() as patched:
        kept = lambda self, x, draw: views.append(draw.views(images / 255)) or original(self, x, draw)  # noqa: E731
        patched.setattr(type(adapted.predictor), "show", kept)
        found = attack(adapted.predictor, images, labels(), queries=5, generator=generator())
    assert not any(torch.equal(one, other) for one, other in itertools.pairwise(views))
    assert len(views) == found.queries.max()
    assert identical(before, adapted.state_dict())
    again = attack(adapted.predictor, images, labels(), queries=5, generator=generator())
    assert all(torch.equal(one, other) for one, other in zip(found, again, strict=True))


@BOTH
def test_statistics_that_follow_the_stream_are_not_moved(attack):
    predictor = safer_tta.Plain(classifier().train())
    before = {name: tensor.clone() for name, tensor in predictor.classifier.state_dict().items()}
    attack(predictor, eight_bit(), labels(), queries=3)
    assert identical(before, predictor.classifier.state_dict())


@BOTH
def test_every_query_moves_a_method_unless_it_is_frozen(attack):
    adapted = safer_tta.adapt(small_net(), seed=0)
    images = eight_bit(side=24)
    for frozen in (True, False):
        before = adapted.freeze().state_dict() if frozen else adapted.unfreeze().state_dict()
        with torch.inference_mode():
            attack(adapted, images, labels(), queries=3, generator=generator())
        weights = [name for name, tensor in adapted.state_dict().items() if not torch.equal(tensor, before[name])]
        assert any("norm" in name for name in weights) is not frozen


@BOTH
def test_a_lucky_answer_does_not_end_the_search(attack):
    """An image is misread by chance at its second query, then read right again: the search goes on."""
    images, y, predict, asked = linear(margin=5.5 / 255)
    never = [2]

    def moody(x):
        wrong = predict(x)
        if len(asked) in never:
            wrong[0] = wrong[0].flip(0) + torch.tensor([0.0, 1e3])
        return wrong

    found = attack(moody, images, y, queries=800, generator=generator())
    assert found.misread.all()
    assert found.queries[0] > 3
    assert torch.equal(predict(found.images).argmax(dim=1), 1 - y)


@BOTH
def test_repeated_answers_are_averaged(attack):
    """One answer of three is wrong about every image: neither the majority nor the mean follows it."""
    images, y, predict, asked = linear(margin=20 / 255)

    def noisy(x):
        answer = predict(x).clamp(-3, 3)
        return -answer if len(asked) % 3 == 1 else answer

    alone = attack(noisy, images, y, queries=60, generator=generator())
    asked.clear()
    averaged = attack(noisy, images, y, queries=60, average=3, generator=generator())
    assert alone.queries.min() < 60
    assert not averaged.misread.any()


@BOTH
@settings(max_examples=15, deadline=None)
@given(eps=st.floats(0.001, 0.3), seed=st.integers(0, 1000), whole=st.booleans())
def test_the_budget_holds_exactly_on_eight_bits(attack, eps, seed, whole):
    images = eight_bit(seed) / 255
    images = images if whole else (images + 0.3 / 255).clamp(0, 1)  # between two levels
    found = attack(small_net().eval(), images, labels(), eps=eps, queries=25, generator=generator(seed)).images
    change = found.double() - images.double()
    assert change.abs().max() <= eps + 1e-6
    assert found.min() >= 0
    assert found.max() <= 1
    levels = found * 255
    moved = change.ne(0)
    assert torch.allclose(levels[moved], levels[moved].round(), atol=1e-4)


@BOTH
def test_rectangles_and_other_channels_can_be_attacked(attack):
    images = torch.randint(0, 256, (3, 1, 5, 9), generator=generator(), dtype=torch.uint8)
    weights = torch.randn(45, 4, generator=generator())
    found = attack(lambda x: x.flatten(1) @ weights, images, labels(3), queries=200, generator=generator())
    assert found.images.shape == images.shape
    assert found.misread.any()


@pytest.mark.parametrize("name", ["square", "rays"])
def test_other_norms_are_refused(name):
    assert ATTACKS[name].norms == ("linf",)
    with pytest.raises(InvalidValueError, match=rf"norm is 'l2'; expected linf for attack '{name}'"):
        full_threat(name, eps=1.0, norm="l2")
    with pytest.raises(InvalidTypeError, match="no option steps"):
        full_threat(name, steps=3)
    assert full_threat(name, queries=50) == {"eps": EPS, "norm": "linf", "queries": 50, "average": 1}
    assert ATTACKS[name].cost(full_threat(name, queries=50)) == 50


@BOTH
def test_impossible_numbers_are_refused(attack):
    net = small_net().eval()
    for wrong, message in [
        ({"queries": 0}, r"queries is 0; expected .* at least 1"),
        ({"average": 0}, r"average is 0; expected .* at least 1"),
        ({"queries": 3, "average": 4}, r"average is 4 and queries is 3; expected at most 3 answers"),
        ({"eps": 8}, "8/255"),
    ]:
        with pytest.raises(InvalidValueError, match=message):
            attack(net, eight_bit(), labels(), **wrong)
    with pytest.raises(InvalidTypeError, match="class scores"):
        attack(lambda x: "cat", eight_bit(), labels())
    with pytest.raises(InvalidTypeError, match="labels are"):
        attack(classifier().eval(), eight_bit(), labels(3))


def test_pyautoattack_is_as_strong():
    theirs = pytest.importorskip("pyautoattack.square")
    model = small_net().eval()
    images = (torch.cat(batches(8)) * 255).round() / 255
    own = model(images).argmax(dim=1)
    ours = square(model, images, own, eps=4 / 255, queries=150, generator=generator())
    reference = theirs.SquareAttack(model, eps=4 / 255, n_queries=150)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        reference.init_hyperparam(images)
        _, found = reference.attack_single_run(images, own)
    share = (model(found).argmax(dim=1) != own).float().mean().item()
    assert ours.misread.float().mean().item() == pytest.approx(share, abs=0.1)
    assert 0.1 < share < 0.9, "some are found and some are not"
