"""Hub ids, against a hub of our own: fetched once, resumed, verified, refused."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.errors import ModelError
from slipstream.weights.hub import _verify
from tests.fake_hub import COMMIT, Hub, run_python, serving
from tests.tiny_checkpoints import save, tiny

LOAD_TEXT = """
import sys
from slipstream.errors import ModelError
from slipstream.weights import load_text
try:
    loaded = load_text(sys.argv[1])
    print(loaded.name, loaded.architecture)
except ModelError as error:
    print("refused:", error)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = save(tiny("llama"), tmp_path_factory.mktemp("repo"))
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    (folder / "README.md").write_text("---\nlicense: mit\n---\n# A model\n")
    return folder


@pytest.fixture
def hub(folder: Path) -> Iterator[Hub]:
    with serving(folder) as hub:
        yield hub


def load_in_process(repo: str, endpoint: str, home: Path, **environment: str) -> str:
    done = run_python("-c", LOAD_TEXT, repo, endpoint=endpoint, home=home, **environment)
    return done.stdout.strip() or done.stderr


def cli(hub: Hub, home: Path, *argv: str, **environment: str) -> tuple[int, str, str]:
    own = {"SLIPSTREAM_CACHE": str(home / "own"), **environment}
    done = run_python("-m", "slipstream.cli.main", *argv, endpoint=hub.url, home=home, **own)
    return done.returncode, done.stdout, done.stderr


def test_a_hub_id_is_fetched_and_then_works_offline(hub: Hub, tmp_path: Path) -> None:
    assert load_in_process("tiny/llama", hub.url, tmp_path) == "tiny/llama llama"
    assert any(path.endswith("model.safetensors") for path in hub.asked)
    assert not any(path.endswith(".bin") for path in hub.asked), "pickles must not be fetched"
    count = len(hub.asked)
    assert load_in_process("tiny/llama", hub.url, tmp_path, HF_HUB_OFFLINE="1") == "tiny/llama llama"
    assert len(hub.asked) == count


def test_offline_and_not_in_the_cache(hub: Hub, tmp_path: Path) -> None:
    said = load_in_process("tiny/llama", hub.url, tmp_path, HF_HUB_OFFLINE="1")
    assert said.startswith("refused: tiny/llama must be fetched from the hub or be in its cache, but the hub cannot be reached")
    assert "hint:" in said


def test_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    assert "the hub cannot be reached" in load_in_process("tiny/llama", "http://127.0.0.1:9", tmp_path)


def test_a_repository_that_is_not_there(hub: Hub, tmp_path: Path) -> None:
    said = load_in_process("no/such-model", hub.url, tmp_path)
    assert said.startswith("refused: no/such-model must exist on the hub")


def test_a_gated_repository(hub: Hub, tmp_path: Path) -> None:
    said = load_in_process("gated/model", hub.url, tmp_path)
    assert said.startswith("refused: gated/model must be open to you")


def test_a_connection_that_is_cut_is_resumed(folder: Path, tmp_path: Path) -> None:
    """The library writes ten MiB at a time: what came behind the last whole one is asked for again."""
    block = 10 * 2**20
    repo = tmp_path / "repo"
    shutil.copytree(folder, repo)
    (repo / "model.safetensors").write_bytes(bytes(range(256)) * (block // 256 + 4096))
    with serving(repo) as hub:
        hub.cut_at = block + 1000
        assert load_in_process("tiny/llama", hub.url, tmp_path) == "tiny/llama llama"
        assert hub.cut_at is None
        assert f"bytes={block}-" in hub.ranges
    got = tmp_path / "hub" / "models--tiny--llama" / "snapshots" / COMMIT / "model.safetensors"
    assert got.read_bytes() == (repo / "model.safetensors").read_bytes()


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_wrong_checksum_is_refused_and_not_kept(name: str, hub: Hub, tmp_path: Path) -> None:
    hub.damaged = name
    said = load_in_process("tiny/llama", hub.url, tmp_path)
    assert said.startswith(f"refused: tiny/llama: {name} must have the checksum ")
    assert not (tmp_path / "hub" / "models--tiny--llama" / "snapshots" / COMMIT / name).exists()
    hub.damaged = ""
    assert load_in_process("tiny/llama", hub.url, tmp_path) == "tiny/llama llama"


def test_pull_list_show_and_remove(hub: Hub, tmp_path: Path) -> None:
    code, out, err = cli(hub, tmp_path, "show", "tiny/llama")
    assert (code, out) == (2, "")
    assert err == "error: tiny/llama must have been fetched, but it is not in the cache\nhint: slipstream pull tiny/llama\n"
    assert not any("tiny" in path for path in hub.asked)

    code, out, err = cli(hub, tmp_path, "pull", "tiny/llama")
    snapshot = tmp_path / "hub" / "models--tiny--llama" / "snapshots" / COMMIT
    assert (code, out) == (0, f"{snapshot}\n"), err
    assert err.splitlines()[0] == "fetching: 0%"
    assert "verifying: " in err

    blob = (snapshot / "model.safetensors").resolve()
    data = blob.read_bytes()
    blob.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))  # a disk that forgets
    code, _, err = cli(hub, tmp_path, "pull", "tiny/llama")
    assert code == 2
    assert "model.safetensors must have the checksum" in err
    assert "(incomplete)" in cli(hub, tmp_path, "ls")[1]
    assert cli(hub, tmp_path, "pull", "tiny/llama")[0] == 0
    assert blob.read_bytes() == data

    code, out, _ = cli(hub, tmp_path, "show", "tiny/llama", HF_HUB_OFFLINE="1")
    assert code == 0
    assert "license        mit\n" in out
    code, _, err = cli(hub, tmp_path, "rm", "tiny/llama", "--yes")
    assert code == 0
    assert err.startswith("removed tiny/llama, which freed ")
    assert not (tmp_path / "hub" / "models--tiny--llama").exists()
    assert cli(hub, tmp_path, "ls")[1] == ""


def test_blobs_that_repositories_share_are_verified_by_their_own_names(tmp_path: Path) -> None:
    """Newer caches keep a large file once, under another hash; the repository's blob is then a link to it."""
    content = b"weights"
    digest = hashlib.sha256(content).hexdigest()
    shared = tmp_path / "blobs" / "aa" / "another-hash"
    blob = tmp_path / "models--a--b" / "blobs" / digest
    link = tmp_path / "models--a--b" / "snapshots" / COMMIT / "model.safetensors"
    for path in (shared, blob, link):
        path.parent.mkdir(parents=True)
    shared.write_bytes(content)
    blob.symlink_to(shared)
    link.symlink_to(Path("..", "..", "blobs", digest))
    seen: list[float] = []
    _verify("a/b", link.parent, set(), lambda phase, share: seen.append(share))
    assert seen == [1.0]
    shared.write_bytes(b"damaged")
    with pytest.raises(ModelError, match=f"must have the checksum {digest}"):
        _verify("a/b", link.parent, set(), lambda phase, share: None)
    assert not shared.exists()
