import pytest

from safer_tta.client import Client
from tests.conftest import CHROMIUM
from tests.serve.helpers import image_file, pictures, sending, serving

CHART = "#chart-reliability svg[role=img]"
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
