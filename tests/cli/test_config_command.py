"""`config show` and `config init`."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.config import template
from slipstream.cli.main import main
from slipstream.config import EngineConfig
from slipstream.config_sources import load_config


def shown(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, dict[str, Any]]:
    assert main(["config", "show", "--json", *argv]) == 0
    value = json.loads(capsys.readouterr().out)
    assert isinstance(value, dict)
    return value


def test_show_says_where_each_value_comes_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "s.toml"
    file.write_text('lag = 0\nport = 1\npage_size = 2\nmodel = "in-file"\n')
    monkeypatch.setenv("SLIPSTREAM_PORT", "3")
    monkeypatch.setenv("SLIPSTREAM_PAGE_SIZE", "4")
    settings = shown(capsys, "--config", str(file), "--page-size", "8")
    assert set(settings) == set(EngineConfig.model_fields)
    assert settings["page_size"] == {"value": 8, "from": "--page-size"}
    assert settings["port"] == {"value": 3, "from": "SLIPSTREAM_PORT"}
    assert settings["lag"] == {"value": 0, "from": str(file)}
    assert settings["max_num_seqs"] == {"value": 32, "from": "default"}
    monkeypatch.setenv("SLIPSTREAM_CONFIG", str(file))
    assert main(["config", "show", "--no-debug"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert rows[0] == ["SETTING", "VALUE", "FROM"]
    assert ["model", '"in-file"', str(file)] in rows
    assert ["api_key", "default"] in rows
    assert ["debug", "false", "--no-debug"] in rows


def test_secrets_are_masked(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "hush")
    assert shown(capsys)["api_key"] == {"value": "***", "from": "SLIPSTREAM_API_KEY"}
    assert main(["config", "show"]) == 0
    assert "hush" not in capsys.readouterr().out


def test_show_refuses_what_serve_would_refuse(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("SLIPSTREAM_LAG", "x")
    assert main(["config", "show"]) == 2
    assert capsys.readouterr().err == "error: SLIPSTREAM_LAG must be an integer, but got 'x'\n"
    monkeypatch.setenv("SLIPSTREAM_LAG", "1")
    monkeypatch.setenv("SLIPSTREAM_LAGG", "1")
    assert main(["config", "show"]) == 0
    assert "warning: SLIPSTREAM_LAGG is no setting" in capsys.readouterr().err


def test_init_writes_a_file_that_changes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "slipstream.toml"
    assert main(["config", "init", str(file)]) == 0
    out, err = capsys.readouterr()
    assert out == f"{file}\n"
    assert f"--config {file} or SLIPSTREAM_CONFIG uses it" in err
    assert load_config({}, str(file)) == EngineConfig()


def test_each_line_can_be_uncommented() -> None:
    """Those with a default give just that; the others take what they show."""
    lines = [line[1:] for line in template().splitlines() if line.startswith("#") and not line.startswith("# ")]
    assert [line.split(" = ")[0] for line in lines] != []
    assert {line.split(" = ")[0] for line in lines} == set(EngineConfig.model_fields)
    defaults = [line for line in lines if not line.endswith((" = N", ' = "TEXT"'))]
    assert EngineConfig(**tomllib.loads("\n".join(defaults))) == EngineConfig()
    for line in set(lines) - set(defaults):
        assert EngineConfig.model_fields[line.split(" = ")[0]].default is None


def test_init_does_not_write_over_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("slipstream.toml").write_text("mine")
    assert main(["config", "init"]) == 2
    assert capsys.readouterr().err == (
        "error: the file must not be there yet, but slipstream.toml is\nhint: --force writes over it\n"
    )
    assert Path("slipstream.toml").read_text() == "mine"
    assert main(["config", "init", "--force"]) == 0
    assert Path("slipstream.toml").read_text() == template()
    capsys.readouterr()
    assert main(["config", "init", "-"]) == 0
    assert capsys.readouterr().out == template()
    assert main(["config", "init", "no/such/folder/f"]) == 2
    assert "FILE must be a file that can be written" in capsys.readouterr().err
