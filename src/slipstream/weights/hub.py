"""Fetches a model from the hub through huggingface_hub, into its own cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from slipstream.errors import ModelError

# What a model needs; no pickles, no other frameworks' weights.
_PATTERNS = ("*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "tokenizer.model")
_NOT_PATTERNS = ("original/*", "onnx/*", "consolidated*.safetensors")


def snapshot(repo_id: str, on_progress: Callable[[str, float], None] | None = None) -> Path:
    """Folder of the newest snapshot of `repo_id` (owner/name).

    Raises `ModelError` where it does not exist, needs a login, or cannot be reached and is not in the cache.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    report = on_progress or (lambda phase, share: None)
    report("fetching", 0.0)
    try:
        folder = snapshot_download(repo_id, allow_patterns=list(_PATTERNS), ignore_patterns=list(_NOT_PATTERNS))
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
        raise ModelError(f"{repo_id} must be fetched from the hub, but got: {type(error).__name__}: {error}") from None
    report("fetching", 1.0)
    return Path(folder)
