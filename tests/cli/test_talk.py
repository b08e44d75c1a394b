"""`run` and `chat`: text out, questions in, Ctrl-C in between."""

from __future__ import annotations

import io
import signal
import sys

import pytest

from slipstream.cli.main import main
from slipstream.config import EngineConfig
from tests.cli.conftest import Install
from tests.cli.echo_engine import EchoEngine


def type_in(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let `text` come in on a stdin that is no terminal."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))


def prompts(engine: EchoEngine) -> list[str]:
    """What the engine was asked."""
    return [bytes(request.prompt_token_ids).decode() for request in engine.requests]


def interrupt_once(steps: int) -> None:
    """Ctrl-C in the fourth step."""
    if steps == 3:
        signal.raise_signal(signal.SIGINT)


def test_run_writes_the_answer_and_nothing_else(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    engine = install()
    assert main(["run", "m", "hé", "--system", "be"]) == 0
    assert prompts(engine) == ["s:be;u:hé;"]
    assert capsys.readouterr().out == "s:be;u:hé;\n"
    assert engine.is_closed


def test_run_raw_skips_the_template(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install()
    assert main(["run", "m", "plain\n", "--raw"]) == 0
    assert capsys.readouterr().out == "plain\n"  # no second newline


def test_run_without_a_template_continues_the_prompt(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    engine = install(chat=False)
    assert main(["run", "m", "once"]) == 0
    assert prompts(engine) == ["once"]
    assert main(["run", "m", "once", "--system", "be"]) == 2
    assert "chat template" in capsys.readouterr().err


def test_run_reads_stdin(install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    install()
    type_in(monkeypatch, "piped")
    assert main(["run", "m", "--raw"]) == 0
    assert capsys.readouterr().out == "piped\n"
    type_in(monkeypatch, " \n")
    assert main(["run", "m"]) == 2
    assert "a prompt must hold text" in capsys.readouterr().err


def test_sampling_flags_reach_the_engine_over_the_models_defaults(install: Install) -> None:
    engine = install()
    flags = ["--top-k", "4", "--seed", "-7", "--stop", "x", "--stop", "yz", "--ignore-eos", "--max-tokens", "3"]
    assert main(["run", "m", "abcdef", *flags]) == 0
    (request,) = engine.requests
    params = request.params
    assert (params.top_k, params.stop, params.ignore_eos, params.max_tokens) == (4, ("x", "yz"), True, 3)
    assert params.temperature == 0.5  # the model's
    assert request.seed == -7
    assert main(["run", "m", "a", "--temperature", "0"]) == 0
    assert engine.requests[-1].params.temperature == 0.0
    assert engine.requests[-1].params.max_tokens is None  # up to the context


def test_settings_reach_the_engine_from_flags_and_variables(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = install()
    monkeypatch.setenv("SLIPSTREAM_PAGE_SIZE", "4")
    monkeypatch.setenv("SLIPSTREAM_MODEL", "other")
    assert main(["run", "m", "a", "--lag", "0"]) == 0
    assert engine.config == EngineConfig(model="m", lag=0, page_size=4)
    type_in(monkeypatch, "a\n")
    assert main(["chat"]) == 0
    assert engine.config == EngineConfig(model="other", page_size=4)


@pytest.mark.parametrize("command", [["run", "m", "a"], ["chat", "m"]])
@pytest.mark.parametrize(
    ("flags", "name"),
    [
        (["--top-p", "nan"], "top_p"),
        (["--temperature", "-1"], "temperature"),
        (["--min-tokens", "3", "--max-tokens", "2"], "min_"),
    ],
)
def test_a_bad_sampling_parameter_exits_2_before_anything_is_loaded(
    command: list[str], flags: list[str], name: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = install()
    assert main([*command, *flags]) == 2
    assert capsys.readouterr().err.startswith(f"error: {name}")
    assert engine.config is None


def test_ctrl_c_ends_run_with_130_and_aborts_the_request(install: Install) -> None:
    engine = install(EchoEngine(on_step=interrupt_once))
    before = signal.getsignal(signal.SIGINT)
    assert main(["run", "m", "long enough"]) == 130
    assert len(engine.aborted) == 1
    assert engine.is_closed
    assert signal.getsignal(signal.SIGINT) is before


def test_chat_remembers_and_forgets(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = install()
    type_in(monkeypatch, "a\n\nb\n/reset\nc\n/exit\nd\n")
    assert main(["chat", "m", "--system", "x"]) == 0
    assert prompts(engine) == ["s:x;u:a;", "s:x;u:a;a:s:x;u:a;;u:b;", "s:x;u:c;"]
    assert capsys.readouterr().out.splitlines() == prompts(engine)


def test_ctrl_c_stops_only_the_reply(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = install(EchoEngine(on_step=interrupt_once))
    type_in(monkeypatch, "abcdef\nnext\n")
    assert main(["chat", "m"]) == 0
    # The fourth step's token still counts, and the half reply is part of the conversation.
    assert prompts(engine) == ["u:abcdef;", "u:abcdef;a:u:ab;u:next;"]
    assert len(engine.aborted) == 1
    out, err = capsys.readouterr()
    assert out.splitlines() == ["u:ab", "u:abcdef;a:u:ab;u:next;"]
    assert "[stopped]" in err


def test_a_message_that_does_not_fit_is_taken_back(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = install()
    type_in(monkeypatch, f"a\n{'y' * 400}\nb\n")
    assert main(["chat", "m"]) == 1
    assert prompts(engine) == ["u:a;", "u:a;a:u:a;;u:b;"]
    assert "error: prompt and answer must fit the maximum context length of 256 tokens" in capsys.readouterr().err


def test_an_unknown_command_is_explained_not_sent(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = install()
    type_in(monkeypatch, "/help\n/etc/hosts is what?\n")
    assert main(["chat", "m"]) == 0
    assert prompts(engine) == ["u:/etc/hosts is what?;"]
    assert "/reset   forget the conversation" in capsys.readouterr().err


def test_chat_needs_a_template(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install(chat=False)
    assert main(["chat", "m"]) == 2
    assert "the model must have a chat template, but m has none" in capsys.readouterr().err
