"""The tokenizer of a checkpoint, on the `tokenizers` library; read from a tokenizer.json or made by gguf_tokenizer.py."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from slipstream.errors import ModelError, shown
from slipstream.text.pieces import spelling


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
        self.vocab_size: int = 1 + max(inner.get_vocab(with_added_tokens=True).values(), default=-1)
        added = inner.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._first = [bos_token_id] if add_bos and bos_token_id is not None else []
        spelled = spelling(None if inner.decoder is None else json.loads(inner.decoder.__getstate__()))
        if spelled is None:
            raise ModelError(
                "the tokenizer's decoder must be byte-level or sentencepiece-like, but it is neither",
                hint="text could not be streamed without changing what was already sent",
            )
        self._spelling = spelled
        self._bytes: dict[int, bytes] = {}

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

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes one token adds to a text behind other text; empty for an id the tokenizer does not know."""
        data = self._bytes.get(token_id)
        if data is None:
            piece = self.inner.id_to_token(token_id)
            data = self._bytes[token_id] = b"" if piece is None else self._spelling(piece)
        return data


def read_json(path: Path) -> Mapping[str, Any]:
    """The object in a JSON file. Raises `ModelError` naming the file."""
    try:
        value = json.loads(path.read_text("utf-8"))
    except FileNotFoundError:
        raise ModelError(f"{path.name} must be in the model's folder, but it is missing") from None
    except (OSError, ValueError, RecursionError) as error:  # the last: nested too deeply
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
    except Exception as error:  # noqa: BLE001 - all the library raises
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
