"""A tiny target of five layers with its prompts, and a reporter that can stop a run in the middle of a stage."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from slipstream.config import EngineConfig
from slipstream.train.pipeline import Pipeline
from slipstream.train.settings import TrainSettings
from tests.tiny_checkpoints import edit_json, save, tiny

NUM_LAYERS = 5
NUM_SAID = 48


@lru_cache(maxsize=1)
def target() -> str:
    """A folder. Its layers add little to the embedding, so that a token, one of few, mostly follows from the one before."""
    model = tiny("llama", num_hidden_layers=NUM_LAYERS)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                parameter.mul_(0.1)
        model.lm_head.weight[NUM_SAID:] = 0
    folder = save(model, Path(mkdtemp(prefix="slipstream-train-")) / "target")
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}"
    edit_json(folder / "tokenizer_config.json", chat_template=template)
    return str(folder)


def write_prompts(path: Path, count: int = 24) -> Path:
    """One question a line."""
    path.write_text("".join(json.dumps({"question": f"Say {i} and {i * i}"}) + "\n" for i in range(count)))
    return path


class Recorder:
    """Keeps what it is told; sets `stop` at the `stop_at`th news of `stage`."""

    def __init__(self, stage: str = "", stop_at: int = 0) -> None:
        self.stop = threading.Event()
        self.lines: list[str] = []
        self.stages: dict[str, list[float]] = {}
        self._stage = ""
        self._stop_in, self._stop_at = stage, stop_at

    def line(self, text: str) -> None:
        self.lines.append(text)

    @contextmanager
    def loading(self) -> Iterator[Callable[[str, float], None]]:
        yield lambda phase, share: None

    def begin(self, stage: str, done: float, total: float) -> None:
        self._stage = stage
        self.stages[stage] = [done]

    def at(self, done: float, note: str = "") -> None:
        self.stages[self._stage].append(done)
        if self._stage == self._stop_in and len(self.stages[self._stage]) > self._stop_at:
            self.stop.set()

    def end(self) -> None:
        self._stage = ""


def settings(out: Path, prompts: Path, **given: Any) -> TrainSettings:
    """Small ones."""
    small: dict[str, Any] = {"max_tokens": 24, "epochs": 2, "batch_tokens": 256, "held_out": 0.2, "feature_dtype": "float32"}
    return TrainSettings(prompts=(prompts,), out=out, **{**small, **given})


def config(**given: Any) -> EngineConfig:
    """Few at once, so that answers finish one after the other."""
    own: dict[str, Any] = {"model": target(), "max_num_seqs": 4, "num_threads": 1}
    return EngineConfig(**{**own, **given})


def make(made: TrainSettings, recorder: Recorder | None = None, **engine: Any) -> dict[str, Any]:
    """Run the stages; returns the report."""
    recorder = recorder or Recorder()
    return Pipeline(config(**engine), made, recorder).run(recorder.stop)
