"""Joins what the command line, the environment and the config file say into one `EngineConfig`.

    flags  >  SLIPSTREAM_* variables  >  config file (TOML, flat: `max_num_seqs = 8`)  >  defaults

The settings library reads environment and file. Who said what is kept, so that an error names the place to mend.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic_settings import BaseSettings, EnvSettingsSource, SettingsConfigDict, TomlConfigSettingsSource

from slipstream.config import EngineConfig, env_name, said_by_flag
from slipstream.errors import ConfigError

CONFIG_VARIABLE = "SLIPSTREAM_CONFIG"


class _Sources(BaseSettings, EngineConfig):
    """Names and types for the settings library. Never built: `EngineConfig` itself checks the values."""

    # Lists are not JSON in variables: `SLIPSTREAM_SPECULATE="off"`. An empty variable is one that is not set.
    model_config = SettingsConfigDict(env_prefix="SLIPSTREAM_", env_ignore_empty=True, enable_decoding=False)


def load_config(flags: Mapping[str, Any], config_file: str | None = None) -> EngineConfig:
    """Build the configuration.

    Args:
        flags: field name -> value, for the flags that were given.
        config_file: path of a TOML file; None: what SLIPSTREAM_CONFIG names, if it is set.

    Raises `ConfigError` naming flag, variable or file and key.
    """
    return load_with_origins(flags, config_file)[0]


def load_with_origins(flags: Mapping[str, Any], config_file: str | None = None) -> tuple[EngineConfig, dict[str, str]]:
    """As `load_config`, and who said what: field name -> flag, variable or file; without those that nobody set."""
    config_file = config_file or os.environ.get(CONFIG_VARIABLE) or None
    in_file = _read_file(config_file) if config_file else {}
    in_env = EnvSettingsSource(_Sources)()
    said = {key: env_name(key) for key in in_env} | {key: said_by_flag(key, value) for key, value in flags.items()}
    labels = {key: f"{key} in {config_file}" for key in in_file} | said
    config = EngineConfig.model_validate({**in_file, **in_env, **flags}, context={"labels": labels})
    return config, {key: str(config_file) for key in in_file} | said


def unknown_variables() -> list[str]:
    """SLIPSTREAM_* variables that look like settings but are none, each with the nearest setting. Worth a warning, not an error:
    orchestrators inject variables of their own (SLIPSTREAM_SERVICE_HOST for a service named slipstream).
    """
    known = {env_name(field) for field in EngineConfig.model_fields} | {CONFIG_VARIABLE}
    found = []
    for name in sorted(os.environ):
        if name.startswith("SLIPSTREAM_") and name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
            found += [f"{name} is no setting; did you mean {near[0]}?"] if near else []
    return found


def _read_file(path: str) -> dict[str, Any]:
    if not Path(path).is_file():
        raise ConfigError(f"--config must name a TOML file, but got {path!r}", hint=f"--config or {CONFIG_VARIABLE}")
    try:
        return dict(TomlConfigSettingsSource(_Sources, Path(path))())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} must be TOML, but got an error: {error}") from None
    except OSError as error:
        raise ConfigError(f"{path} must be readable, but got: {error.strerror}") from None
