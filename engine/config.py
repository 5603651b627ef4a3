"""How the engine is set up: checked by `check`, never changed."""

import math

import msgspec

from adaflash.engine.errors import ConfigError

DTYPES = ("auto", "float32", "bfloat16", "float16")


class EngineConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of one engine process. None means "decide from the model and the machine"."""

    model_path: str  # a local Hugging Face folder or GGUF file (engine/catalog.py finds it)
    device: str = "auto"  # "auto", "cpu", "cuda", "cuda:1", ...
    dtype: str = "auto"  # one of DTYPES
    max_num_seqs: int = 64  # sequences that run at once
    max_batched_tokens: int = 256  # tokens of one step, prefill and decode together
    max_model_len: int | None = None  # tokens, prompt and output together
    kv_cache_gib: float | None = None  # GiB of key/value pages
    page_size: int = 16  # tokens
    prefix_cache: bool = True
    num_threads: int | None = None  # CPU threads of the engine process

    def check(self) -> None:
        """Raise ConfigError for values that cannot work together."""
        if self.dtype not in DTYPES:
            raise ConfigError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        for name in ("max_num_seqs", "max_batched_tokens", "page_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.max_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_num_seqs "
                f"({self.max_num_seqs}): every running sequence needs one token of a step"
            )
        if self.kv_cache_gib is not None and not 0 < self.kv_cache_gib < math.inf:
            raise ConfigError(f"kv_cache_gib must be a positive number, not {self.kv_cache_gib}")
