"""Compiles csrc/*.cpp into one shared library, once for each state of sources, compiler, flags and CPU.

    csrc/*.cpp ──(a compiler process each, in parallel)──> *.o ──link──> name.so.tmp ──rename──> CACHE/kernels/slip-HASH.so

A lock makes a second process wait for the first one's result instead of compiling the same; the rename makes it safe without.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

from slipstream.observe import log
from slipstream.paths import cache_dir

logger = logging.getLogger("slipstream.kernels")

SOURCES = Path(__file__).parent / "csrc"

# What each source is compiled with. Products and sums are fused only where the code says so: the results must not depend on
# what the compiler makes of one tile or another.
FLAGS = (
    "-std=c++17",
    "-O3",
    "-fPIC",
    "-pthread",
    "-fno-math-errno",
    "-ffp-contract=off",
    "-mavx2",
    "-mfma",
    "-mf16c",
    "-mbmi2",
    "-mavx512f",
    "-mavx512bw",
    "-mavx512vl",
    "-mavx512dq",
    "-mavx512vnni",
    "-mavx512bf16",
    "-mprefer-vector-width=512",
    "-mtune=native",
)

# As /proc/cpuinfo calls them.
NEEDED_CPU_FLAGS = frozenset(
    ("avx2", "fma", "f16c", "bmi2", "avx512f", "avx512bw", "avx512vl", "avx512dq", "avx512_vnni", "avx512_bf16")
)


class BuildError(Exception):
    """The library could not be built; the message says why, in one line."""


@cache
def cpu_flags() -> frozenset[str]:
    """Names of what this machine's CPUs can do; empty where the system does not tell."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return frozenset()
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    lines = [line.partition(":")[2].split() for line in text.splitlines() if line.startswith("flags")]
    return frozenset(lines[0]).intersection(*lines[1:]) if lines else frozenset()


def find_compiler() -> list[str] | None:
    """The C++ compiler's command, arguments of CXX included: what CXX names, else g++, c++ or clang++; None without one."""
    given = shlex.split(os.environ.get("CXX", ""))
    for command in (given, ["g++"], ["c++"], ["clang++"]):
        if command and (path := shutil.which(command[0])):
            return [path, *command[1:]]
    return None


def library_path(sources: Path = SOURCES) -> Path:
    """Path of the built library, which is compiled if the cache does not have it. Raises `BuildError`."""
    compiler = find_compiler()
    if compiler is None:
        raise BuildError("no C++ compiler: CXX names none, and g++, c++ and clang++ are not in PATH")
    try:
        return _cached(compiler, sources)
    except OSError as error:
        raise BuildError(f"the cache folder must take the library, but got: {error}") from None


def _cached(compiler: Sequence[str], sources: Path) -> Path:
    folder = cache_dir() / "kernels"
    target = folder / f"slip-{_digest(compiler, sources)}.so"
    if target.is_file():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _lock(folder / f"{target.name}.lock"):
        if not target.is_file():
            began = time.monotonic()
            _build(compiler, sources, target)
            seconds = time.monotonic() - began
            log.event(logger, logging.INFO, "CPU kernels compiled", library=target, compiler=compiler[0], seconds=seconds)
    return target


def _digest(compiler: Sequence[str], sources: Path) -> str:
    """Of all that the library depends on."""
    digest = hashlib.sha256()
    for path in sorted(sources.iterdir()):
        if path.suffix in (".h", ".cpp"):
            digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    said = "\n".join([*compiler, _run([*compiler, "--version"]), *FLAGS, *sorted(cpu_flags())])
    digest.update(said.encode())
    return digest.hexdigest()[:24]


def _build(compiler: Sequence[str], sources: Path, target: Path) -> None:
    files = sorted(sources.glob("*.cpp"))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=f"{target.stem}-") as scratch:
        objects = [Path(scratch) / f"{file.stem}.o" for file in files]
        commands = [
            [*compiler, *FLAGS, "-c", str(file), "-o", str(made)] for file, made in zip(files, objects, strict=True)
        ]
        with ThreadPoolExecutor(os.cpu_count() or 1) as threads:
            list(threads.map(_run, commands))
        whole = Path(scratch) / target.name
        _run([*compiler, "-shared", "-pthread", *map(str, objects), "-o", str(whole)])
        whole.replace(target)


def _run(command: Sequence[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if "error:" in line] or done.stderr.splitlines()
        raise BuildError(f"{command[0]} must compile the kernels, but ended with {done.returncode}: {' '.join(said[:1])}")
    return done.stdout


@contextlib.contextmanager
def _lock(path: Path) -> Iterator[None]:
    import fcntl  # not on every system that may import this module

    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
