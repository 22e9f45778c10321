"""`safer pack`, and what it makes in every command that takes a model."""

import dataclasses
import importlib
from collections import Counter

import numpy as np
import pytest
import torch
from PIL import Image

import safer_tta
from safer_tta._internal.resizing import Resize
from safer_tta._internal.seeds import generator
from safer_tta.auditing.defence import fingerprint
from safer_tta.client import Client
from safer_tta.models.card import read_card
from safer_tta.serve.server import Service
from safer_tta.training import Recipe
from safer_tta.training.definitions import definition_of, describe_model
from safer_tta.training.trainer import recipe_of
from tests.conftest import identical
from tests.data.parts import image_folder
from tests.models.conftest import forget
from tests.models.parts import CLASSES, HAD, SIDE
from tests.processes import run_safer
from tests.serve.helpers import SEED, Replay, serving

__all__ = ["forget"]


def run_beside_torchvision(*arguments):
    """Be the command `safer` in a process that can import torchvision."""
    importlib.import_module("tests.schemas")
    run_safer(*arguments)


@pytest.fixture
def photographs(tmp_path):
    """A folder of PNG files, of other sizes than the model's."""
    folder = tmp_path / "photographs"
    folder.mkdir()
    pictures = []
    for number in range(7):
        noise = np.random.default_rng(number).integers(256, size=(40 + number, 52, 3), dtype=np.uint8)
        pictures.append(Image.fromarray(noise))
        pictures[-1].save(folder / f"{number}.png")
    return folder, pictures


def library(path, pictures, **service):
    """The answers of the library to batches of four of these pictures, without a service."""
    card, replay = read_card(path), Replay(path, "s", side=None, **service)
    resized = [Resize.parse(card.resize).apply(picture, card.side) for picture in pictures]
    arrays = [np.asarray(picture).transpose(2, 0, 1) for picture in resized]
    return [replay(np.stack(arrays[first : first + 4])) for first in range(0, len(arrays), 4)]


@pytest.mark.parametrize("kind", HAD)
def test_from_a_checkpoint_to_answers_of_a_service(kind, good, photographs, tmp_path, monkeypatch, forget):
    """Pack, serve, send; the answers are the library's, bit for bit, and the service has the model's own names.

    Then audit it on a folder of labelled images.
    """
    had, path = HAD[kind](tmp_path), tmp_path / "model.safetensors"
    packed = good("pack", *had.words, "--out", path)
    assert (packed["classes"], packed["side"]) == (len(CLASSES), SIDE)
    words = packed["next"].split()
    assert words[0] == "safer"
    before, options = words[1 : words.index("serve")], ("--option", "lr=0.01", "--predictor-option", "views=3")
    answers, send = [], Client.send
    monkeypatch.setattr(Client, "send", lambda *given, **named: answers.append(send(*given, **named)) or answers[-1])
    served = {"before": before, "side": None, "program": run_beside_torchvision}
    with serving(path, tmp_path / "served", *options, **served) as server:
        sent = good("send", photographs[0], "--stream", "s", "--url", server.url, "--batch", 4)
        with Client(server.url) as client:
            described = client.model()
    assert described["classes"] == list(CLASSES)
    assert (described["side"], described["resize"]) == (SIDE, packed["resize"])
    expected = library(path, photographs[1], options={"lr": 0.01}, predictor={"name": "safer-g", "views": 3})
    assert [answer["probabilities"] for answer in answers] == expected
    labels = [int(np.argmax(row)) for batch in expected for row in batch]
    assert sent["answered"] == Counter(CLASSES[label] for label in labels)
    model = safer_tta.Classifier(had.model, mean=packed["mean"], std=packed["std"])
    method = safer_tta.adapt(model, "tent", {"name": "safer-g", "views": 3}, lr=0.01)
    method.state.generator.manual_seed(generator(SEED, "stream", "local", "s").initial_seed())
    resize = Resize.parse(packed["resize"])
    arrays = np.stack([np.asarray(resize.apply(p, SIDE)).transpose(2, 0, 1) for p in photographs[1][:4]])
    assert method(torch.from_numpy(arrays)).probs.tolist() == expected[0]
    audited = image_folder(tmp_path / "data", ["labelled"], CLASSES, count=2) / "labelled"
    cheap = ("--threat", "clean", "--predictor", "plain", "--method", "none", "--out", tmp_path / "audit")
    (row,) = good(*before, "audit", "--model", path, "--data", audited, *cheap)["rows"]
    assert (row["images"], row["accuracy"]) == (8, row["accuracy_alone"])
    assert (tmp_path / "audit" / "report.html").exists()


def test_a_model_of_ones_own_is_not_served_without_its_file(good, safer, tmp_path, monkeypatch, forget):
    had, path = HAD["own"](tmp_path), tmp_path / "model.safetensors"
    good("pack", *had.words, "--out", path)
    forget()
    monkeypatch.setattr("safer_tta.serve.server.serve", lambda service, **_: service.engine().stop())
    refused = safer("serve", "--model", path, "--folder", tmp_path / "served")
    assert refused.returncode == 2
    assert "never runs code by itself" in refused.stderr
    assert "safer --extension my_models.py serve" in refused.stderr
    assert safer("--extension", had.code, "serve", "--model", path, "--folder", tmp_path / "served").returncode == 0


def test_the_next_command_names_the_file_of_a_model_that_is_packed_again(good, tmp_path, forget):
    had, path = HAD["own"](tmp_path), tmp_path / "model.safetensors"
    good("pack", *had.words, "--out", path)
    again = good("--extension", had.code, "pack", path, "--out", tmp_path / "again.safetensors")
    assert again["next"].startswith(f"safer --extension {had.code} serve ")


def test_a_packed_model_runs_is_attacked_and_trained_on(good, tmp_path, forget):
    """As source, as surrogate and as the start of a training, whose file again goes everywhere."""
    had, store = HAD["own"](tmp_path), tmp_path / "store"
    first, second = tmp_path / "first.safetensors", tmp_path / "second.safetensors"
    good("pack", *had.words, "--out", first)
    own = ("--extension", had.code)
    good(*own, "train", "source", "--target", "sketch", "--weights", first, "--out", second, "--steps", 2, "--batch", 2)
    card = read_card(second)
    assert (card.architecture, card.side, len(card.classes)) == ("my_models:make", 64, 7)
    assert recipe_of(second)["recipe"]["architecture"] == "my_models:make"
    trained, started = safer_tta.load_classifier(second).model, safer_tta.load_classifier(first).model
    assert trained[5].out_features == 7
    assert not identical(trained[0].state_dict(), started[0].state_dict())
    common = ("--target", "sketch", "--store", store, "--images", 14, "--seed", 3)
    attacked = good(*own, "attack", *common, "--surrogate", second, "--attack-steps", 1)
    assert attacked["images"] == 14
    options = ("--option", "lr=0.5", "--predictor-option", "views=3", "--batch", 7)
    ran = good(*own, "run", *common, "--model", second, *options)
    assert ran["options"] == {"lr": 0.5}
    assert ran["predictor_options"] == {"views": 3}
    under_attack = ("--attack-rate", 50, "--surrogate", second, "--attack-steps", 1)
    assert good(*own, "run", *common, "--model", second, *options, *under_attack)["accuracy_attacked"] is not None


def version_of(service):
    engine = service.engine()
    engine.stop()
    return engine.served.version


def test_code_enters_the_names_of_runs_trainings_services_and_audits(good, tmp_path, forget):
    """Another file that builds the same network gives rows of their own; the packed weights are the same."""
    had, path = HAD["own"](tmp_path), tmp_path / "model.safetensors"
    good("pack", *had.words, "--out", path)

    forget()
    service = Service(model=path, folder=tmp_path / "one", code=(str(had.code),), method="none", predictor="plain")
    versions = [version_of(service)]
    audited = [fingerprint(safer_tta.load_classifier(path))]
    defined = [definition_of(path)]
    trained = [describe_model("data", ["photo"], Recipe(architecture="my_models:make", weights=str(path)))]
    forget()
    had.code.write_text(had.code.read_text() + "\n# a comment\n")
    versions.append(version_of(dataclasses.replace(service, folder=tmp_path / "two")))
    audited.append(fingerprint(safer_tta.load_classifier(path)))
    defined.append(definition_of(path))
    trained.append(describe_model("data", ["photo"], Recipe(architecture="my_models:make", weights=str(path))))
    for before, after in (versions, defined, trained, audited):
        assert before != after
    assert defined[0]["file"] == defined[1]["file"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("timm:resnet10t --out x", "timm:resnet10t names a network without weights. Give weights, "),
        ("small --out x --weights nowhere.pth", "nowhere.pth does not exist"),
        ("small --out x --weights w.pth --mean a --std b", "'a' is not a list of numbers"),
        ("small --out x --weights w.pth --argument width", "'width' is not a setting; expected NAME=VALUE"),
        ("small --out x --weights w.pth", "does not say how images were normalised in training. Give mean and std"),
        ("small --out x --weights w.pth --mean 0 --std 1", "Give side, in pixels"),
        ("small --out x --weights w.pth --mean 0 --std 1 --side 32 --resize wide", "--resize is 'wide'; expected"),
        ("small --out x --weights w.pth --mean 0 --std 1 --side 32 --classes a,a", "all different"),
        ("small --out x --weights w.pth --classes missing.txt", "missing.txt does not exist; expected a file with one"),
        ("small --out x --weights w.pth --classes w.pth", "w.pth is not text in UTF-8"),
        ("small --out . --weights w.pth --mean 0 --std 1 --side 32", ". is a folder; expected the name of a file"),
        ("mine.py --out x", "names a file without a function; expected mine.py:FUNCTION"),
        ("timm.py:make --out x", "would be taken for a network of timm"),
        ("small --out no/x --weights w.pth --mean 0 --std 1 --side 32", "no is not a folder; create it"),
    ],
)
def test_mistakes_give_one_line(words, message, safer, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save(safer_tta.models.zoo.create("small", num_classes=2).state_dict(), "w.pth")
    ended = safer("pack", *words.split())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert message in " ".join(ended.stderr.split())
    assert [path.name for path in tmp_path.iterdir() if path.name != "cache"] == ["w.pth"]


def test_classes_come_from_a_list_or_a_file(good, tmp_path):
    torch.save(safer_tta.models.zoo.create("small", num_classes=2).state_dict(), tmp_path / "w.pth")
    (tmp_path / "names.txt").write_text("tabby, or cat\ndog\n\n")
    (tmp_path / "marked.txt").write_text("tabby\ndog\n", encoding="utf-8-sig")
    how = ["small", "--weights", tmp_path / "w.pth", "--mean", "0", "--std", "1", "--side", 32, "--out", tmp_path / "x"]
    files = {"names.txt": ("tabby, or cat", "dog"), "marked.txt": ("tabby", "dog")}
    for given, expected in {"cat, dog": ("cat", "dog"), **{tmp_path / n: names for n, names in files.items()}}.items():
        good("pack", *how, "--classes", given)
        assert read_card(tmp_path / "x").classes == expected
