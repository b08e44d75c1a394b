"""The command: what it prints, what it refuses, and what a signal does to it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from slipstream.cli.main import main
from slipstream.cli.train_draft import Meter
from slipstream.weights.source import resolve
from tests.tiny_checkpoints import edit_json, save, tiny
from tests.train.tiny_training import target, write_prompts

SMALL = ["--max-tokens", "16", "--epochs", "1", "--batch-tokens", "256", "--max-num-seqs", "4", "--num-threads", "1"]


def command(prompts: Path, out: Path, *more: str, model: str | None = None) -> list[str]:
    return ["train-draft", model or target(), "--prompts", str(prompts), "--out", str(out), *SMALL, *more]


def test_the_head_it_makes_is_served_by_the_command_it_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out"
    assert main(command(prompts, out)) == 0
    said = capsys.readouterr()
    last = said.out.splitlines()[-1].split()
    assert last[:3] == ["slipstream", "serve", target()]
    assert "accept length" in said.out
    assert "the target's states will take at most" in said.err
    assert main(["run", target(), "Say 7", "--temperature", "0", "--max-tokens", "8", *last[3:]]) == 0
    drafted = capsys.readouterr().out
    assert main(["run", target(), "Say 7", "--temperature", "0", "--max-tokens", "8"]) == 0
    assert drafted == capsys.readouterr().out
    assert main(command(prompts, out)) == 0  # it is all there
    assert capsys.readouterr().out == said.out
    config = json.loads((out / "head" / "config.json").read_text())
    modes = {path.stat().st_mode for path in (out / "head").iterdir()}
    assert len(modes) == 1, "the weights can be read by whoever can read the rest"
    assert config["rope_theta"] == 10000.0
    assert not any("aux" in name for name in config)
    report = json.loads((out / "report.json").read_text())
    assert report["held_out"]["num_prompts"] + report["data"]["num_answers"] == 24
    assert set(report["seconds"]) == {"answers", "features", "training", "measuring"}
    assert sorted(path.name for path in out.rglob("*.partial")) == []


def refused(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    assert main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


@pytest.mark.parametrize(
    ("more", "error"),
    [
        (["--max-tokens", "1"], "--max-tokens must be an integer of at least 2, but got 1"),
        (["--epochs", "0"], "--epochs must be an integer of at least 1, but got 0"),
        (["--epochs", "x"], "--epochs must be an integer, but got 'x'"),
        (["--unroll", "17"], "--unroll must be at most 16, but got 17"),
        (["--held-out", "0.6"], "--held-out must be a share from 0 to 0.5, but got 0.6"),
        (["--learning-rate", "nan"], "--learning-rate must be a number above 0 and below 1, but got nan"),
        (["--temperature", "-1"], "--temperature must be 0 or a number from 1e-05 to 100, but got -1.0"),
        (["--feature-dtype", "float16"], "--feature-dtype must be one of bfloat16, float32, but got 'float16'"),
        (["--seed", "-1"], "--seed must be an integer from 0"),
        (["--num-prompts", "99"], "--num-prompts must be at most the 24 there are, but got 99"),
        (["--max-tokens", "300"], "--max-tokens must leave room for a prompt in the context of 256 tokens, but got 300"),
    ],
)
def test_settings_that_cannot_work(more: list[str], error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    err = refused(command(write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out", *more), capsys)
    assert f"error: {error}" in err
    assert not (tmp_path / "out").exists()


def test_models_and_folders_that_cannot_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out"
    shallow = save(tiny("llama", num_hidden_layers=3), tmp_path / "shallow")
    assert "MODEL must have at least 4 layers, but" in refused(command(prompts, out, model=str(shallow)), capsys)
    foreign = save(tiny("llama", num_hidden_layers=5), tmp_path / "foreign")
    edit_json(foreign / "config.json", model_type="olmo2")
    assert "MODEL must be one of our own model types, but" in refused(command(prompts, out, model=str(foreign)), capsys)
    assert "--out must have no comma" in refused(command(prompts, tmp_path / "a,b"), capsys)
    assert "--out must name a folder that can be written" in refused(command(prompts, prompts), capsys)
    assert "--out must be a new folder, or one that train-draft began" in refused(command(prompts, tmp_path), capsys)
    assert f"{prompts} line 25 must have one of" in refused(command(with_line(prompts, {"story": "x"}), out), capsys)


def with_line(path: Path, record: dict[str, Any]) -> Path:
    path.write_text(path.read_text() + json.dumps(record) + "\n")
    return path


def test_another_command_in_the_same_folder_is_told_what_differs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts, out = write_prompts(tmp_path / "prompts.jsonl", 6), tmp_path / "out"
    assert main(command(prompts, out)) == 0
    capsys.readouterr()
    begun = f"must be what {out} was begun with"
    assert f"--max-tokens {begun} (16), but got 12" in refused(command(prompts, out, "--max-tokens", "12"), capsys)
    err = refused(command(prompts, out, "--epochs", "2"), capsys)
    assert f"--epochs {begun} (1), but got 2" in err
    assert f"hint: to train anew on the same answers, remove {out / 'training'}" in err
    other = save(tiny("llama", num_hidden_layers=5, seed=1), tmp_path / "other")
    edit_json(other / "tokenizer_config.json", chat_template="{{ messages }}")
    assert f"MODEL {begun} ({target()}, files " in refused(command(prompts, out, model=str(other)), capsys)
    assert f"the prompts {begun}" in refused(command(write_prompts(tmp_path / "more.jsonl", 7), out), capsys)
    link = tmp_path / "link"
    link.symlink_to(resolve(target()).path)
    assert main(command(prompts, out, model=str(link))) == 0  # the same files by another name


def test_a_signal_ends_it_cleanly_and_keeps_what_was_done(tmp_path: Path) -> None:
    prompts, out = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out"
    argv = command(prompts, out, "--epochs", "2000")
    process = subprocess.Popen(
        [sys.executable, "-m", "slipstream.cli.main", *argv], stderr=subprocess.PIPE, text=True, env=os.environ
    )
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("epoch 2 "):
            break
    process.send_signal(signal.SIGTERM)
    rest = process.stderr.read()
    assert process.wait(60) == 130
    assert "hint: the same command goes on from there" in rest
    assert "Traceback" not in rest
    assert (out / "training" / "checkpoint.pt").exists()
    assert not (out / "head").exists()


def test_the_meter_says_what_is_left() -> None:
    meter = Meter()
    meter.begin("training", 20, 100)
    assert meter.text(5.0) == "training: 20 of 100"
    meter.at(40, "loss 3.10")
    assert meter.text(10.0) == "training: 40 of 100, loss 3.10, 30 s left"
    meter.at(100)
    assert meter.text(40.0) == "training: 100 of 100"
