"""`ls`, `show` and `rm` on a cache of our own and one of the hub's. Fetching from a hub: tests/weights/test_hub.py."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
from io import StringIO
from pathlib import Path

import pytest

from slipstream.cli.main import main
from slipstream.cli.table import ago_text, columns, count_text, size_text
from slipstream.weights.packages import ALIASES
from tests.gguf_checkpoints import write
from tests.tiny_checkpoints import save, tiny

ALIAS = "smollm2-135m"


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Both caches, empty, in a folder."""
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "own"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path


def own_file(caches: Path, name: str, num_bytes: int) -> Path:
    path = caches / "own" / "models" / name
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        file.truncate(num_bytes)  # a hole: it takes no room
    return path


def hub_model(caches: Path, repo: str, source: Path) -> Path:
    """As huggingface_hub lays a repository out."""
    folder = caches / "hub" / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / ("b" * 40)
    for path in (snapshot, folder / "blobs", folder / "refs"):
        path.mkdir(parents=True)
    (folder / "refs" / "main").write_text("b" * 40)
    for file in source.iterdir():
        data = file.read_bytes()
        blob = folder / "blobs" / hashlib.sha256(data).hexdigest()
        blob.write_bytes(data)
        (snapshot / file.name).symlink_to(Path("..", "..", "blobs", blob.name))
    return folder


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tiny("llama"), tmp_path_factory.mktemp("tiny"))


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    capsys.readouterr()
    assert main(["ls", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert isinstance(rows, list)
    return rows


def test_ls_lists_both_caches(caches: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ls"]) == 0
    out, err = capsys.readouterr()
    assert out == ""
    assert "hint: nothing has been fetched yet" in err

    file = own_file(caches, ALIASES[ALIAS].file, ALIASES[ALIAS].num_bytes)
    yesterday = time.time() - 90000
    os.utime(file, (yesterday, yesterday))
    own_file(caches, "old.gguf", 3_000_000)
    own_file(caches, f"{ALIASES['qwen2.5-coder-0.5b'].file}.parts/000".replace("/", "-"), 1)  # no part: beside it
    folder = hub_model(caches, "tiny/llama", checkpoint)
    (caches / "hub" / "datasets--some--set" / "snapshots").mkdir(parents=True)
    assert main(["ls"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split() == ["NAME", "SOURCE", "SIZE", "LAST", "USED"]
    rows = {line.split()[0]: line for line in lines[1:]}
    assert set(rows) == {ALIAS, "old.gguf", "tiny/llama", "qwen2.5-coder-0.5b"}
    assert "alias" in rows[ALIAS] and "98.4 MB  1 day ago" in rows[ALIAS]
    assert "file " in rows["old.gguf"] and "3.0 MB" in rows["old.gguf"]
    assert "hub " in rows["tiny/llama"]
    assert rows["qwen2.5-coder-0.5b"].endswith("(incomplete)")
    by_name = {row["name"]: row for row in listed(capsys)}
    assert by_name[ALIAS]["num_bytes"] == ALIASES[ALIAS].num_bytes
    assert by_name["tiny/llama"]["path"] == str(folder)
    assert [row["is_complete"] for row in by_name.values()].count(False) == 1


def test_a_cut_download_is_listed_and_can_be_removed(caches: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = caches / "own" / "models" / f"{ALIASES[ALIAS].file}.parts"
    parts.mkdir(parents=True)
    (parts / "000").write_bytes(bytes(500))
    other = own_file(caches, "old.gguf", 10)
    assert [(row["name"], row["num_bytes"], row["is_complete"]) for row in listed(capsys)] == [
        ("old.gguf", 10, True),
        (ALIAS, 500, False),
    ]
    assert main(["rm", ALIAS, "--yes"]) == 0
    assert capsys.readouterr().err == f"removed {ALIAS}, which freed 500 B\n"
    assert sorted(path.name for path in parts.parent.iterdir()) == [other.name]


@pytest.mark.parametrize(("typed", "is_removed"), [("y\n", True), ("yes\n", True), ("n\n", False), ("\n", False), ("", False)])
def test_rm_asks_on_a_terminal(
    typed: str, is_removed: bool, caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = own_file(caches, "old.gguf", 2_000_000)
    terminal = type("Terminal", (StringIO,), {"isatty": lambda self: True})(typed)
    monkeypatch.setattr(sys, "stdin", terminal)
    assert main(["rm", "old.gguf"]) == (0 if is_removed else 1)
    assert file.exists() is not is_removed
    assert f"remove old.gguf ({file}), which frees 2.0 MB? [y/N] " in capsys.readouterr().err


def test_rm_without_a_terminal_needs_yes(
    caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = own_file(caches, "old.gguf", 1)
    monkeypatch.setattr(sys, "stdin", StringIO("y\n"))
    assert main(["rm", "old.gguf"]) == 2
    assert capsys.readouterr().err.endswith("hint: slipstream rm old.gguf --yes\n")
    assert file.exists()


def test_rm_of_a_hub_model(caches: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, other = hub_model(caches, "tiny/llama", checkpoint), hub_model(caches, "tiny/other", checkpoint)
    assert main(["rm", "tiny/llama", "--yes"]) == 0
    assert not folder.exists()
    assert other.exists()
    assert [row["name"] for row in listed(capsys)] == ["tiny/other"]


def test_rm_refuses_what_is_not_ours(caches: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own_file(caches, "old.gguf", 1)
    outside = caches / "mine.gguf"
    outside.touch()
    for path in (str(checkpoint), str(outside), str(caches / "own"), ".", str(caches / "own" / "models" / "old.gguf")):
        assert main(["rm", path, "--yes"]) == 2
        assert "error: a model to remove must be one that slipstream ls lists, but got the path" in capsys.readouterr().err
    for name in ("*", "old", "", ALIAS, "no/such"):
        assert main(["rm", name, "--yes"]) == 2
        assert "must be in the cache, but it is not; there are old.gguf" in capsys.readouterr().err
    assert outside.exists()
    assert (caches / "own" / "models" / "old.gguf").exists()
    assert (checkpoint / "config.json").exists()


def test_show_describes_a_folder(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", str(checkpoint), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    expected = tiny("llama").num_parameters()
    assert facts["architecture"] == "llama"
    assert facts["num_parameters"] == expected
    assert facts["stored_as"] == {"F32": expected}
    assert (facts["context_len"], facts["vocab_size"], facts["has_chat_template"]) == (256, 320, True)
    assert facts["eos_tokens"] == {"2": "<|im_end|>"}
    assert facts["license"] is None
    assert facts["files"]["model.safetensors"] == (checkpoint / "model.safetensors").stat().st_size
    # Three layers of two heads of keys and values, of width eight: 96 numbers a token.
    assert facts["memory_bytes"]["float32"] == {"weights": 4 * expected, "kv_per_token": 384, "kv_full_context": 98304}
    monkeypatch.setenv("SLIPSTREAM_CPU_ISA", "none")
    assert main(["show", str(checkpoint)]) == 0
    out = capsys.readouterr().out
    assert "held as        float32 100%: 336.2 kB of weights\n" in out
    assert "multiplied by  torch: SLIPSTREAM_CPU_ISA is none\n" in out
    assert "chat template  yes\n" in out
    assert "stored as      F32 100%\n" in out


def test_show_describes_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = tiny("llama")
    file = write(model, tmp_path / "m.gguf", metadata={"general.license": "mit"})
    assert main(["show", str(file), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["num_parameters"] == model.num_parameters() == sum(facts["stored_as"].values())
    assert facts["license"] == "mit"
    assert facts["files"] == {"m.gguf": file.stat().st_size}


def test_show_loads_no_weights(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it would fail
    for name in [name for name in sys.modules if name.startswith(("slipstream.weights.safe", "slipstream.weights.loading"))]:
        monkeypatch.delitem(sys.modules, name)
    assert main(["show", str(checkpoint)]) == 0


def test_show_says_what_is_missing(caches: Path, checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", ALIAS]) == 2
    assert capsys.readouterr().err.endswith(f"hint: slipstream pull {ALIAS}\n")
    assert main(["show", "smollm2-135"]) == 2
    assert "hint: did you mean smollm2-135m?" in capsys.readouterr().err
    folder = tmp_path / "cut"
    folder.mkdir()
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes()[: 5000 if file.suffix == ".safetensors" else None])
    assert main(["show", str(folder)]) == 2
    assert "error: model.safetensors must be a whole safetensors file, but got:" in capsys.readouterr().err


def test_words_for_a_terminal() -> None:
    assert [size_text(n) for n in (0, 999, 1000, 98_362_432, 1_117_320_768, 2 * 10**12)] == [
        "0 B", "999 B", "1.0 kB", "98.4 MB", "1.1 GB", "2.0 TB",
    ]  # fmt: skip
    assert [count_text(n) for n in (999, 134_515_008, 1_543_714_304)] == ["999", "135M", "1.54B"]
    assert [ago_text(s) for s in (-5, 59, 60, 7300, 86400 * 3)] == [
        "just now",
        "just now",
        "1 minute ago",
        "2 hours ago",
        "3 days ago",
    ]
    assert columns([["a", "1"], ["bcd", "22"]], right=(1,)) == "a     1\nbcd  22"
