"""A real `adaflash serve` in its own process, for tests that want the whole thing."""

import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

START_TIMEOUT_S = 60


@dataclass(frozen=True)
class RunningServer:
    """Its address and its process."""

    url: str
    process: subprocess.Popen[bytes]

    @property
    def engine(self) -> psutil.Process:
        """The engine's process: the server's only child."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    def memory(self) -> int:
        """Resident bytes of both processes."""
        processes = (psutil.Process(self.process.pid), self.engine)
        return sum(process.memory_info().rss for process in processes)

    def get(self, path: str) -> httpx.Response:
        return httpx.get(self.url + path, timeout=10)

    def chat(self, **fields: object) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        return httpx.post(self.url + "/v1/chat/completions", json=body, timeout=60)

    def metric(self, name: str, **labels: str) -> float:
        """Sum of the samples called `name` that carry these labels."""
        families = text_string_to_metric_families(self.get("/metrics").text)
        return sum(
            sample.value
            for family in families
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def wait_for(self, path: str, status: int, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Poll until `path` answers with `status`."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            assert self.process.poll() is None, "the server ended"
            try:
                if self.get(path).status_code == status:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        raise TimeoutError(f"{path} did not answer {status} within {timeout_s} s")


@contextmanager
def running_server(model: Path, *flags: str) -> Iterator[RunningServer]:
    """Serve `model` as "tiny" on a free port until the block ends."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).with_name("adaflash")), "serve", str(model)]
    fixed = [
        "--port",
        str(port),
        "--served-model-name",
        "tiny",
        "--dtype",
        "float32",
        "--no-access-log",
    ]
    process = subprocess.Popen([*command, *fixed, *flags])
    server = RunningServer(f"http://127.0.0.1:{port}", process)
    try:
        server.wait_for("/ready", 200)
        yield server
    finally:
        process.kill()
        process.wait()
