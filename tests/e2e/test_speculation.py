"""A real server with a real (random) drafter: every policy over HTTP, the same text as without."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.e2e.running_server import RunningServer, running_server
from tests.tiny_drafter import drafter_config, write_tiny_drafter

FLAGS = ("--kv-cache-gib", "0.05", "--num-threads", "1", "--max-model-len", "1024")
ASKED: list[dict[str, object]] = [
    {"temperature": 0, "max_tokens": 40},
    {"temperature": 0.8, "seed": 3, "top_p": 0.95, "max_tokens": 40},
    {"temperature": 1, "seed": 4, "presence_penalty": 1, "logit_bias": {"70": 3}, "n": 2},
    {"temperature": 0, "max_tokens": 30, "logprobs": True, "top_logprobs": 2},
]


@pytest.fixture(scope="module")
def drafter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_drafter(tmp_path_factory.mktemp("drafter") / "tiny-drafter")


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> Iterator[RunningServer]:
    with running_server(tiny_model, *FLAGS, "--speculation", "off") as found:
        yield found


def answers(server: RunningServer) -> list[object]:
    """What the choices of all requests say, sent at once."""

    def ask(fields: dict[str, object]) -> list[object]:
        fields = {"max_tokens": 25, "ignore_eos": True, "return_speculation": True, **fields}
        response = server.chat(**fields)
        assert response.status_code == 200, response.text
        choices: list[object] = response.json()["choices"]
        return choices

    with ThreadPoolExecutor(len(ASKED)) as pool:
        return list(pool.map(ask, ASKED))


def without_reports(choices: object) -> object:
    """Choices without the report and, as these are rounded, the logprobs' numbers."""
    if isinstance(choices, dict):
        return {
            name: without_reports(value)
            for name, value in choices.items()
            if name not in ("adaflash", "logprob")
        }
    if isinstance(choices, list):
        return [without_reports(item) for item in choices]
    return choices


@pytest.mark.parametrize("policy", ["fixed:3", "threshold", "goodput"])
def test_every_policy_serves_the_text_of_plain_decoding(
    plain: RunningServer, tiny_model: Path, drafter: Path, tmp_path: Path, policy: str
) -> None:
    flags = ("--drafter", str(drafter), "--speculation", policy)
    kept = ("--model-cache-dir", str(tmp_path))
    with running_server(tiny_model, *FLAGS, *flags, *kept) as speculating:
        found = answers(speculating)
        assert without_reports(found) == without_reports(answers(plain))
        verified = speculating.metric("adaflash_spec_decode_num_draft_tokens_total")
        assert verified > 0
        reported = sum(sum(report["verify_lengths"]) for report in reports(found))
        assert reported == verified
        assert speculating.metric("adaflash_spec_decode_steps_total") > 0
        assert speculating.metric("adaflash_step_draft_seconds_count") > 0
        assert (tmp_path / "costs").is_dir()
        info = {"policy": policy, "drafter": "tiny-drafter", "head": "threshold"}
        assert speculating.metric("adaflash_speculation_info", **info) == 1


@pytest.mark.parametrize("policy", ["fixed:3", "threshold", "goodput"])
def test_without_a_drafter_known_text_is_looked_up(
    plain: RunningServer, tiny_model: Path, tmp_path: Path, policy: str
) -> None:
    kept = ("--model-cache-dir", str(tmp_path))
    flags = ("--speculation", policy, "--lookup-drafts", "5", "--lookup-store-tokens", "2000")
    with running_server(tiny_model, *FLAGS, *flags, *kept) as speculating:
        expected = without_reports(answers(plain))
        for _ in range(2):
            assert without_reports(answers(speculating)) == expected
        by_lookup = {"source": "lookup"}
        verified = speculating.metric("adaflash_spec_decode_source_draft_tokens_total", **by_lookup)
        accepted = speculating.metric(
            "adaflash_spec_decode_source_accepted_tokens_total", **by_lookup
        )
        assert 0 < accepted <= verified
        assert verified == speculating.metric("adaflash_spec_decode_num_draft_tokens_total")
        assert speculating.metric("adaflash_spec_decode_paying") == 0  # that is the drafter's
        info = {"policy": policy, "drafter": "none", "lookup_drafts": "5"}
        assert speculating.metric("adaflash_speculation_info", **info) == 1
    assert plain.metric("adaflash_spec_decode_num_draft_tokens_total") == 0


def reports(answers: list[object]) -> list[dict[str, list[int]]]:
    return [choice["adaflash"] for choices in answers for choice in choices]  # type: ignore[attr-defined]


def test_a_drafter_for_another_model_is_refused(
    tiny_model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    folder = write_tiny_drafter(tmp_path / "other", drafter_config(num_target_layers=7))
    with (
        pytest.raises(AssertionError, match="the server ended"),
        running_server(tiny_model, *FLAGS, "--drafter", str(folder)),
    ):
        pass
    assert "number of target layers is 7, and the target's is 2" in capfd.readouterr().err
