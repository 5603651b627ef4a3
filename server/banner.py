"""What the server prints once it is ready, and nothing else."""

import json
import shlex
from dataclasses import dataclass

from adaflash import __version__
from adaflash.engine.messages import EngineFacts, SpeculationFacts
from adaflash.server.settings import ServerSettings

ANY_ADDRESS = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # listened on, and how to reach it from here


@dataclass(frozen=True)
class Address:
    """Where the server listens."""

    host: str
    port: int  # the real one, also when port 0 was asked for

    @property
    def url(self) -> str:
        """How a client on this machine reaches it."""
        host = ANY_ADDRESS.get(self.host, self.host)
        return f"http://[{host}]:{self.port}" if ":" in host else f"http://{host}:{self.port}"


def describe_server(
    address: Address, model_name: str, settings: ServerSettings, facts: EngineFacts
) -> str:
    """The lines that say where the server is, what it runs and how to try it."""
    capacity, length = facts.kv_capacity_tokens, facts.max_model_len
    at_once = capacity / length
    changed = [f"{name}={_plain(value)}" for name, value in settings.changed().items()]
    rows = {
        "model": f"{model_name} ({facts.dtype} on {facts.device}, loaded in {facts.load_s:.1f} s)",
        "engine": f"attention: {facts.attention}; CPU threads: {facts.num_threads}",
        "speculation": _speculation(facts.speculation),
        "KV cache": f"{capacity:,} tokens = {at_once:.1f} sequences of {length:,} tokens",
        "concurrency": f"{settings.max_num_seqs} sequences at once, "
        f"{settings.max_queued_requests} requests waiting",
        "settings": ", ".join(changed) or "all at their defaults",
    }
    table = "\n".join(f"  {name:<13}{text}" for name, text in rows.items())
    curl = _curl(address, model_name, with_key=bool(settings.api_key))
    return f"AdaFlash {__version__} is ready on {address.url}\n{table}\n\nTry it:\n{curl}\n"


def _speculation(facts: SpeculationFacts) -> str:
    sources = [_drafter(facts)] if facts.drafter is not None else []
    if facts.lookup_drafts:
        sources.append(f"lookup ({facts.lookup_drafts} drafts)")
    if not sources:
        return f"off: {facts.why_off}" if facts.why_off else "off"
    return f"{facts.policy}: {'; '.join(sources)}"


def _drafter(facts: SpeculationFacts) -> str:
    blocks = f"blocks of {facts.block_size}"
    if facts.widths:
        blocks += f", widths {', '.join(map(str, facts.widths))}"
    head = f", head: {facts.head}" if facts.head else ""
    return f"drafter {facts.drafter} ({blocks}){head}"


def _curl(address: Address, model_name: str, *, with_key: bool) -> str:
    body = {"model": model_name, "messages": [{"role": "user", "content": "Say hello."}]}
    key = ' -H "Authorization: Bearer $ADAFLASH_API_KEY"' if with_key else ""
    return (
        f"  curl {address.url}/v1/chat/completions{key} "
        f"-H 'Content-Type: application/json' -d {shlex.quote(json.dumps(body))}"
    )


def _plain(value: object) -> str:
    return ",".join(map(str, value)) if isinstance(value, list) else str(value)
