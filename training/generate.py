"""The target answers prompts through our own engine: the texts that drafters learn from.

What is written is what the engine emits, token for token, the ending token included. Sampled
answers are as reproducible as served ones: the seed comes from the prompt's name.
"""

import hashlib
from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from adaflash.engine.engine import Engine
from adaflash.engine.trajectories import Trajectory, read_shards, write_shard
from adaflash.engine.types import Request, SamplingParams
from adaflash.server.tokenizer import Tokenizer
from adaflash.training.prompts import Prompt


@dataclass(frozen=True)
class GenerateOptions:
    """How to answer."""

    out: Path
    max_tokens: int  # of an answer
    max_prompt_tokens: int  # longer prompts are left out
    temperature: float
    num_samples: int  # answers per prompt
    in_flight: int  # requests in the engine at once
    shard_size: int  # trajectories


@dataclass(frozen=True)
class Progress:
    """After every finished answer."""

    num_done: int
    num_total: int
    num_tokens: int  # of answers, in this run


@dataclass(frozen=True)
class _Job:
    name: str
    domain: str
    prompt_ids: list[int]


def generate(
    engine: Engine, tokenizer: Tokenizer, prompts: Sequence[Prompt], options: GenerateOptions
) -> Generator[Progress, None, None]:
    """Answer what `options.out` does not hold yet, in the order of `prompts`."""
    jobs = _jobs(tokenizer, prompts, options)
    done = {trajectory.name for trajectory in read_shards(options.out)}
    waiting = deque(job for job in jobs if job.name not in done)
    running: dict[str, tuple[_Job, list[int]]] = {}
    finished: list[Trajectory] = []
    num_done, num_tokens = len(jobs) - len(waiting), 0
    while waiting or running:
        while waiting and len(running) < options.in_flight:
            job = waiting.popleft()
            engine.add(_request(job, options))
            running[job.name] = (job, [])
        for delta in engine.step().deltas:
            job, answer = running[delta.request_id]
            answer += delta.token_ids
            if delta.finish_reason is None:
                continue
            del running[job.name]
            num_done, num_tokens = num_done + 1, num_tokens + len(answer)
            finished.append(_trajectory(job, answer, options.temperature))
            if len(finished) == options.shard_size:
                write_shard(options.out, finished)
                finished = []
            yield Progress(num_done, len(jobs), num_tokens)
    if finished:
        write_shard(options.out, finished)


def _jobs(tokenizer: Tokenizer, prompts: Sequence[Prompt], options: GenerateOptions) -> list[_Job]:
    """One answer of every prompt, then the next one of every prompt, and so on."""
    tokenized = [(prompt, prompt.token_ids(tokenizer)) for prompt in prompts]
    return [
        _Job(f"{prompt.prompt_id}#t{options.temperature:g}-{number}", prompt.domain, token_ids)
        for number in range(options.num_samples)
        for prompt, token_ids in tokenized
        if len(token_ids) <= options.max_prompt_tokens
    ]


def _seed_of(job: _Job) -> int:
    return int.from_bytes(hashlib.blake2b(job.name.encode(), digest_size=8).digest(), "little")


def _request(job: _Job, options: GenerateOptions) -> Request:
    sampling = SamplingParams(
        seed=_seed_of(job), max_tokens=options.max_tokens, temperature=options.temperature
    )
    return Request(request_id=job.name, prompt_ids=job.prompt_ids, sampling=sampling)


def _trajectory(job: _Job, answer: list[int], temperature: float) -> Trajectory:
    return Trajectory(
        job.name,
        job.domain,
        (*job.prompt_ids, *answer),
        len(job.prompt_ids),
        temperature=temperature,
        seed=_seed_of(job),
    )
