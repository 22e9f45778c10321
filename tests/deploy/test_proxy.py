"""A request through the proxy of deploy/, with TLS."""

import contextlib
import os
import shutil
import socket
import ssl
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from safer_tta.client import Client
from tests.serve.helpers import CHEAP, free_port, image_file, pictures, serving

NGINX = shutil.which("nginx")
CONFIG = Path(__file__).parents[2] / "deploy" / "nginx.conf"
pytestmark = pytest.mark.skipif(NGINX is None or shutil.which("openssl") is None, reason="nginx is not installed")


@pytest.fixture(scope="module")
def service(source_file, tmp_path_factory):
    options = [word for name, value in CHEAP.items() for word in (f"--{name}", value)]
    with serving(source_file, tmp_path_factory.mktemp("behind") / "served", *options, "--log-format", "json") as made:
        yield made


@pytest.fixture(scope="module")
def proxy(service, tmp_path_factory):
    """The address of the proxy, and the folder with its certificate."""
    folder, port, plain = tmp_path_factory.mktemp("proxy"), free_port(), free_port()
    make = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=localhost -addext subjectAltName=DNS:localhost"
    subprocess.run(
        [*make.split(), "-keyout", "tls.key", "-out", "tls.crt"], cwd=folder, check=True, capture_output=True
    )
    text = CONFIG.read_text().replace("server safer:8017", f"server 127.0.0.1:{service.port}")
    text = text.replace("/tmp/", f"{folder}/").replace("/etc/nginx/tls", str(folder)).replace("/dev/stderr", "stderr")
    text = text.replace("listen 8080", f"listen 127.0.0.1:{plain}").replace("listen 8443", f"listen 127.0.0.1:{port}")
    user = "user root;\n" if os.geteuid() == 0 else ""  # whose folder this is
    (folder / "nginx.conf").write_text(user + text)
    command = [str(NGINX), "-p", str(folder), "-e", "stderr", "-c", str(folder / "nginx.conf")]
    checked = subprocess.run([*command, "-t"], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
    with subprocess.Popen([*command, "-g", "daemon off;"], stderr=subprocess.DEVNULL) as process:
        try:
            deadline = time.monotonic() + 30
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                    break
                time.sleep(0.05)
            yield f"https://localhost:{port}", f"http://localhost:{plain}", folder
        finally:
            process.terminate()


@pytest.fixture
def browser(proxy):
    url, _, folder = proxy
    with httpx.Client(base_url=url, verify=ssl.create_default_context(cafile=folder / "tls.crt"), timeout=30) as made:
        yield made


def test_batches_pass_and_the_service_knows_who_asks(browser, service):
    assert browser.post("/v1/streams", json={"name": "gate"}).status_code == 201
    files = [("images", ("1.png", image_file(), "image/png"))]
    forged = {"X-Forwarded-For": "6.6.6.6", "X-Request-ID": "mine-1"}
    sent = browser.post("/v1/streams/gate/batches", files=files, headers=forged)
    assert (sent.status_code, sent.headers["x-request-id"]) == (200, "mine-1")
    assert "max-age" in sent.headers["strict-transport-security"]
    assert sent.headers["content-security-policy"]
    assert len(browser.get("/v1/streams").headers["x-request-id"]) == 32  # the proxy's own
    line = next(line for line in service.log.read_text().splitlines() if "mine-1" in line)
    assert "127.0.0.1" in line
    assert "6.6.6.6" not in line


def test_what_is_too_large_or_for_machines_inside_is_refused_by_the_proxy(browser, proxy):
    assert browser.post("/v1/streams", content=b"x" * 70_000).status_code == 413
    assert browser.post("/v1/streams/gate/batches", content=b"x" * 70_000).status_code != 413
    for path in ("/metrics", "/readyz", "/livez", "/healthz"):
        assert browser.get(path).status_code == 404
    plain = httpx.get(f"{proxy[1]}/docs")
    assert (plain.status_code, plain.headers["location"]) == (308, "https://localhost/docs")
    assert browser.get("/docs").status_code == 200


def test_a_feed_passes_without_waiting(browser, service):
    with Client(service.url) as asking:
        asking.create("fed")
        with browser.stream("GET", "/v1/streams/fed/reports") as feed:
            lines = feed.iter_lines()
            assert next(lines).startswith(":")
            asking.send("fed", pictures(1)[0])
            assert next(line for line in lines if line.startswith("event")) == "event: report"
