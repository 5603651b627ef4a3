"""One tiny model, and one server for the tests that leave it as they found it."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.running_server import RunningServer, running_server
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def server(tiny_model: Path) -> Iterator[RunningServer]:
    flags = ("--kv-cache-gib", "0.05", "--num-threads", "1", "--max-model-len", "1024")
    with running_server(tiny_model, *flags) as running:
        yield running
