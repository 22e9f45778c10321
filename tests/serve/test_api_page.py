import httpx
import jsonschema
import pytest

from safer_tta.serve.operations import OPERATIONS
from tests.conftest import CHROMIUM
from tests.serve.helpers import image_file

VERBS = {"get", "put", "post", "delete", "patch"}


@pytest.fixture(scope="module")
def schema(server):
    return httpx.get(f"{server.url}/openapi.json").json()


def operations(schema):
    return [(verb, path, told) for path, verbs in schema["paths"].items() for verb, told in verbs.items()]


def test_every_operation_is_described(schema):
    found = operations(schema)
    assert {(verb, path) for verb, path, _ in found} == OPERATIONS.keys()  # a new address needs words too
    tags = {tag["name"] for tag in schema["tags"]}
    for verb, path, told in found:
        assert verb in VERBS
        assert len(told["summary"]) > 5, path
        assert len(told["description"]) > 10, path
        assert set(told["tags"]) <= tags
    assert len({told["summary"] + path for _, path, told in found}) == len(found)
    assert len({told["operationId"] for _, _, told in found}) == len(found)


def test_every_body_and_every_answer_has_an_example_that_fits_its_schema(schema):
    checked = 0
    for verb, path, told in operations(schema):
        bodies = told.get("requestBody", {}).get("content", {})
        answers = {status: answer.get("content", {}) for status, answer in told["responses"].items()}
        assert answers.pop("204", {}) == {}
        assert all(answers.values()), (verb, path)
        for kind, content in [*bodies.items(), *((kind, c) for found in answers.values() for kind, c in found.items())]:
            assert content.get("example"), (verb, path, kind)
            whole = content.get("schema", {}) | {"components": schema["components"]}
            jsonschema.validate(content["example"], whole, jsonschema.Draft202012Validator)
            checked += "schema" in content
    assert checked > 60


def test_only_the_page_s_own_files_are_served(server):
    for name in ("swagger-ui-bundle.js", "swagger-ui.css", "api_page.js", "favicon-32x32.png"):
        assert httpx.get(f"{server.url}/docs/{name}").status_code == 200
    for name in ("__init__.py", "..%2fmain.py", "%2e%2e/app.py", "/etc/passwd", "%2fetc%2fpasswd"):
        assert httpx.get(f"{server.url}/docs/{name}").status_code == 404


@pytest.mark.skipif(CHROMIUM is None, reason="Debian's chromium is not installed")
def test_the_page_shows_and_sends_every_request_and_asks_no_other_site(server, schema, browser, tmp_path):
    context = browser.new_context(viewport={"width": 1280, "height": 1400})
    page = context.new_page()
    complaints, asked = [], []
    page.on("console", lambda message: complaints.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    page.goto(f"{server.url}/docs")
    page.wait_for_selector(".opblock")
    assert page.locator(".opblock").count() == len(operations(schema))
    page.screenshot(path=str(tmp_path / "page.png"), full_page=True)

    def execute(operation: str, field: str = "", value: str = "") -> str:
        part = page.locator(f"#operations-{operation}")
        part.locator(".opblock-summary-control").first.click()
        if field == "textarea":
            part.locator("textarea").fill(value)
        elif field:
            part.locator("input[type=file]").first.set_input_files(value)
            part.locator("tr[data-param-name=name] input").fill("by-hand")
        part.locator(".execute").click()
        row = part.locator(".live-responses-table tr.response .response-col_status").first
        row.wait_for()
        return row.inner_text().split()[0]

    (tmp_path / "1.png").write_bytes(image_file())
    assert execute("Streams-create_stream", "textarea", '{"name": "by-hand"}') == "201"
    assert execute("Batches-send_batch", "file", str(tmp_path / "1.png")) == "200"
    assert execute("Service-get_model") == "200"
    page.screenshot(path=str(tmp_path / "executed.png"), full_page=True)
    assert complaints == []
    assert {url.split("/")[2] for url in asked if not url.startswith("data:")} == {server.url.split("/")[2]}
    context.close()
