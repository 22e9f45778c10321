"""The files in deploy/ agree with the service that they start, watch and stand in front of."""

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import typer
import yaml

from safer_tta.cli import app
from safer_tta.serve.app import create_app
from safer_tta.serve.limits import Limits
from safer_tta.serve.tokens import METRICS, Tokens
from tests.serve.helpers import NPY, array_file, converse, engine_of, pictures

DEPLOY = Path(__file__).parents[2] / "deploy"
DOCS = DEPLOY.parent / "docs"
ELSEWHERE = {"up"}  # Prometheus's own
DASHBOARD_WORDS = {"$__rate_interval": "5m", '"$instance"': '".*"'}
METRIC = re.compile(r"\b(?:safer_tta|process)_\w+")


def load(name: str) -> Any:
    return yaml.safe_load((DEPLOY / name).read_text())


def instructions(name: str = "Dockerfile") -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with their arguments."""
    lines = [line for line in (DEPLOY / name).read_text().splitlines() if line and not line.startswith("#")]
    whole = re.sub(r"\\\n\s*", "", "\n".join(lines))
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in whole.splitlines())]


@pytest.fixture(scope="module")
def exposed(source_file, tmp_path_factory) -> dict[str, set[str]]:
    """The metrics of a service that has answered and refused, with the names of their labels."""
    from prometheus_client.parser import text_string_to_metric_families

    async def talk(asking):
        content, owner = array_file(pictures(1)[0]), {"Authorization": "Bearer " + "a" * 20}
        await asking.get("/v1/streams")
        await asking.post("/v1/streams/a/batches", content=content, headers=NPY | owner)
        return (await asking.get("/metrics", headers={"Authorization": "Bearer " + "m" * 20})).text

    tokens = Tokens({"local": "a" * 20, METRICS: "m" * 20})
    with engine_of(source_file, tmp_path_factory.mktemp("exposed"), "a") as made:
        made.metrics.owner_refused.labels("local")
        text = converse(create_app(made, tokens), talk)
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def selectors(query: str) -> list[promql_parser.VectorSelector]:
    """Return what a query selects."""
    found: list[promql_parser.VectorSelector] = []

    def visit(node: Any) -> None:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(node)
        elif isinstance(node, promql_parser.MatrixSelector):
            found.append(node.vector_selector)

    promql_parser.walk(promql_parser.parse(query), visit)
    return found


def check_query(query: str, exposed: dict[str, set[str]]) -> None:
    for word, value in DASHBOARD_WORDS.items():
        query = query.replace(word, value)
    chosen = selectors(query)
    assert {one.name for one in chosen} >= set(METRIC.findall(query))  # the walk above misses none
    for one in chosen:
        assert one.name in exposed.keys() | ELSEWHERE, query
        labels = {matcher.name for matcher in one.matchers.matchers}
        assert one.name in ELSEWHERE or labels <= exposed[one.name] | {"job", "instance"}, query


def test_alerts_watch_metrics_that_exist(exposed):
    rules = [rule for group in load("alerts.yml")["groups"] for rule in group["rules"]]
    assert len({rule["alert"] for rule in rules}) == len(rules) >= 10
    for rule in rules:
        check_query(rule["expr"], exposed)
        assert rule["labels"]["severity"] in ("page", "ticket")
        assert rule["annotations"]["summary"]
    explained = (DOCS / "deploy.md").read_text()
    assert all(f"`{rule['alert']}`" in explained for rule in rules)


def test_the_dashboard_shows_metrics_that_exist(exposed):
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    panels = [panel for panel in dashboard["panels"] if panel["type"] != "row"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    assert len(queries) > 20
    for query in [*queries, *(one["expr"] for one in dashboard["annotations"]["list"])]:
        check_query(query, exposed)
    assert len({panel["id"] for panel in dashboard["panels"]}) == len(dashboard["panels"])
    places = [tuple(panel["gridPos"].values()) for panel in panels]
    assert all(x + width <= 24 for x, _, width, _ in places)
    assert len({(x, y) for x, y, _, _ in places}) == len(places)


def test_every_metric_that_is_documented_exists_and_the_other_way_round(exposed):
    told = {name for name in exposed if name.startswith("safer_tta") and not name.endswith("_created")}
    families = {re.sub(r"_(bucket|count|sum)$", "", name) for name in told}
    written = {name for name in METRIC.findall((DOCS / "operate.md").read_text()) if "process" not in name}
    assert written == families


def commands() -> Iterator[list[str]]:
    """Yield the command lines that start the service."""
    told = dict(instructions())
    yield [*json.loads(told["ENTRYPOINT"]), *json.loads(told["CMD"])]
    unit = (DEPLOY / "safer-tta.service").read_text()
    yield shlex.split(re.findall("^ExecStart=(.*)$", unit, re.M)[0])
    for service in load("compose.yaml")["services"].values():
        if "command" in service and service["image"] == "safer-tta":
            yield ["safer", *service["command"]]


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
def test_the_service_understands_the_commands_that_start_it(command, tmp_path):
    words = []
    for word in command[1:]:
        if words and words[-1] in ("--model", "--tokens"):  # files that exist only where it runs
            (tmp_path / Path(word).name).touch()
            word = str(tmp_path / Path(word).name)
        words.append(word)
    group = typer.main.get_command(app)
    with group.make_context("safer", words) as context:
        name, found, rest = group.resolve_command(context, [*context._protected_args, *context.args])
        assert name == "serve"
        with found.make_context(name, rest, parent=context) as parsed:
            assert parsed.params["tokens"] is not None  # needed on every address but this machine's
            assert parsed.params["log_format"] == "json"
            assert parsed.params["host"] in ("0.0.0.0", "127.0.0.1")


def test_the_image_runs_without_root_and_asks_the_service_whether_it_lives():
    told = instructions()
    stages = [number for number, (word, _) in enumerate(told) if word == "FROM"]
    last = dict(told[stages[-1] :])
    assert len(stages) == 2
    assert last["USER"].split(":")[0] not in ("root", "0")
    assert "pip" not in " ".join(last)  # what is needed to build stays in the first stage
    script = json.loads(last["HEALTHCHECK"].partition("CMD ")[2])[2]
    assert f":{last['EXPOSE']}/livez" in script
    compile(script, "HEALTHCHECK", "exec")
    compose = load("compose.yaml")["services"]["safer"]
    assert compose["read_only"]
    assert compose["cap_drop"] == ["ALL"]
    assert "ports" not in compose  # only the proxy reaches it
    allowed = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    copied = {word for kind, rest in told if kind == "COPY" and "--from" not in rest for word in rest.split()[:-1]}
    assert {f"!{word}" for word in copied} <= set(allowed)
    assert all((DEPLOY.parent / word).exists() for word in copied)


def test_the_dockerfile_passes_its_linter():
    linter = Path(sys.executable).with_name("hadolint")
    if not linter.exists():
        pytest.skip("hadolint is not installed")
    done = subprocess.run([linter, DEPLOY / "Dockerfile"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_proxy_has_the_service_s_limits():
    text = (DEPLOY / "nginx.conf").read_text()
    units = {"k": 1024, "m": 1024**2}
    sizes = [int(size) * units[unit] for size, unit in re.findall(r"client_max_body_size (\d+)([km]);", text)]
    assert sizes == [Limits().json_bytes, Limits().body_bytes]
    services = load("compose.yaml")["services"]
    assert re.findall(r"server (\S+):(\d+);", text) == [("safer", dict(instructions())["EXPOSE"])]
    assert {port.rpartition(":")[2] for port in services["proxy"]["ports"]} == set(re.findall(r"listen (\d+)", text))
    assert load("prometheus.yml")["scrape_configs"][0]["static_configs"][0]["targets"] == ["safer:8017"]


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_takes_the_unit_and_finds_it_well_confined(tmp_path):
    unit = tmp_path / "safer-tta.service"
    unit.write_text((DEPLOY / unit.name).read_text().replace("/opt/safer/bin/safer", "/bin/true"))
    verified = subprocess.run(["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False)
    assert (verified.returncode, verified.stderr) == (0, "")
    asked = ["systemd-analyze", "security", "--offline=true", "--threshold=25", unit]  # of 100; others have about 95
    judged = subprocess.run(asked, capture_output=True, text=True, check=False)
    assert judged.returncode == 0, judged.stdout
