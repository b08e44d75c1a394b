"""The command line itself: help, exit codes, errors, and what it does not load."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import slipstream
from slipstream.cli import main as cli
from slipstream.cli import run
from slipstream.cli.flags import SAMPLING_FLAGS
from slipstream.cli.parser import Parser
from slipstream.config import EngineConfig, flag_name
from slipstream.errors import EngineDead, InvalidParameter, ModelError, SlipstreamError
from slipstream.types import SamplingParams

BENCH_HELP = "slipstream bench serve --help"
BENCH_KINDS = "latency, throughput, speculate, serve"


@pytest.mark.parametrize("argv", [["--help"], *([name, "--help"] for name in cli.COMMANDS), ["bench", "serve", "--help"]])
def test_help_loads_no_torch(argv: list[str]) -> None:
    """Nor anything else that is slow to import."""
    script = (
        "import sys, contextlib\nfrom slipstream.cli.main import main\n"
        f"with contextlib.suppress(SystemExit): main({argv!r})\n"
        "print('\\n'.join(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.startswith(f"usage: {' '.join(['slipstream', *argv[:-1]])} ")
    loaded = set(done.stderr.splitlines())
    assert argv == ["--help"] or "\nexample:\n  slipstream " in done.stdout
    assert not loaded & {"torch", "numpy", "transformers", "fastapi", "httpx", "pydantic_settings", "jinja2", "gguf"}
    if argv == ["--help"]:
        assert "pydantic" not in loaded
        assert all(name in done.stdout for name in cli.COMMANDS)


@pytest.mark.parametrize(("name", "usage"), [("serve", "[MODEL]"), ("run", "MODEL [PROMPT]"), ("chat", "[MODEL]")])
def test_many_flags_are_one_word_in_the_usage_line(name: str, usage: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main([name, "--help"])
    out = capsys.readouterr().out
    assert out.startswith(f"usage: slipstream {name} [FLAGS] {usage}\n\n")
    assert "\n  --max-num-seqs N" in out


@pytest.mark.parametrize(
    "argv", [["m", "hi", "--seed", "1"], ["m", "--seed", "1", "hi"], ["--seed=1", "m", "hi"], ["--seed", "1", "m", "--", "hi"]]
)
def test_flags_may_stand_anywhere(argv: list[str]) -> None:
    parser = Parser(prog="slipstream run")
    run.add_arguments(parser)
    args = parser.parse_args(argv)
    assert (args.name, args.prompt, args.seed) == ("m", "hi", "1")


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        cli.main(["--version"])
    assert exit_.value.code == 0
    assert capsys.readouterr().out == f"slipstream {slipstream.__version__}\n"


@pytest.mark.parametrize(
    ("argv", "error", "hint"),
    [
        (
            ["srve"],
            "a command must be one of serve, run, chat, bench, train-draft, pull, ls, show, rm, config, doctor, but got 'srve'",
            "slipstream --help",
        ),
        (["serve", "--page-sise", "3"], "an argument must be one that slipstream serve knows", "did you mean --page-size?"),
        (["serve", "--page-size=x"], "--page-size must be an integer, but got 'x'", None),
        (["serve", "--max-model-len", "0"], "--max-model-len must be at least 1, but got '0'", None),
        (["serve", "--max-model-len", "-1"], "--max-model-len must be at least 1, but got '-1'", None),
        (["serve", "--port"], "--port must have a value, but got none", "slipstream serve --help"),
        (["run"], "MODEL must be given, but got none", "slipstream run --help"),
        (["run", "m", " "], "a prompt must hold text, but got ' '", 'slipstream run MODEL "prompt", or pipe it in'),
        (
            ["bench"],
            "KIND must be given, but got none",
            "KIND is one of latency, throughput, speculate, serve; slipstream bench --help",
        ),
        (["bench", "x"], "KIND must be one of latency, throughput, speculate, serve, but got 'x'", "slipstream bench --help"),
        (["bench", "serve", "--endpoint", "x"], "--endpoint must be one of completions, chat, but got 'x'", BENCH_HELP),
        (["serve", "--config", "no.toml"], "--config must name a TOML file, but got 'no.toml'", "--config or SLIPSTREAM_CONFIG"),
        (["run", "m", "hi", "--temperature", "warm"], "--temperature must be a number, but got 'warm'", None),
        (["bench", "serve", "--num-prompts", "0"], "--num-prompts must be an integer of at least 1, but got '0'", BENCH_HELP),
        (
            ["bench", "latency", "--num-prompts", "3"],
            "an argument must be one that slipstream bench latency knows, but got '--num-prompts'",
            "--num-prompts belongs to slipstream bench throughput and slipstream bench serve",
        ),
        (
            ["bench", "serve", "--lag=0"],
            "an argument must be one that slipstream bench serve knows, but got '--lag=0'",
            "--lag belongs to slipstream bench latency and slipstream bench throughput and slipstream bench speculate",
        ),
        (["bench", "latency", "--batch-sise", "3"], "an argument must be one that", "did you mean --batch-size?"),
        (["bench", "serve", "--request-rate", "nan"], "--request-rate must be a number above 0, but got 'nan'", BENCH_HELP),
    ],
)
def test_a_wrong_command_line_exits_2_in_our_grammar(
    argv: list[str], error: str, hint: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {error}")
    assert [line for line in err.splitlines() if line.startswith("hint: ")] == ([f"hint: {hint}"] if hint else [])


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ModelError("the model must be whole, but a shard is missing", hint="fetch it again"), 2),
        (InvalidParameter("top_k", "be an integer", "x"), 2),
        (EngineDead("the engine must live, but died"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_exit_codes(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(args: object) -> int:
        raise raised

    monkeypatch.setattr("slipstream.cli.pull.run", fail)
    assert cli.main(["pull"]) == code
    expected = ""
    if isinstance(raised, SlipstreamError):
        expected = f"error: {raised.message}\n" + (f"hint: {raised.hint}\n" if raised.hint else "")
    assert capsys.readouterr().err == expected


def test_a_bug_of_ours_is_not_dressed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("slipstream.cli.pull.run", lambda args: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        cli.main(["pull"])


def test_serve_has_a_flag_for_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert all(f"  {flag_name(name)}" in shown for name in EngineConfig.model_fields)


def test_sampling_flags_are_sampling_parameters() -> None:
    assert {name for name, _, _ in SAMPLING_FLAGS} <= set(SamplingParams.field_names())


def test_pull_prints_where_the_model_lies(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", str(tmp_path)]) == 0
    assert capsys.readouterr().out == f"{tmp_path}\n"
    assert cli.main(["pull", "no/such/model.gguf"]) == 2
    assert "but got 'no/such/model.gguf'" in capsys.readouterr().err


def test_serve_hands_the_configuration_on_and_exits_as_the_server_does(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[EngineConfig] = []
    monkeypatch.setattr("slipstream.server.app.run_server", lambda config: seen.append(config) or 3)
    monkeypatch.setenv("SLIPSTREAM_LAG", "0")
    assert cli.main(["serve", "some/model", "--port", "0", "--speculate", "off", "--debug"]) == 3
    assert seen == [EngineConfig(model="some/model", port=0, speculate=("off",), debug=True, lag=0)]
