"""n-gram drafts: what followed the last time the row's newest tokens were seen. In its own tokens, then in a corpus.

    history    a b c d e f a b c d x y . . . a b c      root c at position L; max_n = 4, width = 3
    suffix                               n=4 . a b c    not seen before
                                         n=3   a b c    seen twice; the later one counts
    match                  a b c
    draft                        d x y

All rows are searched at once, on the device, by comparing the history with itself shifted; nothing depends on what is found but
values. A draft ends where the known tokens end. (Prompt lookup decoding, Saxena 2023; LLMA, Yang et al. 2023.)
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.attention.kv import KVCache, LayerKV
from slipstream.errors import ConfigError, shown
from slipstream.relay import DraftInput, RelayPayload, RelaySpec
from slipstream.speculate.base import Draft, StepContext, Verdict
from slipstream.speculate.registry import Target, integer_option, known_options

MAX_WIDTH = 64
MAX_N = 16
HASH_BASE = 0x2545F4914F6CDD1D  # odd, so that multiplying by it loses nothing of 64 bits


class NGram:
    """Proposes a chain of at most `width` tokens.

    Args:
        width: most tokens it proposes.
        min_n, max_n: shortest and longest suffix it looks for.
        corpus: searched where the row's own tokens have no match; None: there is none.
    """

    relay = RelaySpec()
    taps: tuple[int, ...] = ()
    shifted_kv = False
    kv_layers: tuple[LayerKV, ...] = ()
    kv: KVCache | None = None
    kv_behind = 0
    catches_up = False
    num_parameters = 0
    weight_bytes = 0

    def __init__(self, width: int = 4, min_n: int = 1, max_n: int = 4, corpus: Corpus | None = None) -> None:
        self.depth = self.num_nodes = width
        self.max_writes = 1 + width
        self._min_n = min_n
        self._max_n = max_n
        self._corpus = corpus

    def propose(self, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        """What followed the most recent match of each row's longest suffix; 0 nodes where nothing matches."""
        if width == 0:
            return Draft(ctx.slots.new_empty((len(ctx.slots), 0)), torch.zeros_like(ctx.slots))
        # The root is in the history already: the step that sampled it wrote it behind what it committed.
        tokens = ctx.history[:, : max(ctx.max_lens) + 1].index_select(0, ctx.slots)
        last = ctx.lengths[:, None]
        suffix = _before(tokens, last, self._max_n)
        following = last + 1 - _distance(tokens, last, suffix, self._min_n)
        step = torch.arange(width, device=tokens.device)
        draft = tokens.gather(1, (following + step).clamp(max=tokens.shape[1] - 1))
        # Without a match `following` lies behind the root, and nothing is known from there on.
        num_nodes = (last + 1 - following)[:, 0].clamp(max=width)
        if self._corpus is not None:
            other, num_other = self._corpus.continuations(suffix, self._min_n, width)
            own = num_nodes > 0
            draft, num_nodes = torch.where(own[:, None], draft, other), torch.where(own, num_nodes, num_other)
        return Draft(draft, num_nodes)

    def observe(self, ctx: StepContext, verdict: Verdict, taps: Tensor | None) -> DraftInput | None:
        """Nothing to learn: the history is all there is."""
        return None


def _before(tokens: Tensor, last: Tensor, count: int) -> Tensor:
    """The `count` tokens of each row up to position `last` [R, 1], newest first: [R, count]; -1 before the first."""
    at = last - torch.arange(count, device=tokens.device)
    return torch.where(at >= 0, tokens.gather(1, at.clamp(min=0)), -1)


def _distance(tokens: Tensor, last: Tensor, suffix: Tensor, min_n: int) -> Tensor:
    """How far before the root the match ends: [R, 1] int64, at least 1; 0 where no suffix of min_n tokens or more matches.

    Args:
        tokens: [R, P] int64; what lies behind position `last` is not looked at.
        last: [R, 1] int64, position of the root.
        suffix: [R, max_n] int64, tokens up to the root, newest first.
        min_n: shortest suffix that counts.
    """
    num_places = tokens.shape[1]
    narrow = tokens.to(torch.int32)  # half the memory to compare
    wanted = suffix.to(torch.int32)
    place = torch.arange(num_places, dtype=torch.int32, device=tokens.device)
    matches = (narrow == wanted[:, :1]) & (place < last)
    length = matches.to(torch.int32)
    for back in range(1, min(suffix.shape[1], num_places)):
        # Matched up to `back` tokens before the end, and one more; `matches` drops what would begin before position 0.
        matches = matches[:, 1:] & (narrow[:, : num_places - back] == wanted[:, back : back + 1])
        length[:, back:] += matches
    # The longest first, the latest of these: one maximum over both.
    best = length.mul_(num_places).add_(place).amax(1, keepdim=True).to(torch.int64)
    return torch.where(best >= min_n * num_places, last - best % num_places, 0)


class Corpus:
    """A text that never changes, indexed by the hash of every run of 1 to max_n tokens.

    For each n the hashes are sorted, and of equal ones the last occurrence is kept: a look-up is one binary search. Two runs with
    one hash of 64 bits would make a bad draft, and no wrong answer.

    Args:
        tokens: [T] int64, at least 2.
        max_n: longest run.
    """

    def __init__(self, tokens: Tensor, max_n: int) -> None:
        self._tokens = tokens
        self._keys: list[Tensor] = []
        self._following: list[Tensor] = []
        hashed = torch.zeros_like(tokens)
        for n in range(1, min(max_n, len(tokens) - 1) + 1):
            # Of the runs that end at each place: the oldest token counts with the highest power.
            hashed = hashed[1:] if n > 1 else hashed
            hashed = hashed + (tokens[: len(hashed)] + 1) * pow(HASH_BASE, n - 1, 2**63)
            ends = torch.arange(n - 1, len(tokens) - 1, device=tokens.device)  # behind the last token nothing follows
            keys, order = torch.sort(hashed[: len(ends)], stable=True)
            latest = torch.ones_like(keys, dtype=torch.bool)
            latest[:-1] = keys[1:] != keys[:-1]
            self._keys.append(keys[latest].contiguous())
            self._following.append(ends[order][latest].contiguous() + 1)

    def continuations(self, suffix: Tensor, min_n: int, width: int) -> tuple[Tensor, Tensor]:
        """What follows the longest known suffix [R, max_n] (newest first): tokens [R, width] and how many count [R]."""
        following = torch.full_like(suffix[:, 0], len(self._tokens))
        hashed = torch.zeros_like(following)
        for n, (keys, places) in enumerate(zip(self._keys, self._following, strict=True), 1):
            token = suffix[:, n - 1]
            hashed = hashed + (token + 1) * pow(HASH_BASE, n - 1, 2**63)
            if n < min_n:
                continue
            at = torch.searchsorted(keys, hashed).clamp(max=len(keys) - 1)
            known = (keys[at] == hashed) & (token >= 0)
            following = torch.where(known, places[at], following)
        step = torch.arange(width, device=suffix.device)
        tokens = self._tokens[(following[:, None] + step).clamp(max=len(self._tokens) - 1)]
        return tokens, (len(self._tokens) - following).clamp(max=width)


@dataclass(frozen=True, slots=True)
class Options:
    """`--speculate ngram:width=4,min_n=1,max_n=4,corpus=FILE`; see `NGram`."""

    width: int
    min_n: int
    max_n: int
    corpus: Path | None


def parse(options: Mapping[str, str]) -> Options:
    """All of them may be left out. Raises `ConfigError`."""
    known_options("ngram", options, "width", "min_n", "max_n", "corpus")
    width = integer_option("ngram", options, "width", 4, MAX_WIDTH)
    max_n = integer_option("ngram", options, "max_n", 4, MAX_N)
    min_n = integer_option("ngram", options, "min_n", 1, max_n)
    corpus = Path(options["corpus"]) if "corpus" in options else None
    if corpus is not None and not corpus.is_file():
        raise ConfigError(f"the corpus of --speculate ngram must be readable, but there is no file {str(corpus)!r}")
    return Options(width, min_n, max_n, corpus)


def build(options: Mapping[str, str], target: Target) -> NGram:
    """An `NGram` of these options. Raises `ConfigError`."""
    given = parse(options)
    if given.corpus is None:
        return NGram(given.width, given.min_n, given.max_n)
    tokens = torch.tensor(corpus_ids(given.corpus, target), dtype=torch.int64, device=target.device)
    return NGram(given.width, given.min_n, given.max_n, Corpus(tokens, given.max_n))


def corpus_ids(path: Path, target: Target) -> list[int]:
    """Token ids of a corpus: a .json file holds a list of them, any other file is text. Raises `ConfigError`."""
    try:
        text = path.read_text("utf-8")
        found = json.loads(text) if path.suffix == ".json" else _encoded(text, path, target)
    except (OSError, ValueError, RecursionError) as error:  # the last: nested too deeply
        raise ConfigError(f"the corpus of --speculate ngram must be readable, but got: {error}") from None
    if not isinstance(found, list) or any(type(one) is not int for one in found):
        raise ConfigError(f"{path.name} must hold a list of token ids, but got {shown(found)}")
    if len(found) < 2 or not all(0 <= one < target.model.vocab_size for one in found):
        raise ConfigError(
            f"{path.name} must hold at least 2 token ids from 0 to {target.model.vocab_size - 1}, but got {shown(found)}"
        )
    return found


def _encoded(text: str, path: Path, target: Target) -> list[int]:
    if target.tokenizer is None:
        raise ConfigError(
            f"the corpus of --speculate ngram must be a .json list of token ids where there is no tokenizer, but got {path.name}"
        )
    return target.tokenizer.encode(text, add_special_tokens=False)
