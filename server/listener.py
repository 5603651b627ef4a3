"""The server's socket: taken before the model loads, opened when requests can be answered."""

import errno
import socket

from adaflash.engine.errors import ConfigError


def bind(host: str, port: int) -> socket.socket:
    """A socket that has the address but refuses connections still. Raises ConfigError."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from None
    return listener


def listen(listener: socket.socket) -> None:
    """Let connections in. Raises ConfigError if another server on the address was quicker."""
    host, port = listener.getsockname()[:2]
    try:
        listener.listen()
    except OSError as error:
        raise _unusable(host, port, error) from None


def _unusable(host: str, port: int, error: OSError) -> ConfigError:
    if error.errno == errno.EADDRINUSE:
        return ConfigError(f"{host}:{port} is already in use")
    return ConfigError(f"cannot listen on {host}:{port}: {error.strerror}")
