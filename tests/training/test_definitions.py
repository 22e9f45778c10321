import dataclasses
import json

from safer_tta.data.store import digest_file
from safer_tta.training import robust, train
from safer_tta.training.definitions import definition_of, describe_model, kind_of


def test_a_file_holds_the_definition_that_was_known_before(data, recipe, trained):
    before = describe_model(data.identity, ["photo", "painting", "cartoon"], recipe)
    assert json.loads(json.dumps(definition_of(trained))) == json.loads(json.dumps(before))
    assert kind_of(before) == "erm"
    assert kind_of(describe_model(data.identity, ["photo"], robust(recipe))) == "robust"


def test_a_model_of_other_images_is_known_by_its_file(data, recipe, tmp_path):
    own = dataclasses.replace(data.domain("photo"), origin="")
    train([own], dataclasses.replace(recipe, steps=1), tmp_path / "m")
    assert definition_of(tmp_path / "m") == {"file": digest_file(tmp_path / "m")}
    assert kind_of(definition_of(tmp_path / "m")) == digest_file(tmp_path / "m")
