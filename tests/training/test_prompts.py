"""Prompts from files, and in which order they are answered."""

from pathlib import Path

import pytest

from adaflash.engine.errors import ConfigError
from adaflash.server.tokenizer import load_tokenizer
from adaflash.training.prompts import Prompt, interleave, read_prompts
from tests.tiny_model import write_tiny_model


def written(folder: Path, *lines: str) -> Path:
    path = folder / "some.train.jsonl"
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_prompts_and_messages(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        '{"id": "a", "domain": "math", "prompt": "1 + 1?", "reference": "2"}',
        "",
        '{"messages": [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]}',
    )
    first, second = read_prompts([path])
    assert first == Prompt("some/a", "math", ({"role": "user", "content": "1 + 1?"},))
    assert (second.prompt_id, second.domain, len(second.messages)) == ("some/3", "some", 2)


def test_other_line_ends_inside_a_text_do_not_cut_it(tmp_path: Path) -> None:
    (prompt,) = read_prompts([written(tmp_path, '{"prompt": "one\u2028two\x85three"}')])
    assert prompt.messages[0]["content"] == "one\u2028two\x85three"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1 is not JSON"),
        ("[]", "line 1 is no JSON object"),
        ("{}", "line 1 needs a `prompt`"),
        ('{"messages": []}', "needs a `prompt`"),
        ('{"messages": [{"role": "user"}]}', "needs a `prompt`"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read_prompts([written(tmp_path, line)])


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        read_prompts([tmp_path / "none.jsonl"])


def test_every_part_of_the_order_is_balanced() -> None:
    prompts = [Prompt(f"{n}", "few" if n < 10 else "many", ()) for n in range(110)]
    ordered = interleave(prompts, seed=3)
    assert sorted(p.prompt_id for p in ordered) == sorted(p.prompt_id for p in prompts)
    for start in range(0, 110, 22):
        few = sum(p.domain == "few" for p in ordered[start : start + 22])
        assert few == 2
    assert interleave(prompts, seed=3) == ordered
    assert interleave(prompts, seed=4) != ordered


def test_prompts_are_rendered_as_the_server_renders_them(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_tiny_model(tmp_path / "model"))
    prompt = Prompt("a", "d", ({"role": "user", "content": "hi"},))
    text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt.token_ids(tokenizer) == tokenizer.encode(text, add_special_tokens=False)
