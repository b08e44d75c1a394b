"""What has been fetched: the hub's cache and our own folder. Lists it and removes from it, and touches nothing else.

huggingface_hub's cache    owner/name                                       through that library
our models folder          alias       M.gguf, M.gguf.lock, M.gguf.parts/ ...   everything that begins with the file's name
                           M.gguf      a file that no alias names any more
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from slipstream.errors import ConfigError, ModelError, shown
from slipstream.weights.packages import ALIASES, models_dir
from slipstream.weights.source import is_hub_id
from slipstream.weights.watch import folder_bytes


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model, or what an interrupted download left of one.

    Attributes:
        name: what `--model` takes.
        source: "alias", "hub" or "file".
        path: what is removed with it: a .gguf file, or the hub's folder of the repository.
        num_bytes: on disk, leftovers included.
        last_used_s: seconds since the epoch, as the file system knows it.
        is_complete: whether it can be loaded without fetching more.
    """

    name: str
    source: Literal["alias", "hub", "file"]
    path: Path
    num_bytes: int
    last_used_s: float
    is_complete: bool


def cached_models() -> list[CachedModel]:
    """All of them, by name."""
    return sorted([*_own_models(), *_hub_models()], key=lambda model: model.name.lower())


def find_cached(name: str) -> CachedModel:
    """The one of that name. Raises `ModelError` where there is none, `ConfigError` for a path: those are not ours to remove."""
    models = cached_models()
    for model in models:
        if model.name == name:
            return model
    if name and name not in ALIASES and Path(name).expanduser().exists():
        raise ConfigError(
            f"a model to remove must be one that slipstream ls lists, but got the path {shown(name)}",
            hint="what was not fetched is yours to remove",
        )
    known = f"; there are {', '.join(model.name for model in models)}" if models else ", which is empty"
    raise ModelError(f"{shown(name)} must be in the cache, but it is not{known}", hint="slipstream ls")


def remove(model: CachedModel) -> None:
    """Remove it from disk. Raises `ModelError` where the system refuses."""
    try:
        if model.source == "hub":
            _remove_from_hub(model)
        else:
            for path in _belonging(model.path):
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
    except OSError as error:
        raise ModelError(f"{model.name} must be removable, but got: {error}") from None


def _own_models() -> list[CachedModel]:
    folder = models_dir()
    if not folder.is_dir():
        return []
    found: list[CachedModel] = []
    sizes = {entry.file: entry.num_bytes for entry in ALIASES.values()}
    names = {entry.file: alias for alias, entry in ALIASES.items()}
    others = {path.name for path in folder.glob("*.gguf")} - names.keys()
    for file in [*names, *others]:
        path = folder / file
        pieces = [piece for piece in _belonging(path) if not piece.name.endswith(".lock")]
        if pieces:
            size = sum(folder_bytes(piece) if piece.is_dir() else piece.stat().st_size for piece in pieces)
            used = max(piece.stat().st_atime for piece in pieces)
            is_whole = path.is_file() and path.stat().st_size == sizes.get(file, path.stat().st_size)
            alias = names.get(file)
            found.append(CachedModel(alias or file, "alias" if alias else "file", path, size, used, is_whole))
    return found


def _belonging(path: Path) -> Sequence[Path]:
    """The file itself and what its download keeps beside it."""
    return [*path.parent.glob(path.name), *path.parent.glob(f"{path.name}.*")]


def _hub_models() -> list[CachedModel]:
    from huggingface_hub import constants, scan_cache_dir
    from huggingface_hub.errors import CacheNotFound

    from slipstream.weights.hub import cached_snapshot

    try:
        repositories = scan_cache_dir(constants.HF_HUB_CACHE).repos
    except CacheNotFound:
        return []
    return [
        CachedModel(
            one.repo_id,
            "hub",
            one.repo_path,
            max(
                one.size_on_disk, folder_bytes(one.repo_path)
            ),  # the first without cut downloads, the second without shared blobs
            one.last_accessed,
            cached_snapshot(one.repo_id) is not None,
        )
        for one in repositories
        if one.repo_type == "model" and is_hub_id(one.repo_id)
    ]


def _remove_from_hub(model: CachedModel) -> None:
    from huggingface_hub import constants, scan_cache_dir

    info = scan_cache_dir(constants.HF_HUB_CACHE)
    for one in info.repos:
        if one.repo_path == model.path and one.revisions:
            # Of this repository alone: a copy of it under another name has revisions of the same names.
            own = replace(info, repos=frozenset({one}))
            own.delete_revisions(*(revision.commit_hash for revision in one.revisions)).execute()
    if model.path.is_dir():  # what a download left that never came to a revision
        shutil.rmtree(model.path)
