"""The folder a head is made in. Every file is written whole or not at all, but answers.jsonl, which grows line by line.

settings.json         model, prompts and settings that answers and features depend on
answers.jsonl         one answer a line, as they finish
features/             shard-00000.bin ...
training/             settings.json, checkpoint.pt
head/                 config.json, model.safetensors: what --speculate eagle reads
times.json            seconds of each stage
report.json           written last
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from slipstream.errors import ConfigError


class OutFolder:
    """The folder; made where it is not there. Raises `ConfigError` where it cannot be written or holds something else."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.answers = path / "answers.jsonl"
        self.features = path / "features"
        self.training = path / "training"
        self.checkpoint = self.training / "checkpoint.pt"
        self.head = path / "head"
        self.report = path / "report.json"
        self._settings = path / "settings.json"
        try:
            path.mkdir(parents=True, exist_ok=True)
            if not self._settings.exists() and any(not one.name.endswith(".partial") for one in path.iterdir()):
                raise ConfigError(
                    f"--out must be a new folder, or one that train-draft began, but got {str(path)!r} with other files in it",
                    hint="name a new one",
                )
            probe = path / "probe.partial"
            probe.write_bytes(b"")
            probe.unlink()
        except OSError as error:
            raise ConfigError(f"--out must name a folder that can be written, but got {str(path)!r}: {error.strerror}") from None

    def claim(self, data: Mapping[str, Any], training: Mapping[str, Any]) -> None:
        """Note what is made here. Raises `ConfigError` naming what differs from what was begun."""
        for file, wanted, hint in (
            (self._settings, data, "name a new folder, or give what it was begun with"),
            (
                self.training / "settings.json",
                training,
                f"to train anew on the same answers, remove {self.training} and {self.head}",
            ),
        ):
            begun = self.read(file)
            if begun is None:
                continue
            for name, value in wanted.items():
                if not _same(begun.get(name), value):
                    label = name if name in ("MODEL", "the prompts") else f"--{name.replace('_', '-')}"
                    must = f"be what {self.path} was begun with ({_text(begun.get(name))})"
                    raise ConfigError(f"{label} must {must}, but got {_text(value)}", hint=hint)
        self.write(self._settings, data)
        self.write(self.training / "settings.json", training)

    def read(self, path: Path) -> dict[str, Any] | None:
        """A JSON file of ours; None where it is not there. Raises `ConfigError` where it is damaged."""
        try:
            value = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} must be a JSON file that train-draft wrote, but got: {error}") from None
        if not isinstance(value, dict):
            raise ConfigError(f"{path} must hold a JSON object, but holds something else")
        return value

    def write(self, path: Path, value: Mapping[str, Any]) -> None:
        """Write a JSON file."""
        path.parent.mkdir(exist_ok=True)
        with replacing(path) as partial:
            partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    @contextlib.contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        """Add what a stage takes to times.json, also where it is stopped. (Not where the process is killed.)"""
        started = time.perf_counter()
        try:
            yield
        finally:
            times = self.times()
            times[stage] = times.get(stage, 0.0) + time.perf_counter() - started
            self.write(self.path / "times.json", times)

    def times(self) -> dict[str, float]:
        """Seconds of each stage so far."""
        return self.read(self.path / "times.json") or {}


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A name to write to; what lies there becomes `path`, file or folder, when all went well."""
    partial = path.with_name(f"{path.name}.partial")
    _remove(partial)
    yield partial
    if partial.is_dir():
        _remove(path)  # a folder cannot be replaced in one go
    os.replace(partial, path)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _same(begun: object, given: object) -> bool:
    """A model may be called by another name, as long as its files are the same."""
    if isinstance(begun, dict) and isinstance(given, dict):
        return bool(begun.get("files") == given["files"])
    return begun == given


def _text(value: object) -> str:
    return f"{value.get('name')}, files {value.get('files')}" if isinstance(value, dict) else str(value)
