import contextlib
import dataclasses
import json
from unittest import mock

import pytest

from safer_tta import extensions, mixing, pooling, views
from safer_tta.attacks import ATTACKS, full_threat
from safer_tta.attacks.registry import Attack
from safer_tta.bench import experiment as experiments
from safer_tta.bench.experiment import AttackOn, Experiment
from safer_tta.data import ArrayStore, StreamSpec, open_dataset
from safer_tta.gate import Gate
from safer_tta.methods import METHODS
from safer_tta.methods._frame.options import option
from safer_tta.models.norm import NORMS
from safer_tta.predictors import PREDICTORS, Defended, Plain, Safer
from safer_tta.training import Recipe, attacked_copies
from safer_tta.training.definitions import describe_model
from tests.bench.helpers import PLANS, quick
from tests.conftest import classifier

SURROGATE = {"data": "x", "domains": ["sketch"], "recipe": {}}
RUNS = {
    "tent on plain": {"method": "tent", "predictor": "plain"},
    "tent on fft": {"method": "tent", "predictor": "fft"},
    "tent on jpeg": {"method": "tent", "predictor": "jpeg"},
    "pl on safer": {"method": "pl", "predictor": "safer"},
    "safer-a": {"predictor": "safer-a"},
    "safer-g": {"predictor": "safer-g"},
    "safer-g at another cost": {"predictor": "safer-g", "predictor_options": {"mixing": {"name": "gate", "cost": 5.0}}},
    "tent at another rate": {"predictor": "plain", "options": {"lr": 0.1}},
    "mean of gentle views": {"predictor": "safer", "predictor_options": {"pool": "mean", "pipeline": "gentle"}},
    "medbn": {"predictor": "plain", "norm": "medbn"},
    "pgd": {"predictor": "plain", "attack": "pgd"},
    "eot": {"predictor": "plain", "attack": "eot"},
    "aware": {"predictor": "plain", "attack": "aware"},
}


def experiment(**settings):
    surrogates = settings.pop("surrogates", (SURROGATE,))
    if attack := settings.pop("attack", None):
        surrogates = () if ATTACKS[attack].live else surrogates
        threat = {**full_threat(attack), **settings.pop("threat", {})}
        settings["attack"] = AttackOn(name=attack, threat=threat, surrogates=surrogates)
        settings.setdefault("stream", StreamSpec(attack_rate=50))
    usual = {"data": "x", "target": "sketch", "source": describe_model("x", ["photo"], Recipe())}
    return Experiment(**{**usual, **settings})


def names():
    forget()
    return {run: experiment(**settings).name for run, settings in RUNS.items()}


def forget():
    """Clear what is remembered of settings, since registered parts do not change outside of tests."""
    experiments._settings.cache_clear()
    experiments._usual_settings.cache_clear()


@pytest.fixture(autouse=True)
def _forget_afterwards():
    yield  # set up before all other fixtures, so that this comes after they have put the parts back
    forget()


@pytest.fixture
def replace():
    """Put another part in the place of a registered one until the test ends."""
    with contextlib.ExitStack() as parts:

        def put(registry, name, part):
            parts.enter_context(mock.patch.dict(registry, {name: part}))
            forget()

        yield put


STREAM = {"attack_rate": 60, "order": "correlated", "draw": "late", "batch": 8, "limit": 9, "seed": 1}
GENTLE = {"preset": "gentle", "max_operators": 2}
OTHERS = {
    "data": ["y"],
    "target": ["photo"],
    "source": [
        describe_model("x", ["cartoon"], Recipe()),
        describe_model("x", ["photo"], Recipe(seed=1)),
        {"file": "y"},
    ],
    "surrogates": [({"file": "another"},)],
    "method": ["pl"],
    "predictor": ["safer-a"],
    "norm": ["medbn"],
    "options": [{"lr": 0.1}],
    "predictor_options": [{"views": 6}, {"mixing": {"name": "gate", "cost": 5.0}}, {"pipeline": GENTLE}],
    "images": [64],
    "precision": ["bfloat16"],
    "stream": [StreamSpec(**{"attack_rate": 50, key: value}) for key, value in STREAM.items()],
    "attack": ["autoattack", "eot"],
    "threat": [{"eps": 4 / 255}, {"steps": 3}],
}


@pytest.mark.parametrize(("setting", "other"), [(s, other) for s, others in OTHERS.items() for other in others])
def test_every_setting_is_part_of_the_name(setting, other):
    usual = {"method": "tent", "predictor": "safer-g", "attack": "pgd"}
    assert experiment(**{**usual, setting: other}).name != experiment(**usual).name


@pytest.mark.parametrize(
    "spelt",
    [
        {"options": {"lr": 1e-3}},
        {"norm": None},
        {"predictor_options": {"views": 4}},
        {"predictor_options": {"mixing": {"name": "gate", "cost": 2, "alpha_clean": 0.5}}},
        {"predictor_options": {"mixing": "gate", "pipeline": {"preset": "gentle", "max_operators": 4}}},
        {"stream": StreamSpec(attack_rate=0.0, order="shuffled", batch=64)},
        {"precision": "float32", "images": None},
    ],
    ids=str,
)
def test_a_default_that_is_spelt_out_renames_nothing(spelt):
    usual = {"method": "tent", "predictor": "safer-g"}
    assert experiment(**usual, **spelt).name == experiment(**usual).name


@pytest.mark.parametrize(
    ("settings", "used"),
    [
        ({"predictor": "safer-g"}, "stream"),
        ({"predictor": "safer-g", "norm": "model"}, "model"),
        ({"predictor": "safer-g", "method": "rotta"}, None),  # which has layers of its own
        ({"predictor": "safer", "predictor_options": {"mixing": "gate"}}, "stream"),
        ({"predictor": "safer"}, None),
        ({"predictor": "plain", "norm": "medbn"}, "medbn"),
    ],
    ids=str,
)
def test_a_row_names_the_norm_that_was_used(settings, used):
    run = experiment(**{"method": "tent", **settings})
    assert run.fields()["norm"] == used


def test_a_raised_version_of_a_norm_renames_the_runs_that_prefer_it(replace):
    before = {predictor: experiment(method="tent", predictor=predictor).name for predictor in ("safer", "safer-g")}
    replace(NORMS, "stream", dataclasses.replace(NORMS["stream"], version=NORMS["stream"].version + 1))
    after = {predictor: experiment(method="tent", predictor=predictor).name for predictor in before}
    assert after["safer"] == before["safer"]
    assert after["safer-g"] != before["safer-g"]


@pytest.mark.parametrize("name", PLANS)
def test_a_run_is_made_again_from_its_description(name, tmp_path):
    """So a task that travelled as a file has the name under which it was planned."""
    for task in quick(name, tmp_path)[0].tasks:
        if task.kind == "run":
            again = Experiment.from_description(json.loads(json.dumps(task.definition)))
            assert again.name == task.name
            assert again.attack is None or set(again.attack.threat) >= set(full_threat(again.attack.name))


class WiderTent(METHODS["tent"]):
    another: float = option(0.5)


def wider(part):
    """Return the same dataclass with two more options."""
    more = [("another", float, 0.5), ("more", dict[str, float], dataclasses.field(default_factory=dict))]
    return dataclasses.make_dataclass(f"Wider{part.__name__}", more, bases=(part,), frozen=True, kw_only=True)


class WiderSafer(Safer):
    def __init__(self, *arguments, another=0.5, **options):
        super().__init__(*arguments, **options)
        self.another = another

    @property
    def settings(self):
        return {**super().settings, "another": self.another}


WIDER = {
    "method": lambda put: put(METHODS, "tent", WiderTent),
    "mixing": lambda put: put(mixing.MIXINGS, "gate", wider(Gate)),
    "predictor": lambda put: put(PREDICTORS, "safer", WiderSafer),
    "pgd": lambda put: put(ATTACKS, "pgd", dataclasses.replace(ATTACKS["pgd"], options={"another": 0.5})),
    "eot": lambda put: put(ATTACKS, "eot", dataclasses.replace(ATTACKS["eot"], options={"draws": 1, "another": 0.5})),
}


@pytest.mark.parametrize("part", WIDER)
def test_different_runs_have_different_names_and_a_new_option_with_a_default_renames_none(part, replace):
    before, copies = names(), experiment(attack="pgd").copies()
    assert len(set(before.values())) == len(RUNS)
    WIDER[part](replace)
    assert names() == before
    assert experiment(attack="pgd").copies() == copies


@pytest.mark.parametrize(
    ("part", "settings"),
    [
        ("method", {"method": "tent", "options": {"another": 0.6}}),
        ("mixing", {"predictor": "safer-g", "predictor_options": {"mixing": {"name": "gate", "another": 0.6}}}),
        ("mixing", {"predictor": "safer-g", "predictor_options": {"mixing": {"name": "gate", "more": {"a": 1.0}}}}),
        ("predictor", {"predictor": "safer", "predictor_options": {"another": 0.6}}),
        ("pgd", {"attack": "pgd", "threat": {"another": 0.6}}),
        ("eot", {"attack": "eot", "threat": {"another": 0.6}}),
    ],
)
def test_another_value_of_a_new_option_is_another_name(part, settings, replace):
    WIDER[part](replace)
    usual = {key: value for key, value in settings.items() if "option" not in key and key != "threat"}
    assert experiment(**settings).name != experiment(**usual).name


def test_new_settings_of_streams_and_recipes_rename_nothing_either():
    stream, recipe = wider(StreamSpec), wider(Recipe)
    assert experiment(stream=stream(seed=3)).name == experiment(stream=StreamSpec(seed=3)).name
    assert experiment(stream=stream(another=0.6)).name != experiment().name
    assert describe_model("x", ["photo"], recipe(steps=3)) == describe_model("x", ["photo"], Recipe(steps=3))
    assert describe_model("x", ["photo"], recipe(another=0.6)) != describe_model("x", ["photo"], Recipe())


GATED = {"safer-g", "safer-g at another cost"}
ON_VIEWS = {"pl on safer", "safer-a", "mean of gentle views", "aware", *GATED}
OF_TENT = set(RUNS) - {"pl on safer"}


def raise_class(part):
    return lambda put, monkeypatch: monkeypatch.setattr(part, "version", part.version + 1)


def raise_entry(registry, name):
    entry = registry[name]
    return lambda put, monkeypatch: put(registry, name, dataclasses.replace(entry, version=entry.version + 1))


VERSIONS = {
    "method tent": (raise_class(METHODS["tent"]), OF_TENT),
    "predictor plain": (raise_class(Plain), {"tent on plain", "tent at another rate", "medbn", "pgd", "eot", "aware"}),
    "predictor defended": (raise_class(Defended), {"tent on fft", "tent on jpeg"}),
    "predictor safer": (raise_class(Safer), ON_VIEWS),
    "mixing gate": (raise_class(Gate), GATED),
    "mixing sigmoid": (raise_class(mixing.AdaptiveMixing), {"safer-a"}),
    "mixing none": (raise_class(mixing.NoMixing), {"pl on safer", "mean of gentle views", "aware"}),
    "pool cc_drop": (raise_entry(pooling.RULES, "cc_drop"), {"pl on safer", "safer-a", "aware", *GATED}),
    "pool mean": (raise_entry(pooling.RULES, "mean"), {"mean of gentle views"}),
    "preset released": (raise_entry(views.PRESETS, "released"), {"pl on safer", "safer-a", "aware"}),
    "preset gentle": (raise_entry(views.PRESETS, "gentle"), {"mean of gentle views", *GATED}),
    "operator rotate": (raise_entry(views.OPERATORS, "rotate"), ON_VIEWS),
    "operator fft_low_pass": (raise_entry(views.OPERATORS, "fft_low_pass"), {*ON_VIEWS, "tent on fft"}),
    "norm medbn": (raise_entry(NORMS, "medbn"), {"medbn"}),
    "attack pgd": (raise_entry(ATTACKS, "pgd"), {"pgd"}),
    "attack eot": (raise_entry(ATTACKS, "eot"), {"eot"}),
    "attack aware": (raise_entry(ATTACKS, "aware"), {"aware"}),
}


@pytest.mark.parametrize("part", VERSIONS)
def test_a_raised_version_renames_the_runs_with_that_part_and_no_others(part, replace, monkeypatch):
    raised, users = VERSIONS[part]
    before = names()
    raised(replace, monkeypatch)
    assert {run for run, name in names().items() if name != before[run]} == users


def test_another_version_of_an_attack_makes_its_images_again(replace, tmp_path):
    domain, store, given = open_dataset("synthetic", count=8).domain("sketch"), ArrayStore(tmp_path), []
    own = Attack("pgd", lambda model, images, *_: given.append(1) or images / 255)
    for version, made in ((1, 1), (2, 2), (1, 2)):
        replace(ATTACKS, "pgd", dataclasses.replace(own, version=version))
        attacked_copies(domain, classifier(), store, source="x")
        assert len(given) == made
        assert experiment(attack="pgd").copies()[0].get("version", 1) == version


def test_an_edited_extension_renames_the_runs_that_use_it(monkeypatch, tmp_path):
    """This holds for a file that registers a normalisation too."""
    monkeypatch.setattr(extensions, "_loaded", {})
    before, named = names(), []
    for number in range(2):
        file = tmp_path / f"own_{number}.py"
        file.write_text(f"from safer_tta.models.norm import NORMS\nNORMS.register('own')(lambda x: x)\n# {number}\n")
        extensions.load([file])
        named.append(experiment(norm="own").name)
        assert names() == before
        del NORMS["own"]
        extensions._loaded.clear()
    assert named[0] != named[1]


def test_an_edited_defence_renames_the_copies_that_are_made_through_it(monkeypatch, tmp_path):
    monkeypatch.setattr(extensions, "_loaded", {})
    copies = {"aware": [], "pgd": []}
    for number in range(2):
        file = tmp_path / f"shield_{number}.py"
        code = "from safer_tta.predictors import Plain, register\nregister('shield')(type('Shield', (Plain,), {}))\n"
        file.write_text(f"{code}# {number}\n")
        extensions.load([file])
        copies["aware"] += experiment(attack="aware", threat={"defence": "shield"}).copies()
        copies["pgd"] += experiment(attack="pgd").copies()
        del PREDICTORS["shield"]
        extensions._loaded.clear()
    assert copies["aware"][0] != copies["aware"][1]
    assert copies["pgd"][0] == copies["pgd"][1]


def test_an_operator_of_an_extension_renames_only_copies_that_are_made_through_views(monkeypatch, tmp_path):
    before = {attack: experiment(attack=attack).copies() for attack in ("aware", "pgd")}
    monkeypatch.setattr(extensions, "_loaded", {tmp_path: extensions.Extension("hash", frozenset(), everywhere=True)})
    assert experiment(attack="aware").copies() != before["aware"]
    assert experiment(attack="pgd").copies() == before["pgd"]
