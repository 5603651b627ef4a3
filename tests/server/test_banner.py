"""What the server says once it is ready: all that is needed to use it, and no secret."""

import json
import shlex

import msgspec
import pytest
from pydantic import SecretStr

from adaflash.engine.messages import EngineFacts, SpeculationFacts
from adaflash.server.banner import Address, describe_server
from adaflash.server.settings import ServerSettings

FACTS = EngineFacts(
    pid=1,
    vocab_size=100,
    max_model_len=2048,
    num_pages=1000,
    page_size=16,
    dtype="float32",
    device="cpu",
    num_threads=2,
    attention="reference",
    load_s=1.25,
)


def test_it_says_where_what_and_how_much() -> None:
    settings = ServerSettings(max_num_seqs=32, api_key=(SecretStr("hush"),))
    text = describe_server(Address("0.0.0.0", 9000), "it's", settings, FACTS)
    for part in (
        "http://127.0.0.1:9000\n",
        "it's (float32 on cpu, loaded in 1.2 s)",
        "16,000 tokens = 7.8 sequences of 2,048 tokens",
        "32 sequences at once, 512 requests waiting",
        "api_key=**********",
        "max_num_seqs=32",
    ):
        assert part in text
    assert "hush" not in text


@pytest.mark.parametrize(
    ("speculation", "row"),
    [
        (SpeculationFacts(policy="off"), "off"),
        (
            SpeculationFacts(policy="off", why_off="no drafter and no lookup"),
            "off: no drafter and no lookup",
        ),
        (SpeculationFacts(policy="goodput", lookup_drafts=8), "goodput: lookup (8 drafts)"),
        (
            SpeculationFacts(policy="fixed:3", drafter="D", block_size=8, lookup_drafts=4),
            "fixed:3: drafter D (blocks of 8); lookup (4 drafts)",
        ),
        (
            SpeculationFacts(
                policy="goodput",
                drafter="D",
                head="survival",
                block_size=16,
                widths=[4, 8, 16],
            ),
            "goodput: drafter D (blocks of 16, widths 4, 8, 16), head: survival",
        ),
        (
            SpeculationFacts(policy="fixed:7", drafter="D", block_size=8),
            "fixed:7: drafter D (blocks of 8)",
        ),
    ],
)
def test_it_says_how_drafts_are_made_or_why_not(speculation: SpeculationFacts, row: str) -> None:
    facts = msgspec.structs.replace(FACTS, speculation=speculation)
    text = describe_server(Address("127.0.0.1", 80), "m", ServerSettings(), facts)
    assert f"  speculation  {row}\n" in text


def test_the_curl_can_be_pasted() -> None:
    text = describe_server(Address("127.0.0.1", 80), "it's", ServerSettings(), FACTS)
    (line,) = (line for line in text.splitlines() if line.startswith("  curl "))
    words = shlex.split(line)
    assert words[:2] == ["curl", "http://127.0.0.1:80/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's"
    assert "Authorization" not in line


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:1"),
        ("::", "http://[::1]:1"),
        ("::1", "http://[::1]:1"),
        ("example.org", "http://example.org:1"),
    ],
)
def test_the_url_is_one_that_can_be_called(host: str, url: str) -> None:
    assert Address(host, 1).url == url
