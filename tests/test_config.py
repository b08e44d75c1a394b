"""Settings: who wins, what is refused, and how it is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.config_docs import reference
from slipstream.config import GROUPS, EngineConfig, env_name, field_group, flag_name
from slipstream.config_sources import load_config, unknown_variables
from slipstream.errors import ConfigError

ROOT = Path(__file__).parent.parent


def test_flags_beat_variables_beat_file_beats_defaults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "slipstream.toml"
    file.write_text("page_size = 2\nmax_num_seqs = 2\nlag = 0\n")
    monkeypatch.setenv("SLIPSTREAM_PAGE_SIZE", "3")
    monkeypatch.setenv("SLIPSTREAM_MAX_NUM_SEQS", "3")
    config = load_config({"page_size": "4"}, str(file))
    assert (config.page_size, config.max_num_seqs, config.lag) == (4, 3, 0)
    assert config.max_num_batched_tokens == EngineConfig().max_num_batched_tokens


def test_the_file_may_be_named_by_a_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.toml").write_text("page_size = 2")
    (tmp_path / "b.toml").write_text("page_size = 3")
    monkeypatch.setenv("SLIPSTREAM_CONFIG", str(tmp_path / "a.toml"))
    assert load_config({}).page_size == 2
    assert load_config({}, str(tmp_path / "b.toml")).page_size == 3


def test_every_setting_can_be_said_in_every_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One value other than the default for each field: as text, as flags and variables are, and as the file's own type."""
    other: dict[str, Any] = {}
    for name, field in EngineConfig.model_fields.items():
        default = field.default
        if isinstance(default, bool):
            other[name] = not default
        elif name in ("lag", "num_pages", "page_size", "port", "max_model_len", "num_threads"):
            other[name] = 0 if name == "lag" else 7
        elif isinstance(default, (int, float)):
            other[name] = default + 1
    other |= {"model": "m", "served_model_name": "s", "dtype": "float16", "device": "cpu", "generation_config": "none"}
    other |= {"speculate": ["a:b=1,c=2", "off"], "attention_backend": "reference", "logprobs_mode": "processed"}
    other |= {"quantization": "q8", "cpu_kernels": "exact", "kv_cache_dtype": "bfloat16"}
    other |= {"accept": "rejection", "scheduling_policy": "cache-aware", "host": "::1", "api_key": "k", "log_level": "debug"}
    left_out = set(EngineConfig.model_fields) - set(other)
    assert left_out == {"kv_cache_memory_bytes"}  # it excludes num_pages

    expected = EngineConfig(**other)
    assert all(getattr(expected, name) != field.default for name, field in EngineConfig.model_fields.items() if name in other)

    lines = []
    for name, value in other.items():
        text = str(value).lower() if isinstance(value, bool) else repr(value).replace("'", '"')
        lines.append(f"{name} = {text}")
    file = tmp_path / "slipstream.toml"
    file.write_text("\n".join(lines))
    assert load_config({}, str(file)) == expected

    for name, value in other.items():
        monkeypatch.setenv(env_name(name), " ".join(value) if isinstance(value, list) else str(value))
    assert load_config({}) == expected


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 0}, "max_model_len must be at least 1, but got 0"),
        ({"max_model_len": -1}, "max_model_len must be at least 1, but got -1"),
        ({"max_model_len": 10**30}, "max_model_len must be at most 9223372036854775807, but got 10"),
        ({"drain_timeout_s": float("nan")}, "drain_timeout_s must be a finite number, but got nan"),
        ({"drain_timeout_s": "nan"}, "drain_timeout_s must be a finite number, but got 'nan'"),
        ({"drain_timeout_s": float("inf")}, "drain_timeout_s must be a finite number, but got inf"),
        ({"drain_timeout_s": True}, "drain_timeout_s must be a number, but got True"),
        ({"page_size": True}, "page_size must be an integer, but got True"),
        ({"page_size": 1.5}, "page_size must be an integer, but got 1.5"),
        ({"page_size": float("nan")}, "page_size must be a finite number, but got nan"),
        ({"port": 65536}, "port must be at most 65535, but got 65536"),
        ({"lag": 2}, "lag must be at most 1, but got 2"),
        ({"dtype": "fp8"}, "dtype must be 'auto', 'float32', 'bfloat16', 'float16' or 'float64', but got 'fp8'"),
        ({"logprobs_mode": "cooked"}, "logprobs_mode must be 'raw' or 'processed', but got 'cooked'"),
        ({"debug": "maybe"}, "debug must be true or false, but got 'maybe'"),
        ({"host": ""}, "host must not be empty, but got ''"),
        ({"model": None}, "model must be a string, but got None"),
        ({"speculate": 3}, "speculate must be a list of strings, but got 3"),
        ({"max_mode_len": 3}, "a setting must be a known one, but got max_mode_len\nhint: did you mean max_model_len?"),
        ({"num_pages": 4, "kv_cache_memory_bytes": 9}, "num_pages must not be given together with kv_cache_memory_bytes"),
        ({"port": "x", "host": ""}, "host must not be empty, but got ''\nport must be an integer, but got 'x'"),
    ],
)
def test_bad_values_are_refused_in_one_grammar(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**settings)
    assert str(caught.value).startswith(message)


def test_an_error_names_the_place_to_mend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "c.toml"
    file.write_text("lag = 5\nlagg = 1\n")
    monkeypatch.setenv("SLIPSTREAM_PAGE_SIZE", "x")
    with pytest.raises(ConfigError) as caught:
        load_config({"port": "-1"}, str(file))
    lines = str(caught.value).splitlines()
    assert f"lag in {file} must be at most 1, but got 5" in lines
    assert f"a setting must be a known one, but got lagg in {file}" in lines
    assert "SLIPSTREAM_PAGE_SIZE must be an integer, but got 'x'" in lines
    assert "--port must be at least 0, but got '-1'" in lines


@pytest.mark.parametrize("text", ["page_size = ", b"page_size = \xff", "[server"])
def test_a_broken_file_is_refused(tmp_path: Path, text: str | bytes) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ConfigError, match=r"c\.toml must be TOML, but got an error"):
        load_config({}, str(file))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config must name a TOML file"):
        load_config({}, str(tmp_path / "none.toml"))


def test_an_empty_variable_is_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "")
    assert load_config({}).api_key is None


def test_the_api_key_is_never_shown() -> None:
    assert "sesame" not in repr(EngineConfig(api_key="sesame"))
    with pytest.raises(ConfigError) as caught:
        EngineConfig(api_key=["sesame"])
    assert "sesame" not in str(caught.value)


def test_the_constructor_reads_no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_PAGE_SIZE", "3")
    assert EngineConfig().page_size == EngineConfig.model_fields["page_size"].default


def test_it_is_frozen() -> None:
    config = EngineConfig()
    with pytest.raises(Exception, match="frozen"):
        config.page_size = 3  # that it cannot be assigned is the point


def test_misspelt_variables_are_found_but_strange_ones_are_not_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_MAX_MODEL_LEM", "3")
    monkeypatch.setenv("SLIPSTREAM_SERVICE_HOST", "10.0.0.1")
    assert unknown_variables() == ["SLIPSTREAM_MAX_MODEL_LEM is no setting; did you mean SLIPSTREAM_MAX_MODEL_LEN?"]


def test_every_setting_is_described_and_grouped() -> None:
    for name, field in EngineConfig.model_fields.items():
        assert field.description is not None, name
        assert field.description.endswith("."), name
        assert field_group(name) in GROUPS


def test_the_reference_is_up_to_date() -> None:
    assert (ROOT / "docs" / "configuration.md").read_text() == reference(), "run scripts/config-docs"
    for name in EngineConfig.model_fields:
        assert f"`{flag_name(name)}`" in reference()
