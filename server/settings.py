"""Every setting of the server: flags over environment over a YAML file over defaults.

This is the only module that reads settings from the environment.
"""

import difflib
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import Field, SecretStr, ValidationError, field_validator
from pydantic_core import ErrorDetails
from pydantic_settings import (
    BaseSettings,
    InitSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from adaflash.engine.catalog import DEFAULT_MODEL
from adaflash.engine.config import (
    MAX_LOOKUP_DRAFTS,
    MAX_LOOKUP_STORE_TOKENS,
    EngineConfig,
    LearnConfig,
    Policy,
    SpeculationConfig,
    parse_policy,
)
from adaflash.engine.errors import ConfigError

ENV_PREFIX = "ADAFLASH_"
KEY_VARIABLE = "ADAFLASH_API_KEY"
NO_DRAFTER = "none"

# How long an OpenMP thread of the engine spins at a barrier before it sleeps, in libgomp's units.
# Its default never sleeps: then one thread pushed off its core makes every step ten times as long
# (docs/decisions/006-threads.md).
ENGINE_ENVIRONMENT = {"GOMP_SPINCOUNT": "10000"}


@dataclass(frozen=True)
class Flag:
    """How a setting shows in the help: its group and what stands for its value."""

    group: str
    metavar: str | None = None  # None: the choices of a Literal, or a switch


MODEL = "model"
ENGINE = "engine"
SPECULATION = "speculation"
LEARNING = "learning"
HTTP = "HTTP"
LOGS = "logs and files"


def default_cache_dir() -> Path:
    """Where fetched models go, by the XDG base directory rules."""
    root = os.environ.get("XDG_CACHE_HOME")
    return (Path(root) if root else Path.home() / ".cache") / "adaflash"


class ServerSettings(BaseSettings):
    """One field per flag; the description is its help."""

    model_config = SettingsConfigDict(
        env_prefix=ENV_PREFIX, env_ignore_empty=True, extra="forbid", frozen=True
    )

    model: Annotated[str, Flag(MODEL, "MODEL")] = Field(
        default=DEFAULT_MODEL,
        description="Catalog name, folder or GGUF file, or hub id (org/name, org/name:file.gguf).",
    )
    served_model_name: Annotated[tuple[str, ...], NoDecode, Flag(MODEL, "NAME")] = Field(
        default=(),
        description="Name that requests may use for the model; repeat for more, the first shows. "
        "Left out: a name made from MODEL.",
    )
    chat_template: Annotated[Path | None, Flag(MODEL, "PATH")] = Field(
        default=None, description="Jinja file to use instead of the model's own chat template."
    )
    dtype: Annotated[Literal["auto", "float32", "bfloat16", "float16"], Flag(MODEL)] = Field(
        default="auto", description="Number format of weights and K/V; auto chooses for the device."
    )
    device: Annotated[str, Flag(MODEL, "DEVICE")] = Field(
        default="auto", description="Where the model runs: auto, cpu, cuda, cuda:1, ..."
    )

    max_num_seqs: Annotated[int, Flag(ENGINE, "N")] = Field(
        default=64, description="Sequences that run at once; the rest wait."
    )
    max_batched_tokens: Annotated[int, Flag(ENGINE, "N")] = Field(
        default=256, description="Tokens of one step, prefill and decode together."
    )
    max_model_len: Annotated[int | None, Flag(ENGINE, "N")] = Field(
        default=None,
        ge=2,
        description="Tokens of prompt and output together; left out: the model's own.",
    )
    kv_cache_gib: Annotated[float | None, Flag(ENGINE, "GIB")] = Field(
        default=None, description="GiB of key/value pages; left out: chosen from the free memory."
    )
    page_size: Annotated[int, Flag(ENGINE, "N")] = Field(
        default=16, description="Tokens of one K/V page."
    )
    prefix_cache: Annotated[bool, Flag(ENGINE)] = Field(
        default=True, description="Reuse the K/V of prompts that begin alike."
    )
    num_threads: Annotated[int | None, Flag(ENGINE, "N")] = Field(
        default=None,
        ge=1,
        description="CPU threads of the engine; left out: chosen from the cores.",
    )

    drafter: Annotated[str, Flag(SPECULATION, "DRAFTER")] = Field(
        default=NO_DRAFTER,
        min_length=1,
        description="Folder or hub id (org/name) of the drafter made for the model; none: drafts "
        "are only looked up.",
    )
    speculation: Annotated[str, Flag(SPECULATION, "POLICY")] = Field(
        default="goodput",
        description="How many drafts to verify: off, fixed:K (K of them), threshold (as many as "
        "seem likely), or goodput (what gives the most tokens per second at this load).",
    )
    threshold_rate: Annotated[float, Flag(SPECULATION, "X")] = Field(
        default=1.3,
        gt=0,
        allow_inf_nan=False,
        description="Of threshold: the part of a block that seems likely is multiplied by this.",
    )
    threshold_min: Annotated[int, Flag(SPECULATION, "N")] = Field(
        default=1,
        ge=1,
        description="Of threshold: fewest tokens of a block, the newest known one included.",
    )
    threshold_ema: Annotated[float, Flag(SPECULATION, "X")] = Field(
        default=0.3,
        gt=0,
        le=1,
        description="Of threshold: weight of the newest step in the moving average; 1: no average.",
    )
    probe_every: Annotated[int, Flag(SPECULATION, "N")] = Field(
        default=64,
        ge=1,
        description="Steps without drafts before one drafts, to see whether it pays again.",
    )
    full_width_every: Annotated[int, Flag(SPECULATION, "N")] = Field(
        default=64,
        ge=1,
        description="Steps with drafts before one verifies whole blocks, for calibration.",
    )
    lookup_drafts: Annotated[int, Flag(SPECULATION, "N")] = Field(
        default=8,
        ge=0,
        le=MAX_LOOKUP_DRAFTS,
        description="Drafts of a request that are looked up in known text at most, which takes no "
        "drafter; 0: none.",
    )
    lookup_store_tokens: Annotated[int, Flag(SPECULATION, "N")] = Field(
        default=1_000_000,
        ge=0,
        le=MAX_LOOKUP_STORE_TOKENS,
        description="Tokens of recent replies, to all users, that are looked up in; 0: only the "
        "request's own text is. 32 to 60 bytes of memory each.",
    )

    learn: Annotated[Path | None, Flag(LEARNING, "DIR")] = Field(
        default=None,
        description="Keep the texts of finished requests in DIR, for adaflash train follow DIR, "
        "and use the drafters that it publishes there (the first of all, if there is no --drafter, "
        "at the next start). Requests with the header X-AdaFlash-Learn: off are not kept.",
    )
    learn_rate: Annotated[float, Flag(LEARNING, "X")] = Field(
        default=1.0, ge=0, le=1, description="Share of the texts that is kept."
    )
    learn_max_mib: Annotated[float, Flag(LEARNING, "MIB")] = Field(
        default=256,
        gt=0,
        allow_inf_nan=False,
        description="Size of the kept texts, in MiB; beyond it the oldest are deleted.",
    )
    learn_max_age_h: Annotated[float, Flag(LEARNING, "HOURS")] = Field(
        default=168, gt=0, allow_inf_nan=False, description="Hours after which texts are deleted."
    )
    learn_redact: Annotated[str | None, Flag(LEARNING, "MODULE:FUNCTION")] = Field(
        default=None,
        pattern=r"^[^:]+:[^:]+$",
        description="Function that sees each text before it is kept, as (token_ids, prompt_len), "
        "and returns as many token ids, or None to leave it out.",
    )

    host: Annotated[str, Flag(HTTP, "ADDRESS")] = Field(
        default="127.0.0.1", description="Address to listen on; 0.0.0.0 for every interface."
    )
    port: Annotated[int, Flag(HTTP, "PORT")] = Field(
        default=8000, ge=0, le=65535, description="Port to listen on; 0 for any free one."
    )
    api_key: Annotated[tuple[SecretStr, ...], NoDecode, Flag(HTTP, "KEY")] = Field(
        default=(),
        description="Key that requests must carry as a bearer token; repeat for more. Prefer "
        "ADAFLASH_API_KEY: other users of the machine can read flags.",
    )
    allowed_origins: Annotated[tuple[str, ...], NoDecode, Flag(HTTP, "ORIGIN")] = Field(
        default=(),
        description="Web origin whose pages may call the server (CORS); repeat for more.",
    )
    max_queued_requests: Annotated[int, Flag(HTTP, "N")] = Field(
        default=512,
        ge=1,
        description="Requests that may wait; beyond them new ones are answered 429.",
    )
    max_choices: Annotated[int, Flag(HTTP, "N")] = Field(
        default=16, ge=1, description="Largest `n` of a request."
    )
    max_body_mib: Annotated[float, Flag(HTTP, "MIB")] = Field(
        default=8, gt=0, allow_inf_nan=False, description="Largest request body, in MiB."
    )
    drain_timeout_s: Annotated[float, Flag(HTTP, "SECONDS")] = Field(
        default=30, ge=0, description="Seconds that requests in flight get to end after SIGTERM."
    )

    log_format: Annotated[Literal["text", "json"], Flag(LOGS)] = Field(
        default="text", description="Shape of a log line."
    )
    log_level: Annotated[Literal["debug", "info", "warning", "error"], Flag(LOGS)] = Field(
        default="info", description="Least severe messages to log."
    )
    access_log: Annotated[bool, Flag(LOGS)] = Field(
        default=True, description="One log line per request."
    )
    model_cache_dir: Annotated[Path, Flag(LOGS, "DIR")] = Field(
        default_factory=default_cache_dir, description="Where fetched models are kept."
    )
    config: Annotated[Path | None, Flag(LOGS, "FILE")] = Field(
        default=None, description="YAML file of settings, named as the flags with underscores."
    )

    @field_validator("served_model_name", "api_key", "allowed_origins", mode="before")
    @classmethod
    def _split_commas(cls, value: object) -> object:
        """An environment variable holds one string: `a,b` is two values."""
        if not isinstance(value, str):
            return value
        return tuple(part for part in (piece.strip() for piece in value.split(",")) if part)

    @field_validator("api_key", "served_model_name")
    @classmethod
    def _has_no_blanks(cls, values: tuple[str | SecretStr, ...]) -> tuple[str | SecretStr, ...]:
        """An empty key would let everybody in who sends an empty one."""
        for value in values:
            text = value.get_secret_value() if isinstance(value, SecretStr) else value
            if not text.strip():
                raise ValueError("must not be empty")
        return values

    @field_validator("speculation", mode="before")
    @classmethod
    def _is_a_policy(cls, value: object) -> object:
        if value is False:
            return Policy.OFF.value  # YAML reads the word `off` as false
        if isinstance(value, str):
            try:
                parse_policy(value)
            except ConfigError as error:
                raise ValueError(str(error)) from None
        return value

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Highest first."""
        path = init_settings().get("config") or env_settings().get("config")
        file_settings = InitSettingsSource(settings_cls, _read_yaml(Path(path)) if path else {})
        return (init_settings, env_settings, file_settings)

    @property
    def speculates(self) -> bool:
        """Whether a drafter is given and may be used."""
        return self.drafter != NO_DRAFTER and self.speculation != Policy.OFF

    def engine_config(self, model_path: Path, drafter_path: Path | None) -> EngineConfig:
        """The engine's share of the settings."""
        return EngineConfig(
            model_path=str(model_path),
            device=self.device,
            dtype=self.dtype,
            max_num_seqs=self.max_num_seqs,
            max_batched_tokens=self.max_batched_tokens,
            max_model_len=self.max_model_len,
            kv_cache_gib=self.kv_cache_gib,
            page_size=self.page_size,
            prefix_cache=self.prefix_cache,
            num_threads=self.num_threads,
            drafter_path=None if drafter_path is None else str(drafter_path),
            speculation=self._speculation_config(),
            cost_dir=str(self.model_cache_dir / "costs"),
            learn=self._learn_config(),
        )

    def _speculation_config(self) -> SpeculationConfig:
        policy, fixed_length = parse_policy(self.speculation)
        return SpeculationConfig(
            policy=policy,
            fixed_length=fixed_length,
            threshold_rate=self.threshold_rate,
            threshold_min=self.threshold_min,
            threshold_ema=self.threshold_ema,
            probe_every=self.probe_every,
            full_width_every=self.full_width_every,
            lookup_drafts=self.lookup_drafts,
            lookup_store_tokens=self.lookup_store_tokens,
        )

    def _learn_config(self) -> LearnConfig | None:
        if self.learn is None:
            return None
        return LearnConfig(
            folder=str(self.learn.expanduser().resolve()),
            rate=self.learn_rate,
            max_mib=self.learn_max_mib,
            max_age_h=self.learn_max_age_h,
            redact=self.learn_redact,
        )

    def changed(self) -> dict[str, object]:
        """The settings that are not at their defaults, secrets hidden: for people and logs."""
        return self.model_dump(mode="json", exclude_defaults=True)


def load_settings(flags: Mapping[str, object]) -> ServerSettings:
    """Settings from `flags` (by field name), the environment and the YAML file.

    Raises ConfigError, in one line, for unknown names, bad values and values that cannot work
    together, before anything is fetched or started.
    """
    _refuse_unknown_variables(os.environ)
    if os.environ.get(KEY_VARIABLE) == "":
        raise ConfigError(f"{KEY_VARIABLE} is set but empty: unset it to serve without a key")
    try:
        settings = ServerSettings.model_validate(dict(flags))
    except ValidationError as error:
        raise ConfigError(_explain(error.errors()[0], flags)) from None
    settings.engine_config(Path(settings.model), None).check()
    return settings


def engine_environment() -> dict[str, str]:
    """The environment of the engine process: ours, and what ours leaves open."""
    return ENGINE_ENVIRONMENT | dict(os.environ)


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of a refusal: the known name that was probably meant, if any."""
    matches = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def _refuse_unknown_variables(environment: Iterable[str]) -> None:
    known = [ENV_PREFIX + name.upper() for name in ServerSettings.model_fields]
    for name in sorted(environment):
        if name.upper().startswith(ENV_PREFIX) and name.upper() not in known:
            raise ConfigError(f"unknown environment variable {name}{nearest(name.upper(), known)}")


def _read_yaml(path: Path) -> dict[str, object]:
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the settings in {path}: {error.strerror}") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(f"the settings in {path} are not YAML: {reason}") from None
    if not isinstance(content, dict | None):
        raise ConfigError(f"the settings in {path} must be `name: value` lines")
    settings = {str(name): value for name, value in (content or {}).items()}
    for name in settings:
        if name not in ServerSettings.model_fields or name == "config":
            known = nearest(name, ServerSettings.model_fields)
            raise ConfigError(f"unknown setting {name!r} in {path}{known}")
    return settings


def _explain(problem: ErrorDetails, flags: Mapping[str, object]) -> str:
    """One line for one bad value, saying where it was given."""
    name = str(problem["loc"][0])
    if name in flags:
        where = "--" + name.replace("_", "-")
    elif ENV_PREFIX + name.upper() in os.environ:
        where = ENV_PREFIX + name.upper()
    else:
        where = f"{name} in the settings file"
    given = "" if name == "api_key" else f", not {problem['input']!r}"
    message = problem["msg"].removeprefix("Value error, ").removesuffix(given)
    return f"{where}: {message[0].lower()}{message[1:]}{given}"
