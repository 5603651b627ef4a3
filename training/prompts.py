"""Prompts to answer, from JSONL files: `prompt`, or `messages` as chat APIs have them."""

import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from adaflash.engine.errors import ConfigError
from adaflash.server.tokenizer import Tokenizer


@dataclass(frozen=True)
class Prompt:
    """One line of a file."""

    prompt_id: str  # unique within its file; left out: the line number
    domain: str  # left out: the file's name
    messages: tuple[dict[str, str], ...]

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """As the server would send it to the engine. Raises ConfigError without a template."""
        if tokenizer.chat_template is None:
            raise ConfigError("the model has no chat template: its prompts cannot be rendered")
        text = tokenizer.chat_template.render([dict(message) for message in self.messages])
        return tokenizer.encode(text, add_special_tokens=False)


def read_prompts(paths: Iterable[Path]) -> list[Prompt]:
    """All prompts, file by file. Raises ConfigError that names file and line."""
    return [prompt for path in paths for prompt in _read(path)]


def interleave(prompts: Iterable[Prompt], seed: int) -> list[Prompt]:
    """Shuffled so that every domain runs evenly through the whole list.

    So whatever is done when time runs out is as balanced as the prompts are.
    """
    draw = random.Random(seed)
    by_domain: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_domain.setdefault(prompt.domain, []).append(prompt)
    placed = []
    for domain in sorted(by_domain):
        own = by_domain[domain]
        draw.shuffle(own)
        placed += [((n + 0.5) / len(own), domain, n, prompt) for n, prompt in enumerate(own)]
    return [prompt for _, _, _, prompt in sorted(placed, key=lambda item: item[:3])]


def _read(path: Path) -> list[Prompt]:
    try:
        # Not splitlines: JSON strings may hold other line ends, such as U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from None
    return [
        _parse(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()
    ]


def _parse(line: str, path: Path, number: int) -> Prompt:
    where = f"{path}, line {number}"
    try:
        content = json.loads(line)
    except ValueError as error:
        raise ConfigError(f"{where} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{where} is no JSON object")
    messages = content.get("messages")
    if messages is None and isinstance(content.get("prompt"), str):
        messages = [{"role": "user", "content": content["prompt"]}]
    if not isinstance(messages, list) or not messages or not all(map(_is_message, messages)):
        raise ConfigError(f"{where} needs a `prompt` or a list of `messages` with role and content")
    stem = path.name.split(".")[0]
    return Prompt(
        prompt_id=f"{stem}/{content.get('id', number)}",
        domain=str(content.get("domain", stem)),
        messages=tuple({"role": m["role"], "content": m["content"]} for m in messages),
    )


def _is_message(message: object) -> bool:
    return (
        isinstance(message, dict)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    )
