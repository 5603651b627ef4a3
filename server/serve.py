"""Runs the server: find the model, start the engine, listen, and drain when told to stop."""

import asyncio
import gc
import signal
import socket
from collections.abc import Callable
from pathlib import Path

from uvicorn.loops.auto import auto_loop_factory

from adaflash.engine.errors import ConfigError
from adaflash.server.app import create_app
from adaflash.server.banner import Address, describe_server
from adaflash.server.context import AppContext, AppOptions
from adaflash.server.draining import DrainingServer
from adaflash.server.engine_process import EngineProcess
from adaflash.server.lifecycle import Lifecycle
from adaflash.server.listener import bind, listen
from adaflash.server.logs import configure_logging
from adaflash.server.metrics import Metrics
from adaflash.server.model_files import find_drafter, find_model, served_names
from adaflash.server.settings import ServerSettings, engine_environment
from adaflash.server.speculation_log import SpeculationLog
from adaflash.server.tokenizer import Tokenizer, load_tokenizer

MIB = 2**20


def run_server(settings: ServerSettings) -> None:
    """Serve until SIGTERM or SIGINT, then drain; returns once everything has stopped.

    Raises CheckpointError, ConfigError or EngineError when the server cannot start, and
    KeyboardInterrupt when it is told to stop before it is ready, or twice.
    """
    configure_logging(settings)
    with bind(settings.host, settings.port) as listener:
        model_path = find_model(settings)
        drafter_path = find_drafter(settings)
        try:
            with asyncio.Runner(loop_factory=auto_loop_factory()) as runner:
                drained = runner.run(_serve(settings, model_path, drafter_path, listener))
        except asyncio.CancelledError:
            drained = False
    if not drained:
        raise KeyboardInterrupt


async def _serve(
    settings: ServerSettings, model_path: Path, drafter_path: Path | None, listener: socket.socket
) -> bool:
    """Returns whether all work in flight had its time to end."""
    starting = asyncio.current_task()
    assert starting is not None
    _on_signals(starting.cancel)
    names = served_names(settings)
    tokenizer = read_tokenizer(settings, model_path)
    metrics = Metrics(names[0])
    config = settings.engine_config(model_path, drafter_path)
    engine = EngineProcess(
        config,
        (metrics, SpeculationLog(config.speculation.probe_every)),
        max_queued_requests=settings.max_queued_requests,
        environment=engine_environment(),
    )
    lifecycle = Lifecycle()
    context = AppContext(engine, tokenizer, metrics, lifecycle, app_options(settings, names))

    def announce() -> None:
        address = Address(settings.host, listener.getsockname()[1])
        print(describe_server(address, names[0], settings, engine.facts), flush=True)
        # What is there by now stays for good: the garbage collector need not look at it again.
        gc.collect()
        gc.freeze()

    server = DrainingServer(
        create_app(context),
        lifecycle,
        abort_work=engine.abort_all,
        drain_timeout_s=settings.drain_timeout_s,
        on_listening=announce,
    )
    await engine.start()
    try:
        listen(listener)
        _on_signals(server.stop)
        await server.serve(sockets=[listener])
    finally:
        await engine.close()
    return not server.was_hurried


def read_tokenizer(settings: ServerSettings, model_path: Path) -> Tokenizer:
    """The model's tokenizer, with the chat template of the settings. Raises ConfigError."""
    tokenizer = load_tokenizer(model_path)
    if settings.chat_template is None:
        return tokenizer
    try:
        source = settings.chat_template.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template: {error}") from None
    return tokenizer.with_chat_template(source)


def app_options(settings: ServerSettings, names: tuple[str, ...]) -> AppOptions:
    """The app's share of the settings."""
    return AppOptions(
        served_model_names=names,
        api_keys=tuple(key.get_secret_value() for key in settings.api_key),
        allowed_origins=settings.allowed_origins,
        max_body_bytes=round(settings.max_body_mib * MIB),
        max_choices=settings.max_choices,
    )


def _on_signals(handler: Callable[[], object]) -> None:
    """Call `handler` at SIGINT and SIGTERM, instead of what was called until now."""
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, handler)
