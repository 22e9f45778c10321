import pytest
import torch

import safer_tta
from safer_tta.attacks import autoattack
from safer_tta.attacks.pgd import BALLS
from safer_tta.errors import InvalidTypeError, InvalidValueError
from tests.attacks.parts import eight_bit, labels
from tests.conftest import CLASSES, classifier, small_net

package = pytest.importorskip("pyautoattack")


@pytest.mark.parametrize("classes", [5, 12])
def test_models_with_few_classes_are_attacked(classes):
    """Its targeted parts try nine other classes; with fewer than ten classes they are limited."""
    model = small_net(classes=classes).eval()
    images = eight_bit(size=4)
    own = model(images / 255).argmax(1)
    components, state, seen = ["apgd-ce", "apgd-t", "fab-t"], torch.get_rng_state(), []
    options = {"components": components, "progress": lambda name, _: seen.append(name)}
    attacked, accuracy = autoattack(model, images, own, **options)
    assert torch.equal(torch.get_rng_state(), state)
    assert seen == components
    assert list(accuracy) == ["clean", *components, "rounded"]
    assert accuracy["clean"] == 100
    assert ((attacked * 255).round().int() - images.int()).abs().max() <= 8
    assert accuracy["fab-t"] <= accuracy["apgd-ce"] <= 100


@pytest.mark.parametrize(("norm", "theirs", "eps"), [("linf", "Linf", 2 / 255), ("l2", "L2", 0.3)])
def test_components_attack_the_images_that_withstood_those_before(norm, theirs, eps):
    """The package itself does the same: the second component attacks what withstood the first, and neither attacks what
    was wrong."""
    model, images = small_net().eval(), eight_bit(size=10)
    floats = images / 255
    y = model(floats).argmax(1)
    y[0] = (y[0] + 1) % CLASSES
    expected, accuracy = floats.clone(), []
    for component in ("apgd-ce", "fab-t"):
        attack = package.AutoAttack(model, norm=theirs, eps=eps, version="standard", seed=5)
        attack.attacks_to_run, attack.fab.n_target_classes = [component], CLASSES - 1
        standing = model(expected).argmax(1) == y
        expected[standing] = attack.run_standard_evaluation(floats[standing], y[standing])[0]
        accuracy.append(100 * (model(expected).argmax(1) == y).float().mean().item())
    assert 90 > accuracy[0] > accuracy[1], "each finds some and leaves some"
    attacked, ours = autoattack(model, images, y, eps=eps, norm=norm, seed=5, components=("apgd-ce", "fab-t"))
    assert [ours["clean"], ours["apgd-ce"], ours["fab-t"]] == pytest.approx([90, *accuracy])
    assert torch.equal(attacked, BALLS[norm].round(floats, expected, eps))
    assert torch.equal(attacked[0], floats[0])
    assert ours["rounded"] == pytest.approx(100 * (model(attacked).argmax(1) == y).float().mean().item())


def test_the_seed_decides_the_draws():
    model, images = small_net().eval(), eight_bit(size=4)
    y = model(images / 255).argmax(1)
    one, again, other = (autoattack(model, images, y, seed=seed, components=("square",))[0] for seed in (1, 1, 2))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)
    assert torch.allclose(one * 255, (one * 255).round(), atol=1e-4)


def test_modes_and_gradients_are_left_as_they_were():
    model = small_net().train()
    model.norm1.eval()
    model.fc.weight.grad = torch.ones_like(model.fc.weight)
    modes = [m.training for m in model.modules()]
    with torch.inference_mode():
        autoattack(model, eight_bit(size=3), labels(3), components=("fab-t",))
    assert [m.training for m in model.modules()] == modes
    assert all(p.requires_grad for p in model.parameters())
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["fc.weight"]
    assert torch.equal(model.fc.weight.grad, torch.ones_like(model.fc.weight))


def test_predictors_few_classes_floats_and_budgets_in_levels_are_refused():
    with pytest.raises(InvalidTypeError, match=r"model is Safer; expected a model .* eot_pgd"):
        autoattack(safer_tta.Safer(classifier()), eight_bit(), labels())
    with pytest.raises(InvalidValueError, match=r"has 3 classes.*Use pgd"):
        autoattack(small_net(classes=3), eight_bit(size=2), labels(2))
    with pytest.raises(InvalidValueError, match="expected"):
        autoattack(small_net(), eight_bit(size=3).float(), labels(3))
    with pytest.raises(InvalidValueError, match="8/255"):
        autoattack(small_net(), eight_bit(), labels(), eps=8)
