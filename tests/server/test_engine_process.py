"""The supervised engine process, with a real worker and a tiny model."""

import asyncio
import dataclasses
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import msgspec
import pytest

from adaflash.engine.config import EngineConfig
from adaflash.engine.errors import EngineDownError, InvalidRequestError, QueueFullError
from adaflash.engine.messages import EngineFacts, LearningReport, StepStats
from adaflash.engine.types import FinishReason, Request, SamplingParams
from adaflash.server.engine_process import EngineProcess
from adaflash.server.worker_process import WorkerProcess
from tests.tiny_model import write_tiny_model


@dataclasses.dataclass
class Observer:
    """See EngineObserver."""

    ups: list[int] = dataclasses.field(default_factory=list)
    downs: int = 0
    steps: int = 0

    def on_step(self, stats: StepStats) -> None:
        self.steps += 1

    def on_engine_up(self, facts: EngineFacts) -> None:
        self.ups.append(facts.pid)

    def on_engine_down(self) -> None:
        self.downs += 1

    def on_learning(self, report: LearningReport) -> None:
        raise AssertionError("it does not learn")


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> EngineConfig:
    path = write_tiny_model(tmp_path_factory.mktemp("model"))
    return EngineConfig(
        model_path=str(path), dtype="float32", kv_cache_gib=0.01, num_threads=1, max_num_seqs=2
    )


def request(name: str, max_tokens: int, prompt: tuple[int, ...] = (5, 6)) -> Request:
    sampling = SamplingParams(seed=0, max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=name, prompt_ids=list(prompt), sampling=sampling)


def run(
    config: EngineConfig, steps: Callable[[EngineProcess, Observer], Awaitable[None]]
) -> Observer:
    observer = Observer()

    async def inside() -> None:
        engine = EngineProcess(
            config, [observer], max_queued_requests=2, environment=dict(os.environ)
        )
        await engine.start()
        try:
            await steps(engine, observer)
        finally:
            await engine.close()

    asyncio.run(inside())
    return observer


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


def test_tokens_come_and_an_abort_ends_a_stream(config: EngineConfig) -> None:
    async def steps(engine: EngineProcess, observer: Observer) -> None:
        short, long = engine.submit([request("short", 3), request("long", 5000)])
        tokens = [token async for delta in short for token in delta.token_ids]
        assert len(tokens) == 3
        await anext(long)
        long.abort()
        *_, last = [delta async for delta in long]
        assert last.finish_reason is FinishReason.ABORT
        assert engine.is_advancing

    observer = run(config, steps)
    assert observer.steps > 3


def test_the_queue_is_bounded(config: EngineConfig) -> None:
    async def steps(engine: EngineProcess, observer: Observer) -> None:
        engine.submit([request(f"r{number}", 5000) for number in range(4)])
        with pytest.raises(QueueFullError):
            engine.submit([request("more", 1)])
        with pytest.raises(InvalidRequestError, match="more than the 4"):
            engine.submit([request(f"m{number}", 1) for number in range(5)])

    run(config, steps)


def test_a_prompt_beyond_the_vocabulary_ends_alone(config: EngineConfig) -> None:
    async def steps(engine: EngineProcess, observer: Observer) -> None:
        (bad,) = engine.submit([request("bad", 3, (5, 272))])
        (last,) = [delta async for delta in bad]
        assert last.finish_reason is FinishReason.ERROR
        assert "272" in str(last.error)
        (good,) = engine.submit([request("good", 3)])
        assert len([delta async for delta in good]) == 3

    observer = run(config, steps)
    assert len(observer.ups) == 1


def test_a_dead_engine_comes_back_even_if_the_first_try_fails(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine is often short of everything just after a process was killed."""
    monkeypatch.setattr("adaflash.server.engine_process.BACK_OFF_S", (0.01,))
    start, failures = WorkerProcess.start, [OSError(12, "no memory"), OSError(28, "no space")]

    async def start_later(config: EngineConfig, environment: Mapping[str, str]) -> WorkerProcess:
        if failures:
            raise failures.pop()
        return await start(config, environment)

    async def steps(engine: EngineProcess, observer: Observer) -> None:
        (stream,) = engine.submit([request("r", 5000)])
        await anext(stream)
        monkeypatch.setattr(WorkerProcess, "start", start_later)
        os.kill(observer.ups[0], signal.SIGKILL)
        with pytest.raises(EngineDownError, match="ended with status -9"):
            async for _ in stream:
                pass
        assert not engine.is_alive
        with pytest.raises(EngineDownError):
            engine.submit([request("s", 1)])
        await until(lambda: engine.is_alive)
        (again,) = engine.submit([request("t", 3)])
        assert len([delta async for delta in again]) == 3

    observer = run(config, steps)
    assert len(observer.ups) == 2
    assert observer.downs == 2  # the death, and the end


def test_pauses_grow_with_every_death(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    async def note(seconds: float) -> None:
        pauses.append(seconds)

    async def steps(engine: EngineProcess, observer: Observer) -> None:
        monkeypatch.setattr("adaflash.server.engine_process.pause", note)
        for deaths in range(1, 4):
            os.kill(observer.ups[-1], signal.SIGKILL)
            while len(observer.ups) == deaths:
                await asyncio.sleep(0.01)

    run(config, steps)
    assert pauses == [0.5, 1.0, 2.0]


def test_a_stalled_engine_is_not_advancing(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def steps(engine: EngineProcess, observer: Observer) -> None:
        (stream,) = engine.submit([request("r", 5000)])
        await anext(stream)
        monkeypatch.setattr("adaflash.server.engine_process.STALL_S", 0.2)
        os.kill(observer.ups[0], signal.SIGSTOP)
        await until(lambda: not engine.is_advancing)
        assert engine.is_alive
        os.kill(observer.ups[0], signal.SIGCONT)
        await until(lambda: engine.is_advancing)

    run(config, steps)


def test_a_worker_that_cannot_start_ends_by_itself(config: EngineConfig, tmp_path: Path) -> None:
    """With its reason posted and an ordinary status, not killed while it shuts down."""
    command = (sys.executable, "-P", "-m", "adaflash.engine.worker")
    worker = subprocess.Popen(
        [*command, f"ipc://{tmp_path}/in", f"ipc://{tmp_path}/out"],
        stdin=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert worker.stdin is not None
    assert worker.stderr is not None
    broken = msgspec.structs.replace(config, model_path=str(tmp_path))
    worker.stdin.write(msgspec.json.encode(broken) + b"\n")
    worker.stdin.flush()  # and stays open, as a server holds it
    assert worker.wait(timeout=60) == 1
    assert b"Fatal" not in worker.stderr.read()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model_path": "/no/such/model"}, "neither a Hugging Face folder nor a GGUF"),
        ({"device": "mps"}, "not supported"),
        ({"device": "meta"}, "not supported"),
        ({"kv_cache_gib": 1e-9}, "--kv-cache-gib"),
        ({"max_model_len": 10**6}, "beyond the model"),
    ],
)
def test_an_engine_that_cannot_start_says_why(
    config: EngineConfig, changes: dict[str, str | int | float], words: str
) -> None:
    async def nothing(engine: EngineProcess, observer: Observer) -> None:
        raise AssertionError("it started")

    broken = msgspec.structs.replace(config, **changes)
    with pytest.raises(EngineDownError, match=words):
        run(broken, nothing)
