"""The app around a fake engine and a real byte-level tokenizer, called in process."""

from dataclasses import dataclass, field

import httpx
from fastapi import FastAPI

from adaflash.server.app import create_app
from adaflash.server.context import AppContext, AppOptions
from adaflash.server.fake_engine import FakeEngineClient
from adaflash.server.lifecycle import Lifecycle
from adaflash.server.metrics import Metrics
from adaflash.server.tokenizer import Tokenizer, TokenizerFacts
from tests.tiny_model import CHAT_TEMPLATE, tiny_tokenizer

HELLO = [{"role": "user", "content": "Hello!"}]


def tokenizer(template: str | None = CHAT_TEMPLATE) -> Tokenizer:
    facts = TokenizerFacts("<|im_start|>", "<|im_end|>", template)
    return Tokenizer(tiny_tokenizer(), facts)


@dataclass
class Served:
    """An app and the parts that a test may want to look at or change."""

    options: AppOptions = field(default_factory=lambda: AppOptions(("tiny", "alias")))
    engine: FakeEngineClient = field(default_factory=FakeEngineClient)
    lifecycle: Lifecycle = field(default_factory=Lifecycle)
    tokenizer: Tokenizer = field(default_factory=tokenizer)
    metrics: Metrics = field(default_factory=lambda: Metrics("tiny"))

    def app(self) -> FastAPI:
        return create_app(
            AppContext(self.engine, self.tokenizer, self.metrics, self.lifecycle, self.options)
        )

    def client(self) -> httpx.AsyncClient:
        transport = httpx.ASGITransport(self.app(), raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://tiny")

    def metric(self, name: str, **labels: str) -> float:
        value = self.metrics.registry.get_sample_value(name, {"model_name": "tiny", **labels})
        assert value is not None, f"no series {name} {labels}"
        return value
