import json

import pytest

from safer_tta.client import Client
from tests.conftest import CHROMIUM
from tests.serve.attacked import BATCH, clean, half_attacked
from tests.serve.helpers import CHEAP, image_file, pictures, sending, serving

CHART = "#chart-reliability svg[role=img]"
OVER_TIME = "#chart-over-time svg[role=img]"
pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")


@pytest.fixture(scope="module")
def server(source_file, tmp_path_factory):
    with serving(source_file, tmp_path_factory.mktemp("dashboard") / "served") as running:
        yield running


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_stream_is_made_fed_watched_frozen_and_reset(server, browser, tmp_path, scheme):
    context = browser.new_context(color_scheme=scheme, viewport={"width": 1280, "height": 1000})
    page = context.new_page()
    complaints, asked = [], []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    name = f"gate-{scheme}"
    page.goto(server.url)
    page.fill("#create-name", name)
    page.click("#create")
    page.click(f"[data-stream={name}]")
    files = [tmp_path / f"{number}.png" for number in range(3)]
    for file in files:
        file.write_bytes(image_file())
    page.set_input_files("#files", [str(file) for file in files])
    page.click("#send")
    page.wait_for_selector(CHART)
    before = page.get_attribute(CHART, "aria-label")
    with Client(server.url) as asking:
        for images in pictures(4, 6):
            answer = asking.send(name, images)
            asking.label(name, answer["number"], answer["labels"])
    changed = f"before => document.querySelector('{CHART}').getAttribute('aria-label') !== before"
    page.wait_for_function(changed, arg=before)
    page.wait_for_selector("#chart-accuracy svg[role=img]", timeout=20_000)
    page.click("#freeze")
    page.wait_for_selector("#unfreeze:visible")
    with Client(server.url) as asking:
        assert asking.stream(name)["frozen"]
    page.click("#unfreeze")
    page.wait_for_selector("#freeze:visible")
    page.click("#reset")
    page.click("#confirm-yes")
    page.wait_for_function("() => /reset/i.test(document.querySelector('#audit').textContent)")
    page.screenshot(path=str(tmp_path / f"{scheme}.png"), full_page=True)
    assert complaints == []
    assert {url.split("/")[2] for url in asked} == {server.url.split("/")[2]}  # nothing comes from elsewhere
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    context.close()


def test_a_name_that_is_markup_is_only_text(server, browser):
    page = browser.new_page()
    page.goto(server.url)
    page.fill("#create-name", "<img src=x onerror=alert(1)>")
    page.click("#create")
    page.wait_for_function("() => /expected/.test(document.querySelector('#status').textContent)")
    assert page.query_selector("img[src=x]") is None
    page.close()


def test_it_can_be_used_while_streams_are_busy(server, browser):
    page = browser.new_page()
    with Client(server.url) as asking:
        asking.create("busy")
    with sending(server.url, "busy"):
        page.goto(server.url)
        page.click("[data-stream=busy]")
        # Long, because other tests may keep both cores busy; the page takes up a feed that broke by itself.
        page.wait_for_selector("#chart-dropped svg[role=img]", timeout=150_000)
    page.close()


def cells(page, name: str) -> dict[str, str]:
    heads = [head.inner_text() for head in page.query_selector_all("table.streams thead th")]
    row = page.query_selector(f"tr[data-stream={name}]")
    return dict(zip(heads, [cell.inner_text() for cell in row.query_selector_all("th, td")], strict=True))


@pytest.mark.parametrize("width", [1280, 390])
def test_an_attack_is_seen_at_once_and_that_it_is_over(server, browser, source_file, width):
    attacked, calm, new = (f"{kind}-{width}" for kind in ("attacked", "calm", "new"))
    page = browser.new_page(viewport={"width": width, "height": 900})
    problems = []
    page.on("pageerror", lambda error: problems.append(str(error)))
    with Client(server.url) as asking:
        for name in (attacked, calm, new):
            asking.create(name)
        for images, good in zip(half_attacked(source_file, 6), clean(6), strict=True):
            asking.send(attacked, images)
            asking.send(calm, good)
        page.goto(server.url)
        page.click(f"[data-stream={attacked}]")
        page.wait_for_selector("#standing p.bad")
        (alarm,) = asking.stream(attacked)["alarms"]
        assert alarm["words"] in page.inner_text("#standing")
        page.wait_for_selector(OVER_TIME)
        assert page.get_attribute("#charts > :first-child", "id") == "chart-over-time"
        assert page.query_selector(f"{OVER_TIME} .limit") is not None
        assert page.query_selector(f"{OVER_TIME} .span") is not None
        assert "attack suspected" in cells(page, attacked)["Alarms"]
        assert cells(page, attacked)["Suspicious now"] == f"{100 * asking.stream(attacked)['suspicious']:.0f} %"
        assert cells(page, attacked)["Flagged"] == str(asking.stream(attacked)["abstained"])
        assert page.title().startswith("⚠")
        assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")

        assert cells(page, calm)["Alarms"] == "none"
        assert cells(page, new)["Alarms"] == cells(page, new)["Suspicious now"] == "–"
        page.click(f"[data-stream={calm}]")
        page.wait_for_selector("#standing p.good")
        page.wait_for_selector(OVER_TIME)
        assert page.query_selector(f"{OVER_TIME} .span") is None

        page.click(f"[data-stream={attacked}]")
        for images in clean(2 * 256 // BATCH):
            if not asking.send(attacked, images)["report"]["alarms"]:
                break
        page.wait_for_selector("#standing p.good", timeout=30_000)
        page.wait_for_function("() => !document.title.startsWith('⚠')")
        assert cells(page, attacked)["Alarms"] == "none"
    assert problems == []
    page.close()


def test_the_batch_under_the_pointer_is_told_in_figures(server, browser):
    page = browser.new_page(viewport={"width": 1280, "height": 1400})
    with Client(server.url) as asking:
        asking.create("hover")
        reports = [asking.send("hover", images)["report"] for images in pictures(5, 4)]
    page.goto(server.url)
    page.click("[data-stream=hover]")
    page.wait_for_selector(OVER_TIME)
    readout = "#chart-over-time .readout"
    page.wait_for_function(f"() => document.querySelector('{readout}').textContent.startsWith('Batch 5')")
    box = page.query_selector("#chart-over-time .plot").bounding_box()
    page.mouse.move(box["x"] + 60, box["y"] + 80)
    page.wait_for_function(f"() => document.querySelector('{readout}').textContent.startsWith('Batch 1,')")
    assert f"{reports[0]['abstained']} of 4 flagged" in page.inner_text(readout)
    page.mouse.move(0, 0)
    page.wait_for_function(f"() => document.querySelector('{readout}').textContent.startsWith('Batch 5')")
    page.close()


def test_a_predictor_without_suspicion_does_not_look_safe(source_file, tmp_path, browser):
    options = [part for name, value in CHEAP.items() for part in (f"--{name}", value)]
    with serving(source_file, tmp_path / "served", *options) as server, Client(server.url) as asking:
        asking.create("plain")
        asking.send("plain", pictures(1, 4)[0])
        page = browser.new_page()
        page.goto(server.url)
        page.click("[data-stream=plain]")
        page.wait_for_selector("#standing p.soft")
        assert "would not be noticed" in page.inner_text("#standing")
        assert cells(page, "plain")["Suspicious now"] == "–"
        page.close()


def test_the_comparison_is_shown_in_a_roll_out_to_those_who_may_see_it(source_file, new_file, browser, tmp_path):
    tokens = tmp_path / "tokens.json"
    tokens.write_text(json.dumps({"anna": "a" * 20, "operator": "o" * 20}))
    options = ("--shadow", str(new_file), "--tokens", str(tokens), "--method", "none", "--predictor", "plain")
    with serving(source_file, tmp_path / "served", *options) as server:
        with Client(server.url, "a" * 20) as asking:
            asking.create("a")
            asking.send("a", pictures(1, 4)[0])
        for token, shown in (("o" * 20, True), ("a" * 20, False)):
            page = browser.new_page()
            page.goto(server.url)
            page.fill("#token", token)
            page.press("#token", "Enter")
            complaints = []
            page.on("console", lambda message, to=complaints: to.append(message.text))
            page.wait_for_function("() => document.querySelector('#model-version').textContent.length == 8")
            if shown:
                page.wait_for_function("() => /of 4 images/.test(document.querySelector('#rollout-facts').textContent)")
                assert "new.safetensors" in page.inner_text("#rollout-rows")
            else:
                page.wait_for_function("() => /created/.test(document.querySelector('#audit').textContent)")
            assert page.is_visible("#rollout") is shown
            assert complaints == []
            page.close()
