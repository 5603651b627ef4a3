"""What the tests of speculation share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.tiny_drafter import write_tiny_drafter
from tests.tiny_model import write_tiny_model


@pytest.fixture(autouse=True, scope="package")
def _one_thread() -> Iterator[None]:
    """Tiny models run fastest on one; several would only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="package")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="package")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_drafter(tmp_path_factory.mktemp("drafter"))
