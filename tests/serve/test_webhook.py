"""The webhook: what it sends, and that no receiver, however bad, disturbs the service."""

import socket
import threading
import time

import pytest

from safer_tta.errors import InvalidValueError
from safer_tta.serve import webhook
from safer_tta.serve.metrics import Metrics
from safer_tta.serve.webhook import Sender, Webhook
from tests.serve.attacked import half_attacked
from tests.serve.helpers import engine_of, send
from tests.serve.receiver import receiving


def message(number: int = 0) -> dict:
    return {"event": "raised", "alarm": {"kind": "attack"}, "owner": "anna", "stream": f"gate-{number}"}


class Sending:
    """A sender whose pauses are short, and what it has counted."""

    def __init__(self, hook: Webhook) -> None:
        self.metrics = Metrics()
        self.sender = Sender(hook, self.metrics, first_wait=0.01)

    def counted(self, result: str) -> float:
        return self.metrics.webhook.labels(result)._value.get()

    def wait(self, count: int) -> tuple[float, float]:
        """Return how many were sent and how many failed, once so many are settled."""
        deadline = time.monotonic() + 60
        while self.counted("sent") + self.counted("failed") < count and time.monotonic() < deadline:
            time.sleep(0.01)
        return self.counted("sent"), self.counted("failed")


def test_messages_arrive_in_order_signed_and_each_with_its_own_number():
    with receiving() as receiver:
        sending = Sending(receiver.webhook(secret="0123456789abcdef"))
        for number in range(5):
            sending.sender.send(message(number))
        assert sending.wait(5) == (5, 0)
        assert [m["stream"] for m in receiver.wait_for(5)] == [f"gate-{number}" for number in range(5)]
        assert receiver.verified("0123456789abcdef")
        assert not receiver.verified("0123456789abcdeF")
        assert len({headers["X-Safer-Delivery"] for headers in receiver.headers}) == 5
        assert abs(int(receiver.headers[0]["X-Safer-Timestamp"]) - time.time()) < 60


def test_a_receiver_that_fails_at_first_is_asked_again():
    statuses = iter([500, 429, 503, 200])
    with receiving(lambda _: next(statuses)) as receiver:
        sending = Sending(receiver.webhook())
        sending.sender.send(message())
        assert sending.wait(1) == (1, 0)
        assert len({headers["X-Safer-Delivery"] for headers in receiver.headers}) == 1
        assert "X-Safer-Signature" not in receiver.headers[0]


@pytest.mark.parametrize(("status", "tries"), [(500, webhook.TRIES), (404, 1), (302, 1), (307, 1)])
def test_what_is_refused_counts_as_failed_and_the_next_is_sent(status, tries):
    """A redirect is not followed: it would send the alarm to an address that the operator did not name."""
    refused = threading.Event()
    with receiving(lambda _: 204 if refused.is_set() else status) as receiver:
        sending = Sending(receiver.webhook())
        sending.sender.send(message())
        assert sending.wait(1) == (0, 1)
        assert len(receiver.bodies) == tries
        refused.set()
        sending.sender.send(message())
        assert sending.wait(2) == (1, 1)


def test_nobody_there_is_a_failure():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
    sending = Sending(Webhook(url=url))
    sending.sender.send(message())
    assert sending.wait(1) == (0, 1)


def trickle(handler):
    """Begin an answer that never ends, a byte at a time."""
    for _ in range(600):
        time.sleep(0.1)
        handler.wfile.write(b"H")


@pytest.mark.parametrize("reply", [lambda _: time.sleep(60) or 200, trickle], ids=["silent", "trickling"])
def test_a_receiver_that_hangs_disturbs_nothing(reply, source_file, tmp_path, monkeypatch):
    monkeypatch.setattr(webhook, "DEADLINE", 0.5)
    with receiving(reply) as receiver, engine_of(source_file, tmp_path / "s", "a", webhook=receiver.webhook()) as made:
        for images in half_attacked(source_file, 4):
            send(made, images)
        assert [alarm["kind"] for alarm in made.alarms.of("local")] == ["attack"]
        for number in range(webhook.WAITING + 10):
            made.sender.send(message(number))
        assert made.metrics.webhook.labels("failed")._value.get() >= 9
        began = time.monotonic()
    assert time.monotonic() - began < 30  # it stops, and does not wait for the receiver
    assert receiver.bodies


def test_a_stop_tries_once_to_send_what_is_left():
    with receiving() as receiver:
        sending = Sending(receiver.webhook())
        sending.sender.send(message())
        sending.sender.stop()
        assert sending.wait(1) == (1, 0)


@pytest.mark.parametrize(
    "url",
    ["ftp://a.example/x", "file:///etc/passwd", "https://", "a.example/x", "", "http://[::1", "http://a:b/",
     "http://anna:secret@a.example/"],
)  # fmt: skip
def test_an_address_that_cannot_work_is_refused_at_the_start(url):
    with pytest.raises(InvalidValueError, match="webhook"):
        Webhook(url=url)


def test_the_secret_comes_from_a_file_or_the_environment_and_is_never_shown(tmp_path, monkeypatch):
    monkeypatch.setenv(webhook.VARIABLE, "e" * 16)
    assert Webhook.read("http://a.example", None).secret == "e" * 16
    file = tmp_path / "secret"
    file.write_text("f" * 16 + "\n")
    found = Webhook.read("http://a.example", file)
    assert found.secret == "f" * 16
    assert "f" * 16 not in repr(found)
    file.write_text("short")
    with pytest.raises(InvalidValueError, match="at least 16"):
        Webhook.read("http://a.example", file)
    with pytest.raises(InvalidValueError, match="cannot be used"):
        Webhook.read("http://a.example", tmp_path)
