"""Fetches a model from the hub through huggingface_hub, into its own cache.

models--owner--name/blobs/<checksum>                     sha256 of a large file, git's sha1 of a small one
models--owner--name/snapshots/<commit>/<file> ──link──►  blobs/<checksum>
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path

from slipstream.errors import ModelError
from slipstream.weights.watch import watched

# What a model needs, and its card, which names the licence; no pickles, no other frameworks' weights.
_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model", "README.md")
_NOT_PATTERNS = ("original/*", "onnx/*", "consolidated*.safetensors")
_BLOCK_BYTES = 1 << 20
HUB_TIMEOUT_S = 10.0


def snapshot(repo_id: str, on_progress: Callable[[str, float], None] | None = None, *, verify: bool = False) -> Path:
    """Folder of the newest snapshot of `repo_id` (owner/name).

    A connection that is cut is resumed by huggingface_hub; files that are whole are not fetched again. The checksum of every
    file that is fetched is compared with the hub's, with `verify` also that of files that were there. A file that is wrong is
    removed.

    Raises `ModelError` where the repository does not exist, needs a login, cannot be reached and is not in the cache, or where
    a checksum is wrong.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.constants import HF_HUB_CACHE
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    report = on_progress or (lambda phase, share: None)
    report("fetching", 0.0)
    cache = Path(HF_HUB_CACHE)
    had = _names(cache / f"models--{repo_id.replace('/', '--')}" / "blobs")
    try:
        with _quiet(), watched(cache, _missing_bytes(repo_id, had), lambda share: report("fetching", share)):
            folder = Path(snapshot_download(repo_id, allow_patterns=list(_PATTERNS), ignore_patterns=list(_NOT_PATTERNS)))
    except GatedRepoError:
        raise ModelError(f"{repo_id} must be open to you, but the hub asks for a login", hint="set HF_TOKEN") from None
    except RepositoryNotFoundError:
        raise ModelError(f"{repo_id} must exist on the hub, but it does not (or is private)", hint="check the spelling") from None
    except LocalEntryNotFoundError:
        raise ModelError(
            f"{repo_id} must be fetched from the hub or be in its cache, but the hub cannot be reached",
            hint="check the connection, or give a folder, a .gguf file or an alias",
        ) from None
    except (HfHubHTTPError, OSError) as error:
        raise ModelError(
            f"{repo_id} must be fetched from the hub, but got: {type(error).__name__}: {error}",
            hint="try again: what is whole is kept",
        ) from None
    _verify(repo_id, folder, set() if verify else had, report)
    report("fetching", 1.0)
    return folder


def cached_snapshot(repo_id: str) -> Path | None:
    """The snapshot in the cache, asking nobody; None where there is none, or where it is not whole."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        folder = snapshot_download(
            repo_id, allow_patterns=list(_PATTERNS), ignore_patterns=list(_NOT_PATTERNS), local_files_only=True
        )
    except LocalEntryNotFoundError:
        return None
    return Path(folder)


def _names(blobs: Path) -> set[str]:
    return {path.name for path in blobs.iterdir()} if blobs.is_dir() else set()


def _missing_bytes(repo_id: str, had: set[str]) -> int:
    """Bytes that will be fetched, for progress alone; 0 where the hub does not say: what is wrong the download will tell."""
    from huggingface_hub import HfApi

    if cached_snapshot(repo_id) is not None:
        return 0
    try:
        files = HfApi().model_info(repo_id, files_metadata=True, timeout=HUB_TIMEOUT_S).siblings or []
    except Exception:  # noqa: BLE001 - what it raises depends on the HTTP client of the library's version
        return 0
    missing = [file for file in files if (file.lfs.sha256 if file.lfs else file.blob_id) not in had]
    return sum(file.size or 0 for file in missing if _wanted(file.rfilename))


def _wanted(name: str) -> bool:
    """As the hub's library reads patterns: `*` also takes slashes."""
    return any(fnmatch(name, one) for one in _PATTERNS) and not any(fnmatch(name, one) for one in _NOT_PATTERNS)


@contextmanager
def _quiet() -> Iterator[None]:
    """The hub's own progress bars are off inside: ours shows the whole."""
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()


def _verify(repo_id: str, folder: Path, known: set[str], report: Callable[[str, float], None]) -> None:
    """Compare the files with the names of their blobs, except blobs in `known`. Where a system has no links, the cache holds
    files without a checksum; those had only their sizes checked, by the hub's library.
    """
    files = [(path, path.parent / path.readlink()) for path in sorted(folder.rglob("*")) if path.is_symlink()]
    todo = [(path, blob) for path, blob in files if blob.name not in known]
    total = sum(blob.stat().st_size for _, blob in todo) or 1
    done = 0
    for path, blob in todo:
        size = blob.stat().st_size
        # git names a blob by the hash of a header and its content
        digest = hashlib.sha256() if len(blob.name) == 64 else hashlib.sha1(b"blob %d\0" % size)
        with blob.open("rb") as file:
            while block := file.read(_BLOCK_BYTES):
                digest.update(block)
                done += len(block)
                report("verifying", done / total)
        if digest.hexdigest() != blob.name:
            for file_or_link in (path, blob, blob.resolve()):  # a blob may itself be a link, to one that repositories share
                file_or_link.unlink(missing_ok=True)
            raise ModelError(
                f"{repo_id}: {path.name} must have the checksum {blob.name}, but got {digest.hexdigest()}",
                hint="the file was removed; fetch it again",
            )
