"""Small tokenizers for tests: a fake one in plain Python, and the two families that models use, on the real library."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from slipstream.weights.tokenizer_files import FastTokenizer

CORPUS = [
    "one two three four five six seven eight nine ten eleven twelve",
    "the sea is wide, the sea is blue; alpha beta gamma delta epsilon",
    "naïve café Ünïcödé 你好世界 你们好 😀😁🚀 👩‍💻 grüße",
    'def f(x):\n    return {"a": [1, 2, 3]}\n\n',
]
BOS, EOS, END = 0, 1, 2
SPECIALS = ("<bos>", "<eos>", "<|end|>")


class FakeTokenizer:
    """Specials, then the 256 bytes, then `pieces` (which may break UTF-8 anywhere). Encodes by longest match."""

    bos_token_id, eos_token_id = BOS, EOS
    special_ids = frozenset(range(len(SPECIALS)))

    def __init__(self, pieces: Sequence[bytes] = (), add_bos: bool = False) -> None:
        self.pieces = [*(name.encode() for name in SPECIALS), *(bytes([b]) for b in range(256)), *pieces]
        self.vocab_size = len(self.pieces)
        self.add_bos = add_bos
        self._ids = {piece: index for index, piece in enumerate(self.pieces)}
        self._longest = max(map(len, self.pieces))

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        data, at = text.encode(), 0
        ids = [BOS] if add_special_tokens and self.add_bos else []
        while at < len(data):
            size = next(n for n in range(self._longest, 0, -1) if data[at : at + n] in self._ids and n <= len(data) - at)
            ids.append(self._ids[data[at : at + size]])
            at += size
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")

    def token_text(self, token_id: int) -> str:
        return self.decode([token_id], False)

    def token_bytes(self, token_id: int) -> bytes:
        return self.pieces[token_id] if 0 <= token_id < len(self.pieces) else b""


@cache
def byte_level(add_bos: bool = False) -> FastTokenizer:
    """Byte-level BPE, trained on a few lines: half its multi-byte characters fall apart into bytes."""
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    inner.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[AddedToken(name, special=True) for name in SPECIALS],
        show_progress=False,
    )
    inner.train_from_iterator(CORPUS, trainer)
    return FastTokenizer(inner, BOS, EOS, add_bos)


@cache
def sentence_piece(add_bos: bool = True) -> FastTokenizer:
    """SentencePiece-like BPE with byte fallback, a leading space put before every text and stripped from every decoding."""
    pieces = [
        *SPECIALS,
        "<unk>",
        *(f"<0x{b:02X}>" for b in range(256)),
        "▁",
        *"abcdefghijklmnopqrstuvwxyz",
        "é",
        "▁t",
        "▁th",
        "▁the",
    ]
    merges = [("▁", "t"), ("▁t", "h"), ("▁th", "e")]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    inner = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    inner.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    undo = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(undo)
    inner.add_special_tokens([AddedToken(name, special=True, normalized=False) for name in SPECIALS])
    return FastTokenizer(inner, BOS, EOS, add_bos)
