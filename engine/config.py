"""How the engine is set up: checked by `check`, never changed."""

import enum
import math

import msgspec

from adaflash.engine.errors import ConfigError

MAX_LOOKUP_DRAFTS = 32
MAX_LOOKUP_STORE_TOKENS = 2**27  # 4 GiB of memory
DTYPES = ("auto", "float32", "bfloat16", "float16")


class Policy(enum.StrEnum):
    """How long the verified part of each drafted block is; engine/speculation/budget.py."""

    OFF = "off"  # plain decoding
    FIXED = "fixed"  # the same length for all
    THRESHOLD = "threshold"  # the published rule: a share of the block, as the head sees it
    GOODPUT = "goodput"  # what gives the most tokens per second over all requests together


class SpeculationConfig(msgspec.Struct, frozen=True, kw_only=True):
    """When to draft, and how much of it to verify."""

    policy: Policy = Policy.GOODPUT
    fixed_length: int | None = None  # drafts; with Policy.FIXED
    threshold_rate: float = 1.3  # the head's share of the block is multiplied by this
    threshold_min: int = 1  # tokens, the newest one included: 1 may verify no draft
    threshold_ema: float = 0.3  # weight of the newest share; 1 = no smoothing
    probe_every: int = 64  # steps without drafting, then one drafts to see whether it pays
    full_width_every: int = 64  # drafting steps, then one verifies whole blocks, for calibration
    lookup_drafts: int = 8  # drafts of a request that are looked up in known text at most; 0: none
    lookup_store_tokens: int = 1_000_000  # of recent replies to all; 0: only the request's own text

    def check(self) -> None:
        """Raise ConfigError for values out of range."""
        if (self.fixed_length is None) == (self.policy is Policy.FIXED):
            raise ConfigError("a fixed length goes with the policy fixed, and only with it")
        for name in ("fixed_length", "threshold_min", "probe_every", "full_width_every"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name} must be at least 1, not {value}")
        for name, most in (
            ("lookup_drafts", MAX_LOOKUP_DRAFTS),
            ("lookup_store_tokens", MAX_LOOKUP_STORE_TOKENS),
        ):
            if not 0 <= getattr(self, name) <= most:
                raise ConfigError(f"{name} must be 0 to {most}, not {getattr(self, name)}")
        if not 0 < self.threshold_rate < math.inf:
            raise ConfigError(
                f"threshold_rate must be a positive number, not {self.threshold_rate}"
            )
        if not 0 < self.threshold_ema <= 1:
            raise ConfigError(
                f"threshold_ema must be above 0 and at most 1, not {self.threshold_ema}"
            )


def parse_policy(text: str) -> tuple[Policy, int | None]:
    """The policy that a setting names, and its length: `off`, `fixed:K`, `threshold`, `goodput`.

    Raises ConfigError.
    """
    name, colon, length = text.partition(":")
    if name in tuple(Policy) and name != Policy.FIXED and not colon:
        return Policy(name), None
    if name == Policy.FIXED and length.isascii() and length.isdigit() and int(length) > 0:
        return Policy.FIXED, int(length)
    raise ConfigError(
        f"speculation must be off, threshold, goodput, or fixed:K with K drafts, not {text!r}"
    )


class LearnConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Where served texts are kept for training, how many, and where newer drafters come from."""

    folder: str
    rate: float = 1.0  # share of the finished requests that is kept
    max_mib: float = 256.0  # of the kept texts; beyond it the oldest go
    max_age_h: float = 168.0  # hours; older texts go
    redact: str | None = None  # MODULE:FUNCTION; see engine/learning/redaction.py

    def check(self) -> None:
        """Raise ConfigError for values out of range."""
        if not 0 <= self.rate <= 1:
            raise ConfigError(f"learn_rate must be between 0 and 1, not {self.rate}")
        for name in ("max_mib", "max_age_h"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"learn_{name} must be a positive number, not {value}")


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
    drafter_path: str | None = None  # a local folder with a drafter's checkpoint
    speculation: SpeculationConfig = SpeculationConfig()
    cost_dir: str | None = None  # where measured step costs are kept from one start to the next
    learn: LearnConfig | None = None  # None: no text is kept

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
        self.speculation.check()
        if self.learn is not None:
            self.learn.check()
