"""A real server that learns: texts go to disk, a published drafter comes in, no text changes."""

import signal
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from adaflash.engine.learning.versions import publish
from adaflash.engine.trajectories import PATTERN, Trajectory, read_shards
from tests.e2e.running_server import RunningServer, running_server
from tests.tiny_drafter import drafter_tensors, threshold_head_tensors, write_tiny_drafter

FLAGS = ("--kv-cache-gib", "0.05", "--num-threads", "1", "--max-model-len", "1024")
VERSION = "adaflash_drafter_version"


def ask(server: RunningServer, number: int, **headers: str) -> str:
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": f"Question {number}"}],
        "temperature": 0.7,
        "seed": number,
        "max_tokens": 30,
        "ignore_eos": True,
    }
    address = server.url + "/v1/chat/completions"
    response = httpx.post(address, json=body, headers=headers, timeout=60)
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("ending", [signal.SIGTERM, signal.SIGKILL])
def test_texts_out_and_drafters_in(
    server: RunningServer, tiny_model: Path, tmp_path: Path, ending: signal.Signals
) -> None:
    drafter, learn = write_tiny_drafter(tmp_path / "drafter"), tmp_path / "learn"
    flags = ("--drafter", str(drafter), "--speculation", "fixed:5", "--learn", str(learn))
    plain = [ask(server, number) for number in range(4)]
    with running_server(tiny_model, *FLAGS, *flags, "--model-cache-dir", str(tmp_path)) as learning:
        assert learning.metric(VERSION) == 0
        before = [ask(learning, number) for number in range(4)]
        ask(learning, 4, **{"X-AdaFlash-Learn": "off"})
        ask(learning, 5, **{"x-adaflash-learn": "nonsense is no yes"})
        publish(learn, new_drafter, keep=3)
        wait_until(lambda: learning.metric(VERSION) == 1)
        after = [ask(learning, number) for number in range(4)]
        assert before == after == plain
        assert learning.metric("adaflash_drafter_reloads_total") == 1
        wait_until(lambda: learning.metric("adaflash_learn_left_out_texts_total") == 2)
        left_out = {"reason": "opt_out"}
        assert learning.metric("adaflash_learn_left_out_texts_total", **left_out) == 2
        publish(learn, lambda folder: None, keep=3)
        wait_until(lambda: learning.metric("adaflash_drafter_versions_refused_total") == 1)
        assert learning.metric(VERSION) == 1
        learning.process.send_signal(ending)
        learning.process.wait(timeout=30)
    wait_until(lambda: any((learn / "buffer").glob(PATTERN)))
    kept = list(read_shards(learn / "buffer"))
    assert len(kept) == 8
    assert {len(item.token_ids) - item.prompt_len for item in kept} == {30}
    assert any(item.rejected for item in kept)
    for number in range(4):
        of_prompt = [item.token_ids for item in kept if f"Question {number}" in prompt_of(item)]
        assert len(of_prompt) == 2
        assert of_prompt[0] == of_prompt[1]


def new_drafter(folder: Path) -> None:
    write_tiny_drafter(folder, tensors=drafter_tensors(seed=9) | threshold_head_tensors(seed=9))


def prompt_of(item: Trajectory) -> str:
    """The tiny model's first 256 tokens are GPT-2's bytes, of which ASCII ones lie together."""
    from tests.tiny_model import tiny_tokenizer

    return str(tiny_tokenizer().decode(list(item.token_ids[: item.prompt_len])))


def test_a_hook_that_is_not_there_stops_the_start(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flags = ("--learn", str(tmp_path / "learn"), "--learn-redact", "no_such_module:redact")
    with (
        pytest.raises(AssertionError, match="the server ended"),
        running_server(tiny_model, *FLAGS, *flags),
    ):
        pass
    assert "no_such_module" in capfd.readouterr().err
    assert not list(tmp_path.rglob(PATTERN))
