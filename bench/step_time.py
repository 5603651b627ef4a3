"""Where a decode step's time goes: the engine in this process, R sequences, torch's profiler.

    python bench/step_time.py [--model NAME] [--rows 1,8,32] [--steps 30] [--dtype auto]

Prints the median step and the share of each kind of work, by self time of torch's operators; what
is left of the step after all operators is Python and waiting.
"""

import argparse
import random
import statistics
import time
from collections import defaultdict
from pathlib import Path

from torch.profiler import ProfilerActivity, profile

from adaflash.engine.build import build_engine
from adaflash.engine.catalog import DEFAULT_MODEL, locate
from adaflash.engine.config import EngineConfig
from adaflash.engine.engine import Engine
from adaflash.engine.types import Request, SamplingParams
from adaflash.server.settings import default_cache_dir

CONTEXT = 200  # tokens in the cache of each sequence when measuring starts
KINDS = {
    "linear": ("mm", "addmm", "linear", "mkldnn", "matmul"),
    "attention": ("scaled_dot_product", "flash"),
    "gather and write K/V": ("index_select", "index_copy", "gather"),
    "copies and casts": ("copy_", "cat", "clone", "contiguous", "to_copy"),
    "sampling": ("topk", "argmax", "log", "bitwise", "sort", "softmax", "cumsum"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL)
    parser.add_argument("--rows", default="1,8,32")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    path = locate(
        options.model, cache_dir=default_cache_dir(), on_progress=lambda done, total: None
    )
    config = EngineConfig(model_path=str(path), dtype=options.dtype, num_threads=options.threads)
    engine, facts = build_engine(config)
    print(f"{Path(config.model_path).name}, {facts.dtype}, {facts.num_threads} threads")
    for rows in map(int, options.rows.split(",")):
        for temperature in (0.0, 0.8):
            fill(engine, rows, temperature, facts.vocab_size, options.steps)
            report(engine, rows, temperature, options.steps)


def fill(engine: Engine, rows: int, temperature: float, vocab_size: int, steps: int) -> None:
    """Put `rows` sequences into the engine and prefill them."""
    draw = random.Random(rows)
    for number in range(rows):
        sampling = SamplingParams(
            seed=number, max_tokens=3 * steps + 50, temperature=temperature, ignore_eos=True
        )
        prompt = [draw.randrange(1000, vocab_size) for _ in range(CONTEXT)]
        engine.add(Request(request_id=f"{number}", prompt_ids=prompt, sampling=sampling))
    while engine.step().stats.num_decode_rows < rows:
        pass


def report(engine: Engine, rows: int, temperature: float, steps: int) -> None:
    times = [timed_step(engine) for _ in range(steps)]
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps // 3):
            engine.step()
    shares: dict[str, float] = defaultdict(float)
    for event in profiler.key_averages():
        shares[kind_of(event.key)] += event.self_cpu_time_total / 1e3 / (steps // 3)
    low, median, high = min(times), statistics.median(times), max(times)
    print(f"\n{rows} rows, temperature {temperature}: {median:.1f} ms ({low:.1f} .. {high:.1f})")
    for kind, spent in sorted(shares.items(), key=lambda item: -item[1]):
        print(f"  {kind:<24}{spent:7.2f} ms")
    while engine.has_work:
        engine.step()


def timed_step(engine: Engine) -> float:
    started = time.perf_counter()
    engine.step()
    return (time.perf_counter() - started) * 1e3


def kind_of(operator: str) -> str:
    name = operator.removeprefix("aten::")
    for kind, parts in KINDS.items():
        if any(part in name for part in parts):
            return kind
    return "norms, rope, elementwise"


if __name__ == "__main__":
    main()
