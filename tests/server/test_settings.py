"""Flags over environment over file over defaults; whatever is unknown or wrong is refused."""

import os
from pathlib import Path
from typing import get_args

import pytest

from adaflash.engine.config import DTYPES, EngineConfig, LearnConfig, Policy, SpeculationConfig
from adaflash.engine.errors import ConfigError
from adaflash.server.settings import ServerSettings, load_settings


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("ADAFLASH_"):
            monkeypatch.delenv(name)


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "server.yaml"
    path.write_text("port: 1\nmax_num_seqs: 11\nserved_model_name: [yaml, file]\n")
    return path


def test_defaults_are_the_engine_s() -> None:
    """Both classes state them, each for its own readers."""
    settings = load_settings({})
    cost_dir = str(settings.model_cache_dir / "costs")
    config = EngineConfig(model_path="m", cost_dir=cost_dir)
    assert settings.engine_config(Path("m"), None) == config
    assert get_args(ServerSettings.model_fields["dtype"].annotation) == DTYPES
    assert settings.changed() == {}


def test_flags_win_over_environment_over_file(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAFLASH_PORT", "2")
    monkeypatch.setenv("ADAFLASH_MAX_NUM_SEQS", "22")
    settings = load_settings({"config": str(config_file), "port": "3"})
    assert (settings.port, settings.max_num_seqs) == (3, 22)
    assert settings.served_model_name == ("yaml", "file")
    assert settings.page_size == 16


def test_the_file_can_be_named_in_the_environment(
    config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ADAFLASH_CONFIG", str(config_file))
    assert load_settings({}).port == 1


def test_lists_from_every_source(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAFLASH_SERVED_MODEL_NAME", "a, b,")
    assert load_settings({}).served_model_name == ("a", "b")
    assert load_settings({"served_model_name": ["c,d"]}).served_model_name == ("c,d",)


def test_an_empty_variable_is_not_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAFLASH_MAX_MODEL_LEN", "")
    assert load_settings({}).max_model_len is None


def test_the_cache_follows_xdg(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert load_settings({}).model_cache_dir == Path("/somewhere/adaflash")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert load_settings({}).model_cache_dir == Path.home() / ".cache/adaflash"


def test_every_engine_setting_arrives() -> None:
    config = EngineConfig(
        model_path="m",
        device="cpu",
        dtype="float32",
        max_num_seqs=3,
        max_batched_tokens=5,
        max_model_len=7,
        kv_cache_gib=0.5,
        page_size=8,
        prefix_cache=False,
        num_threads=2,
        drafter_path="d",
        speculation=SpeculationConfig(
            policy=Policy.FIXED,
            fixed_length=7,
            threshold_rate=1.5,
            threshold_min=2,
            threshold_ema=0.5,
            probe_every=9,
            full_width_every=11,
            lookup_drafts=3,
            lookup_store_tokens=5000,
        ),
        cost_dir="/somewhere/costs",
        learn=LearnConfig(
            folder="/texts", rate=0.5, max_mib=3, max_age_h=2, redact="module:function"
        ),
    )
    speculation = config.speculation
    own = ("model_path", "drafter_path", "speculation", "cost_dir", "learn")
    flags = {name: getattr(config, name) for name in config.__struct_fields__ if name not in own}
    flags |= {name: getattr(speculation, name) for name in speculation.__struct_fields__[2:]}
    assert config.learn is not None
    names = config.learn.__struct_fields__[1:]
    flags |= {f"learn_{name}": getattr(config.learn, name) for name in names}
    flags |= {"speculation": "fixed:7", "model_cache_dir": "/somewhere", "learn": "/texts"}
    assert load_settings(flags).engine_config(Path("m"), Path("d")) == config


@pytest.mark.parametrize(
    ("word", "policy"),
    [("off", Policy.OFF), ("threshold", Policy.THRESHOLD), ("goodput", Policy.GOODPUT)],
)
def test_every_policy_can_be_had_from_every_source(
    word: str, policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """YAML reads a bare `off` as false."""
    path = tmp_path / "settings.yaml"
    path.write_text(f"speculation: {word}")
    flags: list[dict[str, object]] = [{"speculation": word}, {"config": str(path)}]
    for given in flags:
        config = load_settings(given).engine_config(Path("m"), None)
        assert config.speculation.policy is policy
    monkeypatch.setenv("ADAFLASH_SPECULATION", word)
    assert load_settings({}).speculation == word


def test_a_drafter_is_of_use_unless_speculation_is_off() -> None:
    assert load_settings({"drafter": "d"}).speculates
    assert not load_settings({"drafter": "d", "speculation": "off"}).speculates
    assert not load_settings({}).speculates


def test_secrets_are_not_shown() -> None:
    settings = load_settings({"api_key": ["hush"], "port": "9"})
    assert [key.get_secret_value() for key in settings.api_key] == ["hush"]
    assert settings.changed() == {"api_key": ["**********"], "port": 9}
    assert "hush" not in repr(settings)


@pytest.mark.parametrize("name", ["ADAFLASH_PROT", "adaflash_prot"])
def test_unknown_variables_are_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, "1")
    with pytest.raises(ConfigError, match=f"{name}; did you mean ADAFLASH_PORT?"):
        load_settings({})


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("max-num-seqs: 3", "unknown setting 'max-num-seqs' in .*; did you mean max_num_seqs?"),
        ("zzz: 3", "unknown setting 'zzz' in "),
        ("- port", "must be `name: value` lines"),
        ("port: [", "are not YAML"),
        ("port: x", "port in the settings file: input should be a valid integer.* not 'x'"),
        ("speculation: on", "speculation in the settings file: input should be .*, not True"),
        ("speculation: fast", "speculation in the settings file: speculation must be .* 'fast'"),
    ],
)
def test_bad_files_are_refused(content: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text(content)
    with pytest.raises(ConfigError, match=message):
        load_settings({"config": str(path)})


def test_an_empty_file_changes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "server.yaml"
    path.write_text("# nothing yet\n")
    assert load_settings({"config": path}).changed() == {"config": str(path)}


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the settings in .*absent"):
        load_settings({"config": str(tmp_path / "absent")})


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"port": "x"}, "--port: input should be a valid integer"),
        ({"port": "70000"}, "--port: input should be less than or equal to 65535, not '70000'"),
        ({"dtype": "int3"}, "--dtype: input should be 'auto', 'float32'"),
        ({"kv_cache_gib": "nan"}, "kv_cache_gib must be a positive number"),
        ({"max_body_mib": "inf"}, "--max-body-mib: input should be a finite number"),
        ({"page_size": "0"}, "page_size must be at least 1"),
        (
            {"speculation": "fast"},
            "^--speculation: speculation must be off, threshold, .* fixed:K .* drafts, not 'fast'$",
        ),
        ({"speculation": "fixed"}, "^--speculation: .*, not 'fixed'$"),
        ({"speculation": "fixed:0"}, "^--speculation: .*, not 'fixed:0'$"),
        ({"speculation": "fixed:" + "9" * 5000}, "^--speculation: "),
        ({"speculation": "off:1"}, "^--speculation: .*, not 'off:1'$"),
        ({"speculation": ""}, "^--speculation: .*, not ''$"),
        ({"drafter": ""}, "^--drafter: string should have at least 1 character, not ''$"),
        ({"lookup_drafts": "33"}, "^--lookup-drafts: input should be less than or equal to 32"),
        ({"lookup_store_tokens": "-1"}, "^--lookup-store-tokens: input should be greater than"),
        ({"threshold_rate": "0"}, "^--threshold-rate: input should be greater than 0, not '0'$"),
        ({"threshold_rate": "inf"}, "^--threshold-rate: input should be a finite number"),
        ({"threshold_min": "0"}, "^--threshold-min: input should be greater than or equal to 1"),
        ({"threshold_ema": "0"}, "^--threshold-ema: input should be greater than 0"),
        ({"threshold_ema": "1.5"}, "^--threshold-ema: input should be less than or equal to 1"),
        ({"threshold_ema": "nan"}, "^--threshold-ema: "),
        ({"probe_every": "0"}, "^--probe-every: input should be greater than or equal to 1"),
        ({"full_width_every": "x"}, "^--full-width-every: input should be a valid integer"),
        ({"learn_rate": "1.5"}, "^--learn-rate: input should be less than or equal to 1"),
        ({"learn_max_mib": "0"}, "^--learn-max-mib: input should be greater than 0"),
        ({"learn_max_age_h": "nan"}, "^--learn-max-age-h: "),
        ({"learn_redact": "module"}, "^--learn-redact: "),
        ({"max_num_seqs": "512"}, r"max_batched_tokens \(256\) must be at least max_num_seqs"),
    ],
)
def test_bad_values_are_refused(flags: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_settings(flags)


def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ADAFLASH_DRAIN_TIMEOUT_S", "-1")
    with pytest.raises(ConfigError, match=r"^ADAFLASH_DRAIN_TIMEOUT_S: input should be greater"):
        load_settings({})
    monkeypatch.delenv("ADAFLASH_DRAIN_TIMEOUT_S")
    monkeypatch.setenv("ADAFLASH_SPECULATION", "fixed:x")
    with pytest.raises(ConfigError, match=r"^ADAFLASH_SPECULATION: .*, not 'fixed:x'$"):
        load_settings({})


@pytest.mark.parametrize("key", ["", "  "])
def test_an_empty_key_is_refused_from_every_source(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would let everybody in who sends an empty one, or nobody would notice that it is gone."""
    with pytest.raises(ConfigError, match="must not be empty"):
        load_settings({"api_key": ["good", key]})
    path = tmp_path / "settings.yaml"
    path.write_text(f"api_key: ['{key}']")
    with pytest.raises(ConfigError, match="must not be empty"):
        load_settings({"config": str(path)})
    monkeypatch.setenv("ADAFLASH_API_KEY", "")
    with pytest.raises(ConfigError, match="set but empty"):
        load_settings({})


def test_a_settings_file_cannot_name_another(tmp_path: Path) -> None:
    path = tmp_path / "settings.yaml"
    path.write_text("config: other.yaml")
    with pytest.raises(ConfigError, match="unknown setting 'config'"):
        load_settings({"config": str(path)})
