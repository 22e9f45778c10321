import csv
import inspect
import json

import pytest

from safer_tta import adapt
from safer_tta.cli import service
from safer_tta.serve.server import Service
from tests.serve.helpers import SIDE, image_file


def test_the_command_serves_what_adapt_recommends():
    for function in (service.serve, Service, adapt):
        defaults = inspect.signature(function).parameters
        assert [defaults[name].default for name in ("method", "predictor", "norm")] == ["tent", "safer-g", None]


def test_options_reach_the_service(safer, source_file, tmp_path, monkeypatch):
    asked, logged = [], []
    monkeypatch.setattr("safer_tta.serve.logs.set_up", lambda *how: logged.append(how))
    monkeypatch.setattr("safer_tta.serve.server.serve", lambda made, **how: asked.append((made, how)))
    (tmp_path / "tokens").write_text(json.dumps({"anna": "a" * 20}))
    options = "--method pl --norm medbn --views 3 --side 32 --abstain 0.3 --seconds 2 --seed 5 --port 0 --memory 3"
    options += " --queue 4 --rate 5 --images 6 --precision bfloat16 --log-format json --log-level debug"
    options += " --streams 7 --owner-disk 8 --disk 9 --uploads 10 --upload-seconds 11 --wait 12 --connections 16"
    ended = safer("serve", "--model", source_file, "--tokens", tmp_path / "tokens", *options.split())
    assert ended.returncode == 0, ended.stderr
    assert logged == [("json", "debug")]
    ((made, how),) = asked
    assert (made.model, made.method, made.norm, made.side) == (source_file, "pl", "medbn", 32)
    assert made.predictor == {"name": "safer-g", "views": 3}
    assert (made.abstain, made.seconds, made.seed, made.precision) == (0.3, 2, 5, "bfloat16")
    limits = made.limits
    assert (limits.memory_bytes, limits.queue, limits.requests_per_s, limits.images) == (3 * 2**20, 4, 5, 6)
    assert (limits.owner_streams, limits.owner_disk_bytes, limits.disk_bytes) == (7, 8 * 2**20, 9 * 2**20)
    assert (limits.upload_bytes, limits.body_s, limits.wait_s, limits.connections) == (10 * 2**20, 11, 12, 16)
    assert (how["host"], how["port"], how["tokens"].owner(f"Bearer {'a' * 20}")) == ("127.0.0.1", 0, "anna")


def test_a_folder_is_sent_once(good, safer, server, asking, tmp_path):
    for number in range(5):
        path = tmp_path / ("disc" if number % 2 else "ring") / f"{number}.png"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(image_file(SIDE + number))
    settings = ["--stream", "folder", "--url", server.url, "--batch", 2, "--labelled"]
    settings += ["--out", tmp_path / "answers.csv"]
    for _ in range(2):  # the second time everything has been answered before
        sent = good("send", tmp_path, *settings)
        assert (sent["images"], sent["batches"]) == (5, 3)
        assert asking.stream("folder")["batches"] == 3
        assert asking.stream("folder")["accuracy"] == pytest.approx(sent["accuracy"])
        with (tmp_path / "answers.csv").open(newline="") as file:
            lines = list(csv.DictReader(file))
        assert 100 * sum(line["class"] == line["true_class"] for line in lines) / 5 == sent["accuracy"]
        assert all(0 <= float(line[number]) <= 1 for line in lines for number in ("probability", "suspicion"))
