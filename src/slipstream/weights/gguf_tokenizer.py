"""Makes the tokenizer of a GGUF file from its metadata.

Two families: `gpt2`, byte-level BPE with merges and a named way of cutting text into words first; and `llama`, SentencePiece's
BPE with scores, whose merges follow from the vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

from slipstream.errors import ModelError, shown
from slipstream.weights.tokenizer_files import FastTokenizer

_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = 1, 2, 3, 4, 5, 6

_QWEN2_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _words(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), behavior="isolated", invert=False),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _gpt2() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _smollm() -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2()])


# tokenizer.ggml.pre -> how text is cut before merging.
_PRE_TOKENIZERS: Mapping[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
    "gpt-2": _gpt2,
    "smollm": _smollm,
    "starcoder": _smollm,
    "refact": _smollm,
    "command-r": _smollm,
    "qwen2": lambda: _words(_QWEN2_WORDS),
    "deepseek-r1-qwen": lambda: _words(_QWEN2_WORDS),
    "llama-bpe": lambda: _words(_LLAMA3_WORDS),
    "llama3": lambda: _words(_LLAMA3_WORDS),
    "llama-v3": lambda: _words(_LLAMA3_WORDS),
}
# Composes characters first: the only normalisation any of them does.
_NFC = frozenset({"qwen2", "deepseek-r1-qwen"})
# A word that is in the vocabulary as it stands is taken whole, whatever the merges say.
_WHOLE_WORDS = frozenset({"llama-bpe", "llama3", "llama-v3"})
# llama3's tokenizer prepends BOS unless the file says no.
_BOS_BY_DEFAULT = frozenset({"llama-bpe", "llama3", "llama-v3"})


def gguf_tokenizer(metadata: Mapping[str, Any], source: str) -> FastTokenizer:
    """The tokenizer. Raises `ModelError` for a family or a word cut that is not known, or lists that do not fit."""
    family = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = _list(metadata, "tokens", str, source)
    kinds: list[int] = [_NORMAL] * len(tokens)
    if "tokenizer.ggml.token_type" in metadata:
        kinds = _list(metadata, "token_type", int, source, len(tokens))
    if family == "gpt2":
        inner, add_bos = _byte_level(metadata, tokens, source)
    elif family == "llama":
        inner, add_bos = _sentence_piece(metadata, tokens, kinds, source)
    else:
        raise ModelError(f"{source}: tokenizer.ggml.model must be gpt2 or llama, but got {shown(family)}")
    added = [
        AddedToken(text, special=kind == _CONTROL, normalized=False)
        for text, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    inner.add_special_tokens([token for token in added if token.special])
    inner.add_tokens([token for token in added if not token.special])
    bos, eos = _id(metadata, "bos", tokens, source), _id(metadata, "eos", tokens, source)
    return FastTokenizer(inner, bos, eos, bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos)))


def _list(metadata: Mapping[str, Any], key: str, kind: type, source: str, length: int | None = None) -> list[Any]:
    value = metadata.get(f"tokenizer.ggml.{key}")
    if not isinstance(value, list) or not value or not isinstance(value[0], kind):  # the format's lists are of one type
        raise ModelError(f"{source}: tokenizer.ggml.{key} must be a list of {kind.__name__}, but got {shown(value)}")
    if length is not None and len(value) != length:
        raise ModelError(f"{source}: tokenizer.ggml.{key} must have {length} entries, but got {len(value)}")
    return value


def _id(metadata: Mapping[str, Any], which: str, tokens: Sequence[str], source: str) -> int | None:
    value = metadata.get(f"tokenizer.ggml.{which}_token_id")
    if value is None:
        return None
    if not isinstance(value, int) or not 0 <= value < len(tokens):
        raise ModelError(f"{source}: tokenizer.ggml.{which}_token_id must be below {len(tokens)}, but got {shown(value)}")
    return value


def _byte_level(metadata: Mapping[str, Any], tokens: list[str], source: str) -> tuple[Tokenizer, bool]:
    pre = metadata.get("tokenizer.ggml.pre")
    if not isinstance(pre, str) or pre not in _PRE_TOKENIZERS:
        raise ModelError(
            f"{source}: tokenizer.ggml.pre must be one of {', '.join(_PRE_TOKENIZERS)}, but got {shown(pre)}",
            hint="its way of cutting text into words is not known here, and a near one would give wrong tokens",
        )
    merges = []
    for line in _list(metadata, "merges", str, source):
        left, space, right = line.partition(" ")
        if not space:
            raise ModelError(f"{source}: tokenizer.ggml.merges must hold pairs, but got {shown(line)}")
        merges.append((left, right))
    vocabulary = {text: index for index, text in enumerate(tokens)}
    inner = Tokenizer(_bpe(source, vocab=vocabulary, merges=merges, ignore_merges=pre in _WHOLE_WORDS))
    if pre in _NFC:
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = _PRE_TOKENIZERS[pre]()
    inner.decoder = decoders.ByteLevel()
    return inner, pre in _BOS_BY_DEFAULT


def _bpe(source: str, **options: Any) -> models.BPE:
    try:
        return models.BPE(**options)
    except Exception as error:  # noqa: BLE001 - all the library raises, for a merge of a piece that is no token, say
        raise ModelError(f"{source}: vocabulary and merges must fit together, but got: {error}") from None


def _sentence_piece(metadata: Mapping[str, Any], tokens: list[str], kinds: Sequence[int], source: str) -> tuple[Tokenizer, bool]:
    scores: list[float] = _list(metadata, "scores", float, source, len(tokens))
    vocabulary = {text: index for index, text in enumerate(tokens)}
    unknown = next((text for text, kind in zip(tokens, kinds, strict=True) if kind == _UNKNOWN), None)
    model = _bpe(
        source,
        vocab=vocabulary,
        merges=_merges_by_score(vocabulary, scores, kinds),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=any(kind == _BYTE for kind in kinds),
    )
    inner = Tokenizer(model)
    prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend("▁")] if prefix else []
    inner.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    undo: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    inner.decoder = decoders.Sequence([*undo, decoders.Strip(" ", 1, 0)] if prefix else undo)
    return inner, True


def _merges_by_score(vocabulary: Mapping[str, int], scores: Sequence[float], kinds: Sequence[int]) -> list[tuple[str, str]]:
    # SentencePiece merges the adjacent pair whose union scores best. Listing, for every token, its splits into two tokens, best
    # union first (and the earlier pieces first among equals), gives the same order of merging.
    ranked: list[tuple[float, int, int, str, str]] = []
    for text, index in vocabulary.items():
        if kinds[index] not in (_NORMAL, _USER_DEFINED, _UNUSED):
            continue
        for cut in range(1, len(text)):
            left, right = text[:cut], text[cut:]
            if left in vocabulary and right in vocabulary:
                ranked.append((-scores[index], vocabulary[left], vocabulary[right], left, right))
    ranked.sort()
    return [(left, right) for _, _, _, left, right in ranked]
