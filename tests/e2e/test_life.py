"""The engine's death and the server's end."""

import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from tests.e2e.running_server import RunningServer, running_server

LONG = {"ignore_eos": True, "max_tokens": 3000}


def in_background(server: RunningServer, **fields: object) -> "Background":
    """Start a request and wait until it runs."""
    before = server.metric("adaflash_num_requests_running")
    request = Background(server, fields)
    request.start()
    deadline = time.monotonic() + 10
    while server.metric("adaflash_num_requests_running") == before and time.monotonic() < deadline:
        time.sleep(0.01)
    assert server.metric("adaflash_num_requests_running") > before
    return request


class Background(threading.Thread):
    """One chat request in a thread."""

    def __init__(self, server: RunningServer, fields: dict[str, object]) -> None:
        super().__init__(daemon=True)
        self._server = server
        self._fields = fields
        self._response: httpx.Response | None = None

    def run(self) -> None:
        self._response = self._server.chat(**self._fields)

    def result(self) -> httpx.Response:
        self.join(timeout=60)
        assert self._response is not None
        return self._response


def test_a_killed_engine_fails_its_requests_and_comes_back(tiny_model: Path) -> None:
    with running_server(tiny_model, "--kv-cache-gib", "0.02", "--num-threads", "1") as server:
        whole = in_background(server, **LONG)
        streamed = in_background(server, stream=True, **LONG)
        server.engine.kill()
        server.wait_for("/health", 503, timeout_s=10)
        assert server.get("/ready").status_code == 503
        refused = server.chat()
        assert refused.status_code == 503
        assert "engine" in refused.json()["error"]["message"]
        assert whole.result().status_code == 503
        assert "engine stopped" in whole.result().json()["error"]["message"]
        assert "engine stopped" in streamed.result().text
        server.wait_for("/ready", 200)
        assert server.chat(max_tokens=4).status_code == 200
        assert server.get("/health").status_code == 200
        assert server.metric("adaflash_engine_restarts_total") == 1


def test_sigterm_lets_requests_finish_and_refuses_new_ones(tiny_model: Path) -> None:
    flags = ("--drain-timeout-s", "300", "--kv-cache-gib", "0.02", "--num-threads", "1")
    with running_server(tiny_model, *flags) as server:
        request = in_background(server, **LONG)
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("/ready", 503, timeout_s=5)
        refused = server.chat(max_tokens=1)
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
        assert request.result().status_code == 200
        assert request.result().json()["usage"]["completion_tokens"] == 3000
        assert server.process.wait(timeout=15) == 0


def test_the_drain_ends_after_its_time(tiny_model: Path) -> None:
    flags = ("--drain-timeout-s", "0", "--kv-cache-gib", "0.02", "--num-threads", "1")
    with running_server(tiny_model, *flags) as server:
        request = in_background(server, stream=True, **LONG)
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(timeout=15) == 0
        assert "error" in request.result().text


def test_the_engine_does_not_outlive_its_server(tiny_model: Path) -> None:
    with running_server(tiny_model, "--kv-cache-gib", "0.02", "--num-threads", "1") as server:
        engine = server.engine
        server.process.kill()
        server.process.wait()
        engine.wait(timeout=10)
        with pytest.raises(httpx.ConnectError):
            server.get("/health")
