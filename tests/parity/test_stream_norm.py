"""Statistics that follow a stream against their formulas as loops, gradients against a straight-through form."""

import numpy as np
import pytest
import torch
from torch import nn

from safer_tta.models.stream_norm import StreamNorm
from safer_tta.models.window import Window

C, K, EPS = 3, 4, 1e-5
WINDOW, PRIOR, MOST_OF_BATCH, POLLED, MOST_INDEPENDENT = 256, 64, 1 / 16, 16, 64


def layer(images: float, answers: list[float], seed: int = 0) -> StreamNorm:
    generator = torch.Generator().manual_seed(seed)
    norm = nn.BatchNorm2d(C, eps=EPS).double()
    for tensor in (norm.running_mean, norm.weight.data, norm.bias.data):
        tensor.copy_(torch.randn(C, generator=generator))
    norm.running_var.copy_(torch.rand(C, generator=generator) + 0.5)
    window = Window(K).double()
    window.images.fill_(images)
    window.answers.copy_(torch.tensor(answers))
    made = StreamNorm(norm, window, []).double()
    made.follows = True
    made.deviations.copy_(torch.randn(2 * C, generator=generator) / 4)
    made.votes.copy_(torch.randn(POLLED, 2 * C, generator=generator) / 4)
    return made


def inputs(views: int, images: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return 2 * torch.randn(views * images, C, 3, 2, generator=generator, dtype=torch.float64) + 0.5


def expected_votes(made: StreamNorm, x: np.ndarray, views: int) -> list[list[float]]:
    """One vote an image: means, then mean squares, on the scale of the source."""
    images = len(x) // views
    counted = range(1, views) if views > 1 else [0]
    votes = []
    for image in range(images):
        means, squares = [], []
        for c in range(C):
            pixels = [p for v in counted for p in x[v * images + image, c].flatten()]
            mean, variance = float(made.running_mean[c]), float(made.running_var[c]) + EPS
            means.append((sum(pixels) / len(pixels) - mean) / variance**0.5)
            squares.append((sum((p - mean) ** 2 for p in pixels) / len(pixels) + EPS) / variance - 1)
        votes.append(means + squares)
    return votes


def expected_independent(images: float, answers: list[float]) -> float:
    seen = min(max(images, 1), MOST_INDEPENDENT)
    by_chance = 1 / K + (1 - 1 / K) / seen
    excess = max(0, sum(p**2 for p in answers) - by_chance)
    return 1 / (excess + 1 / seen) if images else 0


def expected_statistics(made: StreamNorm, votes: list[list[float]], images: float, answers: list[float]):
    polled = votes if len(votes) >= POLLED else [*made.votes.tolist(), *votes][-POLLED:]
    left = len(polled) // 4
    share = min(len(votes) / min(images + len(votes), max(WINDOW, len(votes))), MOST_OF_BATCH)
    trust = expected_independent(images, answers)
    trust = trust / (trust + PRIOR)
    found = []
    for column, old in enumerate(made.deviations.tolist()):
        middle = sorted(vote[column] for vote in polled)[left : len(polled) - left]
        found.append(trust * ((1 - share) * old + share * sum(middle) / len(middle)))
    means, variances = [], []
    for c in range(C):
        scale = float(made.running_var[c]) + EPS
        means.append(float(made.running_mean[c]) + found[c] * scale**0.5)
        variances.append(scale * max(0.05, 1 + found[C + c] - found[c] ** 2) - EPS)
    return means, variances


EVEN, ONE, SKEWED = [0.25] * 4, [1.0, 0, 0, 0], [0.6, 0.2, 0.2, 0]


@pytest.mark.parametrize(("views", "images"), [(1, 20), (5, 20), (3, 4), (1, 1), (4, 1)])
@pytest.mark.parametrize(("seen", "answers"), [(0, EVEN), (40, EVEN), (256, SKEWED), (100, ONE)])
def test_what_it_normalises_with(views, images, seen, answers):
    made, x = layer(seen, answers), inputs(views, images)
    made._window[0].views = views
    means, variances = expected_statistics(made, expected_votes(made, x.numpy(), views), seen, answers)
    got = made(x)
    for c in range(C):
        expected = (x[:, c] - means[c]) / (variances[c] + EPS) ** 0.5 * made.weight[c] + made.bias[c]
        torch.testing.assert_close(got[:, c], expected)


@pytest.mark.parametrize("seen", [0, 40, 256])
def test_where_it_does_not_follow_it_normalises_with_what_it_knows(seen):
    made, x = layer(seen, EVEN), inputs(1, 3)
    made.follows = False
    trust = expected_independent(seen, EVEN)
    trust = trust / (trust + PRIOR)
    for c in range(C):
        first, second = (trust * float(made.deviations[c + shift]) for shift in (0, C))
        scale = float(made.running_var[c]) + EPS
        mean, spread = float(made.running_mean[c]) + first * scale**0.5, scale * (1 + second - first**2)
        expected = (x[:, c] - mean) / spread**0.5 * made.weight[c] + made.bias[c]
        torch.testing.assert_close(made(x)[:, c], expected)


def test_gradients_flow_as_if_the_statistics_were_the_batchs():
    made, x = layer(80, EVEN), inputs(2, 9).requires_grad_(True)
    made._window[0].views = 2
    upstream = torch.randn(x.shape, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    out = made(x)
    got = torch.autograd.grad((out * upstream).sum(), (x, made.weight, made.bias))
    with torch.no_grad():
        statistics = expected_statistics(made, expected_votes(made, x.detach().numpy(), 2), 80, EVEN)
        mean, variance = (torch.tensor(values) for values in statistics)
    own_mean, own_variance = x.mean((0, 2, 3)), x.var((0, 2, 3), correction=0) + EPS
    mean = mean + own_mean - own_mean.detach()
    spread = (variance + EPS) * own_variance / own_variance.detach()
    scale = made.weight * torch.rsqrt(spread)
    through = (x - mean.view(1, C, 1, 1)) * scale.view(1, C, 1, 1) + made.bias.view(1, C, 1, 1)
    expected = torch.autograd.grad((through * upstream).sum(), (x, made.weight, made.bias))
    torch.testing.assert_close(out, through)
    for ours, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_an_attacker_can_have_the_gradients_of_what_is_computed():
    made, x = layer(80, EVEN), inputs(1, 18).requires_grad_(True)
    made.exact = True
    assert torch.autograd.gradcheck(lambda x: made(x)[:, :, :1, :1].sum((0, 2, 3)), (x,))
    made.exact = False
    torch.testing.assert_close(made(x), _exact(made, x))


def _exact(made: StreamNorm, x: torch.Tensor) -> torch.Tensor:
    made.exact = True
    return made(x)
