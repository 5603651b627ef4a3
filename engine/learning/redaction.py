"""A hook of the operator's that sees each text before it is written to disk."""

import importlib
from collections.abc import Callable

from adaflash.engine.errors import ConfigError

# (token ids of prompt and answer, tokens of the prompt) to as many token ids, of which some may be
# replaced, or None: leave the text out.
Redact = Callable[[list[int], int], list[int] | None]


def find_hook(name: str) -> Redact:
    """The function MODULE:FUNCTION. Raises ConfigError: without it nothing must be kept."""
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ConfigError(f"learn_redact must be MODULE:FUNCTION, not {name!r}")
    try:
        hook: object = importlib.import_module(module_name)
        for part in function_name.split("."):
            hook = getattr(hook, part)
    except Exception as error:  # whatever the module does when it is imported
        raise ConfigError(f"cannot use learn_redact {name}: {error}") from error
    if not callable(hook):
        raise ConfigError(f"learn_redact {name} is not callable")
    return hook
