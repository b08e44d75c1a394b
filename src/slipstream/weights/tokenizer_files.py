"""The tokenizer of a checkpoint, on the `tokenizers` library; read from a tokenizer.json or made by gguf_tokenizer.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from slipstream.errors import ModelError, shown


class FastTokenizer:
    """Satisfies `text.tokenizer.Tokenizer`.

    Args:
        inner: the library's tokenizer; its post-processor adds what `add_special_tokens` asks for.
        bos_token_id, eos_token_id: None where the checkpoint has none.
        add_bos: prepend BOS where `add_special_tokens` is asked for; for tokenizers without a post-processor that does it.
    """

    def __init__(self, inner: Tokenizer, bos_token_id: int | None, eos_token_id: int | None, add_bos: bool = False) -> None:
        self.inner = inner
        self.bos_token_id = bos_token_id
        self.eos_token_id = eos_token_id
        self.vocab_size: int = inner.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(
            token_id for token_id, token in inner.get_added_tokens_decoder().items() if token.special
        )
        self._first = [bos_token_id] if add_bos and bos_token_id is not None else []

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; special tokens written out in it are recognised."""
        ids: list[int] = self.inner.encode(text, add_special_tokens=add_special_tokens).ids
        return self._first + ids if add_special_tokens else ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Text of `ids`; ids the tokenizer does not know are left out."""
        text: str = self.inner.decode(list(ids), skip_special_tokens=skip_special_tokens)
        return text

    def token_text(self, token_id: int) -> str:
        """Text of one token alone; an incomplete UTF-8 sequence shows as U+FFFD."""
        return self.decode([token_id], skip_special_tokens=False)


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file. Raises `ModelError` naming the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.name} must be in the model's folder, but it is missing") from None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} must be readable JSON, but got: {error}") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path.name} must hold a JSON object, but got {shown(value)}")
    return value


def folder_tokenizer(folder: Path, config_bos: int | None) -> tuple[FastTokenizer, str | None]:
    """Tokenizer and chat template of a folder. Raises `ModelError` naming the file that is missing or damaged."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        old = folder / "tokenizer.model"
        hint = "a tokenizer.model alone is not enough; convert it to tokenizer.json" if old.is_file() else None
        raise ModelError("tokenizer.json must be in the model's folder, but it is missing", hint=hint)
    try:
        inner = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ModelError(f"tokenizer.json must be a tokenizer, but got: {error}") from None
    inner.no_truncation()
    inner.no_padding()
    settings_path = folder / "tokenizer_config.json"
    settings = read_json(settings_path) if settings_path.is_file() else {}
    bos = _token_id(inner, settings.get("bos_token"))
    tokenizer = FastTokenizer(inner, config_bos if bos is None else bos, _token_id(inner, settings.get("eos_token")))
    return tokenizer, _chat_template(folder, settings)


def _token_id(inner: Tokenizer, token: object) -> int | None:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    token_id: int | None = inner.token_to_id(text)
    return token_id


def _chat_template(folder: Path, settings: Mapping[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.is_file():
        return path.read_text("utf-8")
    given = settings.get("chat_template")
    if isinstance(given, list):  # several named ones; "default" is the one for chat
        named = {one.get("name"): one.get("template") for one in given if isinstance(one, dict)}
        given = named.get("default")
    return given if isinstance(given, str) else None
