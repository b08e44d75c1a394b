"""Compiling and loading: once for each state of the sources, whole or not at all, and without a compiler torch goes on."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from slipstream.errors import InvariantBroken, ModelError
from slipstream.kernels.cpu import build
from slipstream.kernels.cpu.build import BuildError, find_compiler, library_path
from slipstream.kernels.cpu.library import ABI, Kernels, kernels

SMALL = f"""
extern "C" int slip_abi() {{ return {ABI}; }}
extern "C" const char* slip_error(int) {{ return "text"; }}
"""

BUILD = """
import logging, sys
from pathlib import Path
logging.basicConfig(level=logging.INFO)
from slipstream.kernels.cpu.build import library_path
print(library_path(Path(sys.argv[1])))
"""


@pytest.fixture
def sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small library's, with an empty cache."""
    if find_compiler() is None:
        pytest.skip("there is no C++ compiler")
    monkeypatch.setenv("SLIPSTREAM_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "csrc"
    folder.mkdir()
    (folder / "small.cpp").write_text(SMALL)
    (folder / "other.cpp").write_text('#include "other.h"\nextern "C" int other() { return OTHER; }\n')
    (folder / "other.h").write_text("#define OTHER 7\n")
    return folder


@pytest.fixture
def fresh() -> Iterator[None]:
    """kernels() looks again, in the test and after it."""
    kernels.cache_clear()
    yield
    kernels.cache_clear()


def made(tmp_path: Path) -> list[str]:
    """What is in the cache."""
    return sorted(path.name for path in (tmp_path / "cache" / "kernels").iterdir() if path.suffix != ".lock")


def test_a_library_is_compiled_once(sources: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="slipstream.kernels"):
        first = library_path(sources)
        inode = first.stat().st_ino
        assert library_path(sources) == first
    assert first.stat().st_ino == inode
    assert made(tmp_path) == [first.name]
    assert [record.getMessage() for record in caplog.records] == ["CPU kernels compiled"]
    assert Kernels(first).path == first


@pytest.mark.parametrize("change", ["source", "header", "flags", "cpu", "compiler"])
def test_a_change_makes_another_library(sources: Path, change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = library_path(sources)
    if change == "source":
        (sources / "small.cpp").write_text(SMALL + "\n// changed\n")
    elif change == "header":
        (sources / "other.h").write_text("#define OTHER 8\n")
    elif change == "flags":
        monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, "-DCHANGED"))
    elif change == "cpu":
        monkeypatch.setattr(build, "cpu_flags", lambda: frozenset({"avx1024"}))
    else:
        compiler = find_compiler()
        assert compiler is not None
        monkeypatch.setenv("CXX", f"{compiler[0]} -DCHANGED")
    second = library_path(sources)
    assert second != first
    assert made(tmp_path) == sorted((first.name, second.name))


def test_two_processes_at_once_compile_it_once(sources: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", BUILD, str(sources)]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=60) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert said[0][0] == said[1][0]
    assert made(tmp_path) == [Path(said[0][0].strip()).name]
    assert sum(errors.count("CPU kernels compiled") for _, errors in said) == 1


def test_a_failed_build_leaves_nothing(sources: Path, tmp_path: Path) -> None:
    (sources / "small.cpp").write_text("int broken( {\n")
    with pytest.raises(BuildError, match=r"must compile the kernels, but ended with 1: .*small\.cpp.*error:"):
        library_path(sources)
    assert made(tmp_path) == []


def test_a_cache_that_cannot_be_written(sources: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(BuildError, match="the cache folder must take the library"):
        library_path(sources)


def test_another_abi_is_refused(sources: Path) -> None:
    (sources / "small.cpp").write_text(SMALL.replace(f"return {ABI}", "return 99"))
    with pytest.raises(BuildError, match=f"must have ABI {ABI}, but has 99"):
        Kernels(library_path(sources))


def test_errors_of_functions_have_their_text(sources: Path) -> None:
    library = Kernels(library_path(sources))
    with pytest.raises(InvariantBroken, match="arguments of other must be right, but are not: text"):
        library.bind("other")()
    with pytest.raises(AttributeError):
        library.bind("missing")


def no_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))


def no_isa(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("SLIPSTREAM_CPU_ISA", "none")


def old_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("slipstream.kernels.cpu.library.cpu_flags", lambda: build.NEEDED_CPU_FLAGS - {"avx512_bf16"})


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("lacking", "reason"),
    [(no_compiler, "no C++ compiler"), (no_isa, "SLIPSTREAM_CPU_ISA is none"), (old_cpu, "the CPU has no avx512_bf16")],
)
def test_what_is_missing_is_said_once(
    lacking: object, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("SLIPSTREAM_CPU_ISA", raising=False)
    if lacking is no_compiler:  # the CPU may lack something too, and that is looked at first
        monkeypatch.setattr("slipstream.kernels.cpu.library.cpu_flags", lambda: build.NEEDED_CPU_FLAGS)
    assert callable(lacking)
    lacking(monkeypatch, tmp_path)
    with caplog.at_level(logging.INFO, logger="slipstream.kernels"):
        assert kernels() is None
        assert kernels() is None
    (record,) = caplog.records
    assert record.getMessage() == "CPU kernels are off, torch does the work"
    assert reason in record.__dict__["fields"]["reason"]


@pytest.mark.usefixtures("fresh")
def test_a_matrix_without_kernels_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    from slipstream.kernels.cpu.matrix import PackedMatrix
    from slipstream.kernels.cpu.rows import RowKernels

    monkeypatch.setenv("SLIPSTREAM_CPU_ISA", "none")
    with pytest.raises(ModelError, match="must have the CPU kernels, but they are off"):
        PackedMatrix.pack([torch.zeros(4, 4)])
    with pytest.raises(ModelError, match="must have the CPU kernels, but they are off"):
        RowKernels()


def test_cxx_is_taken_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mine = tmp_path / "mine"
    mine.write_text("#!/bin/sh\n")
    mine.chmod(0o755)
    monkeypatch.setenv("CXX", f"{mine} --wrapped")
    assert find_compiler() == [str(mine), "--wrapped"]
    monkeypatch.setenv("CXX", str(tmp_path / "gone"))
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_compiler() is None
    os.symlink(mine, tmp_path / "c++")
    assert find_compiler() == [str(tmp_path / "c++")]
