"""Attacks through the adaptation: against their steps, written out for a method on the plain model."""

import copy

import pytest
import torch
import torch.nn.functional as F

from safer_tta.attacks import gmsa
from safer_tta.errors import InvalidTypeError, InvalidValueError
from tests.attacks.parts import eight_bit, generator, labels
from tests.conftest import adapt_small, batches, identical, small_net

MINE = torch.tensor([True, False, True, True, False, True])
BUDGET = {"eps": 8 / 255, "step": 2 / 255, "steps": 3}


def adapted(method="tent", predictor="plain", **options):
    made = adapt_small(method, predictor, **({"lr": 0.05} if method == "tent" else {}), **options)
    made(batches(1)[0])
    return made


@pytest.mark.parametrize("over", ["min", "avg", "last"])
def test_every_round_attacks_what_the_batch_has_made_of_the_method(over):
    method, x, y = adapted(), eight_bit(side=24) / 255, labels()
    randomness, copies, found = generator(), [copy.deepcopy(method)], []

    def draw_seed():
        return torch.randint(2**62, (), generator=randomness)

    draw_seed()
    for _ in range(3):
        attacked = copies[-1:] if over == "last" else copies
        for _ in attacked:
            draw_seed()
        uniform = torch.rand(4, 3, 24, 24, generator=randomness)
        own = (x[MINE] + (2 * uniform - 1) * 8 / 255).clamp(0, 1)
        for _ in range(3):
            here = own.clone().requires_grad_(True)
            batch = x.clone()
            batch[MINE] = here
            losses = torch.stack(
                [F.cross_entropy(m.predictor(batch, track=False).logits, y, reduction="none")[MINE] for m in attacked]
            )
            loss = {"min": losses.min(dim=0).values, "avg": losses.mean(dim=0), "last": losses[0]}[over].sum()
            moved = own + 2 / 255 * torch.autograd.grad(loss, here)[0].sign()
            own = torch.minimum(torch.maximum(moved, x[MINE] - 8 / 255), x[MINE] + 8 / 255).clamp(0, 1)
        batch = x.clone()
        batch[MINE] = (own * 255).round() / 255
        twin = copy.deepcopy(method)
        draw_seed()
        harm = F.cross_entropy(twin(batch).logits[MINE], y[MINE])
        found.append((float(harm), batch))
        copies.append(twin)
    expected = max(found, key=lambda one: one[0])[1]
    assert len({float(harm) for harm, _ in found}) == 3
    got = gmsa(method, x, y, MINE, over=over, rounds=2, generator=generator(), **BUDGET)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("method", "predictor"), [("tent", "safer"), ("bn", "plain")])
def test_neither_the_method_nor_its_generator_moves(method, predictor):
    made = adapted(method, predictor)
    before, (later,) = made.state_dict(), batches(1, seed=5)
    expected = copy.deepcopy(made)(later).probs
    found = gmsa(made, eight_bit(side=24), labels(), MINE, rounds=1, generator=generator(), **BUDGET)
    assert identical(made.state_dict(), before)
    assert made.predictor.validate
    assert torch.equal(found[~MINE], eight_bit(side=24)[~MINE] / 255)
    assert torch.equal(made(later).probs, expected)


def test_the_answers_get_worse():
    made, x, y = adapted(), eight_bit(side=24) / 255, labels()
    loss = [F.cross_entropy(copy.deepcopy(made)(images).logits, y) for images in (x, gmsa(made, x, y, **BUDGET))]
    assert loss[1] > loss[0] + 0.1


def test_a_method_with_a_teacher_is_refused():
    with pytest.raises(InvalidValueError, match="rotta answers with more than its predictor"):
        gmsa(adapted("rotta"), eight_bit(side=24), labels(), rounds=1, **BUDGET)


def test_a_model_is_not_a_method():
    with pytest.raises(InvalidTypeError, match="method is SmallNet; expected what adapt returns"):
        gmsa(small_net(), eight_bit(side=24), labels())
