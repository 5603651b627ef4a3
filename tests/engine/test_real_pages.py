"""The whole engine on real K/V: sharing, preemption and chunks change no token."""

from pathlib import Path

import pytest
import torch

from adaflash.engine.build import CacheSize, Models, assemble
from adaflash.engine.config import EngineConfig
from adaflash.engine.devices import choose_device
from adaflash.engine.engine import Engine
from adaflash.engine.messages import TokenDelta
from adaflash.engine.models.weights import load_decoder
from adaflash.engine.types import Request, SamplingParams
from adaflash.kernels.reference_attention import ReferenceAttention
from tests.engine.toy import drain, request, run, text
from tests.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def engine(model: Path, *, num_pages: int, prefix_cache: bool = True) -> Engine:
    config = EngineConfig(
        model_path=str(model),
        dtype="float32",
        max_num_seqs=6,
        max_batched_tokens=24,
        page_size=4,
        prefix_cache=prefix_cache,
    )
    device = choose_device(config)
    decoder = load_decoder(model, torch.float32, device.device)
    size = CacheSize(num_pages, max_model_len=num_pages * config.page_size)
    return assemble(config, Models(decoder, None, device, ReferenceAttention()), size)


def requests(temperature: float) -> list[Request]:
    """Half of them share their first 18 tokens."""
    shared = list(range(100, 118))
    sampling = [
        SamplingParams(
            seed=number,
            max_tokens=24,
            temperature=temperature,
            top_p=0.95,
            presence_penalty=0.4,
            ignore_eos=True,
        )
        for number in range(6)
    ]
    prompts = [(shared if n % 2 else []) + list(range(n, 10 * n + 7)) for n in range(6)]
    return [
        request(f"r{number}", prompt, params)
        for number, (prompt, params) in enumerate(zip(prompts, sampling, strict=True))
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_preempted_requests_write_what_they_write_alone(
    model: Path, temperature: float, prefix_cache: bool
) -> None:
    asked = requests(temperature)
    roomy = engine(model, num_pages=100)
    alone = {item.request_id: text(run(roomy, [item])[item.request_id]) for item in asked}
    tight = engine(model, num_pages=26, prefix_cache=prefix_cache)
    for item in asked:
        tight.add(item)
    num_preempted = 0
    together: dict[str, list[int]] = {name: [] for name in alone}
    while tight.has_work:
        report = tight.step()
        tight.check_integrity()
        num_preempted += report.stats.num_preempted
        for delta in report.deltas:
            together[delta.request_id] += delta.token_ids
    assert num_preempted > 0
    assert together == alone
    assert drain(tight) == {}


def test_a_hit_after_a_hit_gives_the_same_logprobs(model: Path) -> None:
    under_test = engine(model, num_pages=64)
    sampling = SamplingParams(seed=0, max_tokens=8, temperature=0, num_logprobs=2)
    prompt = list(range(50, 71))
    cold, warm, again = (
        run(under_test, [request(name, prompt, sampling)])[name] for name in ("a", "b", "c")
    )
    assert (cold[0].num_cached_tokens, warm[0].num_cached_tokens) == (0, 20)
    for deltas in (warm, again):  # fewer than `cold` has: the text is known, and looked up
        assert text(deltas) == text(cold)
        assert logprobs(deltas) == pytest.approx(logprobs(cold), abs=1e-5)


def logprobs(deltas: list[TokenDelta]) -> list[float]:
    return [entry.logprob for delta in deltas for entry in delta.logprobs or []]
