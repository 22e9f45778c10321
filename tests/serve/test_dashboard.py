"""The dashboard in a real browser, on a real server: create, send, see the charts move, freeze, reset."""

from __future__ import annotations

import threading

import pytest

from tests.conftest import CHROMIUM, CHROMIUM_FLAGS
from tests.serve.helpers import client, image_file, pictures, serving

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed"),
]


@pytest.fixture(scope="module")
def server(source_file, tmp_path_factory):
    with serving(source_file, tmp_path_factory.mktemp("dashboard") / "served") as running:
        yield running


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        opened = playwright.chromium.launch(executable_path=str(CHROMIUM), args=CHROMIUM_FLAGS)
        yield opened
        opened.close()


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
    page.wait_for_selector("#chart-reliability svg[role=img]")
    before = page.get_attribute("#chart-reliability svg[role=img]", "aria-label")
    with client(server) as asking:
        for images in pictures(4, 6):
            answer = asking.send(name, images)
            asking.label(name, answer["number"], answer["labels"])
    page.wait_for_function(
        "before => document.querySelector('#chart-reliability svg[role=img]').getAttribute('aria-label') !== before",
        arg=before,
    )
    page.wait_for_selector("#chart-accuracy svg[role=img]", timeout=20_000)
    page.click("#freeze")
    page.wait_for_selector("#unfreeze:visible")
    with client(server) as asking:
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
    """The page stays quick while another stream keeps the engine at work."""
    stop = threading.Event()

    def busy() -> None:
        with client(server) as asking:
            asking.create("busy")
            while not stop.is_set():
                asking.send("busy", pictures(1, 8)[0])

    thread = threading.Thread(target=busy, daemon=True)
    thread.start()
    page = browser.new_page()
    page.goto(server.url)
    page.click("[data-stream=busy]")
    page.wait_for_selector("#chart-dropped svg[role=img]")
    stop.set()
    thread.join(30)
    page.close()
