"""`run --batch`, with the fake engine of tests/server in a real engine process."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli import batch
from slipstream.cli.batch_files import Todo, read_lines
from slipstream.cli.main import main
from slipstream.cli.table import duration_text
from slipstream.errors import ConfigError
from slipstream.server.serving import Backend
from tests.server.fake_engine import load_info
from tests.server.live import DEADLINE_S, LiveServer

FAKE = Backend(lambda config, on_progress: None, load_info, "tests.server.fake_engine:build")
RUN = """
import sys
from slipstream.cli import batch
from slipstream.cli.main import main
from tests.cli.test_batch import FAKE
batch.CHECKPOINT = FAKE
sys.exit(main(sys.argv[1:]))
"""


def chat(custom_id: str, text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "messages": [{"role": "user", "content": text}], **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def completion(custom_id: str, prompt: Any, **fields: Any) -> dict[str, Any]:
    body = {"model": "fake", "prompt": prompt, **fields}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setattr(batch, "CHECKPOINT", FAKE)
    return tmp_path / "in.jsonl", tmp_path / "out.jsonl"


def run(files: tuple[Path, Path], *argv: str) -> int:
    return main(["run", "fake", "--batch", str(files[0]), "--out", str(files[1]), "--max-num-seqs", "4", *argv])


def test_answers_are_those_of_http(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    requests = [
        chat("c1", "say(one)", logprobs=True, top_logprobs=2),
        chat("c2", "[random]", seed=7, n=3, max_tokens=5),
        completion("t1", ["say(a)", "say(b)"], logprobs=1),
        completion("t2", [65, 66, 67], max_tokens=3, temperature=0),
        chat("bad", "x", temperature=-1),
        chat("model", "x") | {"body": {"model": "other", "messages": []}},
        completion("late", "x[nan=2]"),
        completion("never", "[refuse]"),
    ]
    write(files[0], *requests)
    assert run(files) == 1
    answers = {answer["custom_id"]: answer for answer in read(files[1])}
    assert set(answers) == {request["custom_id"] for request in requests}
    with LiveServer(max_num_seqs=4) as server:
        for request in requests:
            over_http = server.http.post(request["url"], json=request["body"])
            answer = answers[request["custom_id"]]
            assert answer["error"] is None
            assert answer["id"].startswith("batch_req-")
            assert answer["response"]["request_id"].startswith("req-")
            assert answer["response"]["status_code"] == over_http.status_code
            varying = {"id": None, "created": None}
            assert answer["response"]["body"] | varying == over_http.json() | varying
    assert [answers[name]["response"]["status_code"] for name in ("c1", "bad", "model", "late", "never")] == [
        200,
        400,
        404,
        500,
        400,
    ]
    assert "batch: 8 of 8, 4 failed, " in capsys.readouterr().err


BAD_LINES = [
    ("no json", "line 2 must be a JSON object, but got: "),
    ("[1]", "line 2 must be a JSON object, but got: "),
    ("{}", "line 2: custom_id must be text of 1 to 512 characters, but got None"),
    (json.dumps(chat("", "x")), "line 2: custom_id must be text of 1 to 512 characters, but got ''"),
    (json.dumps(chat("b", "x") | {"custom_id": 3}), "line 2: custom_id must be text"),
    (json.dumps(chat("b", "x") | {"method": "GET"}), "line 2: method must be POST, but got 'GET'"),
    (
        json.dumps(chat("b", "x") | {"url": "/v1/embeddings"}),
        "line 2: url must be one of /v1/chat/completions, /v1/completions, but",
    ),
    (json.dumps(chat("b", "x") | {"body": [1]}), "line 2: body must be a JSON object, but got something else or none"),
    (json.dumps({"custom_id": "b", "method": "POST", "url": "/v1/completions"}), "line 2: body must be a JSON object"),
    (json.dumps(chat("b", "x", stream=True)), "line 2: stream must be left out of a batch, but got true"),
    ('{"custom_id": "b", "x": NaN}', "line 2 must be a JSON object, but got: "),
    ("x" * 3000, "line 2 must have at most"),
]


def test_bad_lines_become_error_lines_and_lose_nothing_else(files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLIPSTREAM_MAX_BODY_BYTES", "2000")
    monkeypatch.setattr(batch, "LINE_ROOM", 500)
    bad = [line.replace('"b"', f'"b{number}"') for number, (line, _) in enumerate(BAD_LINES, 2)]
    write(files[0], chat("first", "say(1)"), *bad, "", chat("last", "say(2)"))
    assert run(files) == 1
    answers = read(files[1])
    good = {one["custom_id"]: one["response"]["body"] for one in answers if one["error"] is None}
    assert {name: body["choices"][0]["message"]["content"] for name, body in good.items()} == {"first": "1", "last": "2"}
    errors = {one["error"]["line"]: one for one in answers if one["error"]}
    assert set(errors) == {number for number, _ in enumerate(BAD_LINES, 2)}
    for number, (line, message) in enumerate(BAD_LINES, 2):
        error = errors[number]
        assert error["response"] is None
        assert error["error"]["code"] == "invalid_line"
        assert error["error"]["message"].startswith(message.replace("line 2", f"line {number}"))
        assert error["custom_id"] == (f"b{number}" if '"b"' in line and "NaN" not in line else None)
    before = files[1].read_bytes()
    assert run(files) == 1  # nothing is left to do, and some of it is no answer
    assert files[1].read_bytes() == before


def test_it_goes_on_where_it_was_stopped(files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """What is there is kept as it is; a line that was cut in the middle is answered again."""
    write(files[0], *(chat(f"r{i}", f"say({i})") for i in range(4)))
    kept = {"id": "x", "custom_id": "r1", "response": {"status_code": 200, "request_id": "", "body": {}}, "error": None}
    whole = json.dumps(kept)
    files[1].write_text(f"{whole}\n{whole.replace('r1', 'r3')[:40]}")
    assert run(files) == 0
    answers = {one["custom_id"]: one for one in read(files[1])}
    assert len(read(files[1])) == 4
    assert answers["r1"] == kept
    assert answers["r3"]["response"]["body"]["choices"][0]["message"]["content"] == "3"
    assert "batch: 1 of 4 are in" in capsys.readouterr().err


def test_a_last_line_that_only_lacks_its_end_is_kept(files: tuple[Path, Path]) -> None:
    write(files[0], chat("a", "say(1)"), chat("b", "say(2)"))
    kept = json.dumps({"id": "x", "custom_id": "a", "response": None, "error": {"line": 1}})
    files[1].write_text(kept)
    assert run(files) == 1  # what is kept is an error
    first, second = files[1].read_text().splitlines()
    assert first == kept
    assert json.loads(second)["custom_id"] == "b"


@pytest.mark.parametrize(
    ("out", "error"),
    [
        ("{}\n", "--out must hold answers of a batch, but line 1 of"),
        ("not json\n{}\n", "--out must hold answers of a batch, but line 1 of"),
        ('{"custom_id": null, "response": null, "error": null}\n', "--out must hold answers of a batch, but line 1 of"),
        ('{"custom_id": "z", "response": null, "error": null}\n', "--out must hold answers of this input, but got custom_id 'z'"),
        (
            '{"custom_id": null, "response": null, "error": {"line": 9}}\n',
            "--out must hold answers of this input, but got line 9",
        ),
    ],
)
def test_a_file_that_is_no_output_of_this_input_is_not_touched(
    out: str, error: str, files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write(files[0], chat("a", "say(1)"))
    files[1].write_text(out)
    assert run(files) == 2
    assert capsys.readouterr().err.startswith(f"error: {error}")
    assert files[1].read_text() == out


def test_the_same_custom_id_twice_is_refused_before_anything_starts(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write(files[0], chat("a", "x"), "no json", chat("b", "x"), "no json", chat("a", "y"))
    assert run(files) == 2
    assert capsys.readouterr().err.startswith(f"error: custom_id must be unique, but lines 1 and 5 of {files[0]} both have 'a'\n")
    assert not files[1].exists()


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["--batch", "in"], "--out must be given with --batch"),
        (["--out", "out"], "--batch must be given with --out"),
        (["--batch", "in", "--out", "in"], "--out must be another file than --batch"),
        (["--batch", "none", "--out", "out"], "--batch must name a readable file, but got 'none'"),
        (["--batch", "in", "--out", "no/out"], "--out must name a file that can be written"),
        (["prompt", "--batch", "in", "--out", "out"], "PROMPT must not be given with --batch"),
        (["--batch", "in", "--out", "out", "--system", "x"], "--system must not be given with --batch"),
        (["--batch", "in", "--out", "out", "--raw"], "--raw must not be given with --batch"),
        (["--batch", "in", "--out", "out", "--top-k", "3"], "--top-k must not be given with --batch"),
    ],
)
def test_wrong_command_lines(
    argv: list[str], error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in", chat("a", "x"))
    assert main(["run", "m", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"error: {error}")
    assert not (tmp_path / "out").exists()


def test_an_empty_input_is_done_at_once(files: tuple[Path, Path]) -> None:
    write(files[0], "", "  ")
    assert run(files) == 0
    assert files[1].read_text() == ""


def test_a_narrow_queue_loses_nothing(files: tuple[Path, Path]) -> None:
    """Calls of several answers each wait for room instead of failing with 503."""
    write(files[0], *(chat(f"r{i}", "say(x)", n=2) for i in range(12)))
    assert run(files, "--max-queue", "1") == 0
    assert {one["response"]["status_code"] for one in read(files[1])} == {200}
    assert len(read(files[1])) == 12


def test_an_api_key_of_the_environment_does_not_stand_in_the_way(
    files: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_API_KEY", "secret")
    write(files[0], chat("a", "say(1)"))
    assert run(files) == 0


def test_an_engine_that_dies_is_told_and_the_rest_can_be_done_later(
    files: tuple[Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    write(
        files[0],
        chat("a", "say(1)"),
        chat("b", "[delay=0.2]say(wait)[boom=3]"),
        *(chat(f"r{i}", "say(longer text)") for i in range(9)),
    )
    assert run(files) == 1
    err = capsys.readouterr().err
    assert "error: " in err
    assert "hint: the same command goes on from there" in err
    answers = read(files[1])
    assert all(one["response"]["status_code"] == 200 for one in answers)
    assert "b" not in {one["custom_id"] for one in answers}
    write(files[0], *(chat(name, "say(2)") for name in ("a", "b", *(f"r{i}" for i in range(9)))))
    assert run(files) == 0
    assert {one["custom_id"] for one in read(files[1])} == {"a", "b", *(f"r{i}" for i in range(9))}


def test_ctrl_c_keeps_what_is_done(tmp_path: Path) -> None:
    source, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    write(source, *(chat(f"r{i}", "[delay=0.02]say(some words)") for i in range(200)))
    command = ["run", "fake", "--batch", str(source), "--out", str(out), "--max-num-seqs", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", RUN, *command], env=environment, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + DEADLINE_S
    while (not out.exists() or out.read_bytes().count(b"\n") < 3) and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 130, err
    done = read(out)
    assert 3 <= len(done) < 200
    assert f"batch: {len(done)} of 200, " in err
    assert " left\nhint: the same command goes on from there\n" in err
    assert "Traceback" not in err


def test_a_huge_input_is_not_kept_in_memory(tmp_path: Path) -> None:
    source = write(tmp_path / "in.jsonl", *(chat(f"r{i}", "x" * 1000) for i in range(2000)))
    todo = Todo(source, tmp_path / "out.jsonl", 10**6)
    with todo.file:
        assert (todo.num_lines, todo.num_done) == (2000, 0)
        assert sum(value.nbytes for value in vars(todo).values() if hasattr(value, "nbytes")) == 9 * 2000
    lines = read_lines(source, 10**6)
    assert next(lines).custom_id == "r0"
    lines.close()


def test_lines_that_are_too_long_do_not_shift_the_others(tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text("x" * 50_000 + "\n" + json.dumps(chat("a", "b")) + "\n" + "y" * 1000)
    lines = list(read_lines(source, 500))
    assert [(line.number, line.custom_id) for line in lines] == [(1, None), (2, "a"), (3, None)]
    with pytest.raises(ConfigError, match="--batch must name a readable file"):
        list(read_lines(tmp_path, 500))


def test_the_meter() -> None:
    meter = batch.Meter(num_lines=100, num_done=20)
    assert meter.text(1.0) == "batch: 20 of 100, 0.0 tok/s"
    for _ in range(20):
        meter.answered(5, failed=False)
    meter.answered(0, failed=True)
    assert meter.text(10.5) == "batch: 41 of 100, 1 failed, 9.5 tok/s, 30 s left"
    assert duration_text(600) == "10 min"
    assert duration_text(36000) == "10.0 h"
