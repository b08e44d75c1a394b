"""Makefile and scripts: what they would run, and how they fail. Nothing is installed here."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
SCRIPTS = ("install", "check", "serve", "config-docs")


def bash(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a command in an environment of its own."""
    kept = {"PATH": os.environ["PATH"], "HOME": str(cwd)}
    return subprocess.run(command, cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False)


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A folder whose name has a space, with the scripts and no environment."""
    root = tmp_path / "a clone"
    shutil.copytree(ROOT / "scripts", root / "scripts")
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, root / name)
    return root


def broken_python(folder: Path) -> str:
    """A PATH whose every Python is too old, with the tools of a shell beside them."""
    folder.mkdir()
    for name in ("python3.11", "python3.12", "python3.13", "python3", "python"):
        (folder / name).write_text("#!/bin/sh\necho Python 3.8.1\n[ \"$1\" = --version ]\n")
        (folder / name).chmod(0o755)
    for name in ("bash", "cksum", "dirname", "cat", "rm"):
        (folder / name).symlink_to(shutil.which(name) or "")
    return str(folder)


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_parse_and_can_be_run(name: str) -> None:
    path = ROOT / "scripts" / name
    assert os.access(path, os.X_OK)
    assert bash("bash", "-n", str(path), cwd=ROOT).returncode == 0
    assert bash("bash", "-n", str(ROOT / ".ci" / "run"), cwd=ROOT).returncode == 0


def test_make_runs_the_scripts(tmp_path: Path) -> None:
    test = bash("make", "-n", "-f", str(ROOT / "Makefile"), "-C", str(ROOT), "test", cwd=tmp_path).stdout
    assert test.index("scripts/install") < test.index("scripts/check")
    serve = bash("make", "-n", "-C", str(ROOT), "serve", "MODEL=m", "ARGS=--port 9", cwd=tmp_path).stdout
    assert 'MODEL="m"' in serve
    assert "--port 9" in serve
    assert "make serve" in bash("make", "-C", str(ROOT), cwd=tmp_path).stdout


def test_without_a_new_python_install_says_so(copy: Path, tmp_path: Path) -> None:
    done = bash("bash", str(copy / "scripts" / "install"), cwd=tmp_path, PATH=broken_python(tmp_path / "bin"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: Python 3.11 or newer must be on PATH, but got Python 3.8.1\nhint: ")
    assert not (copy / ".venv").exists()


def test_a_python_that_was_asked_for_is_not_replaced(copy: Path, tmp_path: Path) -> None:
    done = bash("bash", str(copy / "scripts" / "install"), cwd=tmp_path, PYTHON="no-such-python")
    assert done.returncode == 1
    assert done.stderr.startswith("error: PYTHON must be Python 3.11 or newer, but got 'no-such-python'")


def test_a_second_install_does_nothing(copy: Path, tmp_path: Path) -> None:
    """Plain install is satisfied by the one with tools, not the other way round; a changed pyproject.toml is looked at again."""
    python = copy / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    log = tmp_path / "log"
    # Stands for the environment's interpreter: recent, with pip, and writes down what pip is told.
    python.write_text(f'#!/bin/sh\ncase "$*" in *install*) echo "$@" >>"{log}" ;; esac\n')
    python.chmod(0o755)
    install = str(copy / "scripts" / "install")

    def ran(*arguments: str) -> list[str]:
        log.write_text("")
        done = bash("bash", install, *arguments, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines()

    assert [line.split()[-1] for line in ran()] == ["."]
    assert ran() == []
    assert [line.split()[-1] for line in ran("dev")] == [".[dev]"]
    assert ran("dev") == []
    assert ran() == []
    with (copy / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert [line.split()[-1] for line in ran()] == [".[dev]"]


def test_a_failing_pip_fails_the_install(copy: Path, tmp_path: Path) -> None:
    python = copy / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$*" in *install*) exit 1 ;; esac\n')
    python.chmod(0o755)
    done = bash("bash", str(copy / "scripts" / "install"), cwd=tmp_path)
    assert done.returncode == 1
    assert "error: pip must install slipstream, but failed" in done.stderr
    assert not (copy / ".venv" / ".installed").exists()


def test_check_without_tools_and_with_a_wrong_name(copy: Path, tmp_path: Path) -> None:
    check = str(copy / "scripts" / "check")
    assert "error: the tools must be installed in .venv" in bash("bash", check, cwd=tmp_path).stderr
    for name in ("python", "pytest", "ruff", "lint-imports"):
        tool = copy / ".venv" / "bin" / name
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text('#!/bin/sh\necho "ran $(basename "$0") $*"\ncase "$*" in *mypy*) exit 1 ;; esac\n')
        tool.chmod(0o755)
    wrong = bash("bash", check, "rust", cwd=tmp_path)
    assert wrong.returncode == 2
    assert "a check must be ruff, mypy, imports or pytest, but got rust" in wrong.stderr
    everything = bash("bash", check, cwd=tmp_path)
    assert everything.returncode == 1
    assert everything.stdout.rstrip().endswith("error: these checks must pass, but failed: mypy")
    ran = [line.split()[1:4] for line in everything.stdout.splitlines() if line.startswith("ran")]
    assert [" ".join(words) for words in ran] == ["python -m ruff", "python -m mypy", "lint-imports", "python -m pytest"]
    assert bash("bash", check, "ruff", "imports", cwd=tmp_path).returncode == 0
    assert "-k name" in bash("bash", check, "pytest", "--", "-k", "name", cwd=tmp_path).stdout
