import statistics

import numpy as np
import pytest

from safer_tta.evaluation.intervals import interval, wilson


@pytest.mark.parametrize(("right", "images"), [(8, 10), (0, 20), (20, 20), (101, 128), (1000, 2048)])
def test_wilson_holds_the_shares_that_differ_by_less_than_two_deviations(right, images):
    """By its definition: at each end, the estimate is 1.96 of the end's own deviations away."""
    low, high = wilson(100 * right / images, images)
    for end in (low / 100, high / 100):
        deviation = (end * (1 - end) / images) ** 0.5
        assert abs(right / images - end) == pytest.approx(1.96 * deviation, abs=1e-6)
    assert 0 <= low < high <= 100


def test_the_accuracy_lies_in_its_interval_whatever_the_rounding():
    for images in range(1, 300):
        assert wilson(0.0, images)[0] == 0.0
        assert wilson(100.0, images)[1] == 100.0


def test_one_seed_and_target_is_wilson_and_a_spread_over_seeds_widens_it():
    assert interval([[80.0]], [100]) == pytest.approx(wilson(80.0, 100))
    assert interval([[80.0], [80.0], [80.0]], [100]) == pytest.approx(wilson(80.0, 100))
    low, high = interval([[78.0], [80.0], [82.0]], [10**9])
    assert (low, high) == pytest.approx((80 - 4.303 * 2 / 3**0.5, 80 + 4.303 * 2 / 3**0.5), abs=0.01)
    both = interval([[78.0], [80.0], [82.0]], [100])
    assert both[0] < min(low, wilson(80.0, 100)[0])
    assert both[1] > max(high, wilson(80.0, 100)[1])
    assert interval([[99.0], [100.0]], [50])[1] == 100.0


def test_targets_share_their_errors():
    """The mean of four targets of equal size is as certain as one target with four times the images, nearly."""
    low, high = interval([[50.0] * 4], [100] * 4)
    assert (low, high) == pytest.approx(wilson(50.0, 400), abs=0.1)
    low, high = interval([[20.0, 60.0], [22.0, 58.0]], [100, 400])
    assert low < statistics.mean([21.0, 59.0]) < high


@pytest.mark.parametrize("drift", [0.0, 0.03])
def test_the_interval_covers_the_truth(drift):
    """Each seed has a model of its own, and all are tested on images that were drawn once."""
    draw, covered = np.random.default_rng(0), 0
    for _ in range(600):
        ease = draw.uniform(size=200)
        shares = np.clip(0.8 + drift * draw.standard_normal(3), 0, 1)
        low, high = interval([[100.0 * float((ease < share).mean())] for share in shares], [200])
        covered += low <= 80 <= high
    assert covered / 600 > 0.93
