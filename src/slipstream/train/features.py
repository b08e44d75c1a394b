"""The target's states over prompts and answers: what the head looks at. Computed once, kept on disk, read by memory map.

    tokens     x x x x x x x x | x x x x x x x         prompt | answer
    rows       r r r r r r r r   r r r r r . .         the state at t foretells token t + 2: the last two tokens need none

A row holds the states entering layers 2, L/2 and L - 3, side by side. Whole sequences go through the model as prompt chunks;
layers behind the last state are not run. States reach tens of thousands at the first token of some models, so they are kept in
bfloat16 or float32, never in float16.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from slipstream.attention.base import AttentionBackend
from slipstream.attention.kv import NUM_RESERVED_PAGES, KVCache
from slipstream.attention.layout import build_layout
from slipstream.cache.pages import pages_for
from slipstream.errors import ConfigError
from slipstream.layers.decoder import Decoder
from slipstream.train.folder import replacing
from slipstream.train.progress import Reporter

SHARD_TOKENS = 4096  # what a stop may lose
PASS_TOKENS = 1024
PAGE_SIZE = 16
NUM_TAPS = 3


@dataclass(frozen=True, slots=True)
class Text:
    """A prompt with its answer.

    Attributes:
        token_ids: both.
        prompt_len: tokens of the prompt.
    """

    token_ids: tuple[int, ...]
    prompt_len: int

    @property
    def num_rows(self) -> int:
        """Positions whose states are kept."""
        return len(self.token_ids) - 2

    @property
    def is_useful(self) -> bool:
        """There is something to foretell: the first token of an answer is never drafted."""
        return len(self.token_ids) >= self.prompt_len + 2


def taps_of(num_layers: int) -> tuple[int, ...]:
    """The layers whose entering states a head looks at where its config.json lists none."""
    return 2, num_layers // 2, num_layers - 3


def disk_bytes(num_rows: int, hidden_size: int, dtype: torch.dtype) -> int:
    """What so many rows take."""
    return num_rows * NUM_TAPS * hidden_size * dtype.itemsize


class FeatureStore:
    """Rows of the texts, in shards of whole texts, each a file of raw numbers. What a shard holds follows from the texts alone.

    Args:
        folder: where they lie.
        texts: all of them, in order.
        hidden_size: of the target.
        dtype: what rows are kept in.
    """

    def __init__(self, folder: Path, texts: Sequence[Text], hidden_size: int, dtype: torch.dtype) -> None:
        self.texts = texts
        self._folder = folder
        self._width = NUM_TAPS * hidden_size
        self._dtype = dtype
        self._shards = list(_shards(texts))
        self._mapped: dict[int, Tensor] = {}
        self._places: list[tuple[int, int]] = []  # of each text: its shard, and its first row there
        for number, shard in enumerate(self._shards):
            row = 0
            for text in shard:
                self._places.append((number, row))
                row += text.num_rows

    @property
    def num_bytes(self) -> int:
        """On disk, once all are there."""
        return sum(map(self._bytes, range(len(self._shards))))

    @property
    def missing(self) -> list[int]:
        """Shards that are still to be computed."""
        return [number for number in range(len(self._shards)) if not self._is_there(number)]

    def check_disk(self) -> None:
        """Raises `ConfigError` where what is missing does not fit the disk."""
        needed, free = sum(map(self._bytes, self.missing)), shutil.disk_usage(self._folder.parent).free
        if needed > free:
            raise ConfigError(
                f"--out must have {needed / 1e9:.1f} GB free for the target's states, but has {free / 1e9:.1f} GB",
                hint="fewer prompts (--num-prompts) or shorter answers (--max-tokens) need less",
            )

    def compute(
        self, model: Decoder, attention: AttentionBackend, device: torch.device, reporter: Reporter, stop: threading.Event
    ) -> None:
        """Compute what is missing. Raises `KeyboardInterrupt` between two shards once `stop` is set, `ConfigError` for a backend
        that does not take the model.
        """
        attention.check(model.kv_layers)
        self._folder.mkdir(exist_ok=True)
        trunk, taps = _trunk(model)
        missing = self.missing
        sizes = [sum(len(text.token_ids) for text in shard) for shard in self._shards]
        done = sum(sizes) - sum(sizes[number] for number in missing)
        reporter.begin("features", done, sum(sizes))
        for number in missing:
            if stop.is_set():
                raise KeyboardInterrupt
            shard = self._shards[number]
            rows = [states_of(trunk, taps, part, attention, device).to("cpu", self._dtype) for part in _passes(shard)]
            with replacing(self._path(number)) as partial:
                torch.cat(rows).view(torch.uint8).numpy().tofile(partial)
            done += sizes[number]
            reporter.at(done)
        reporter.end()

    def rows(self, index: int) -> Tensor:
        """[num_rows, 3 * hidden], of text `index`; mapped, not read."""
        number, row = self._places[index]
        if number not in self._mapped:
            count = self._bytes(number) // self._dtype.itemsize
            mapped = torch.from_file(str(self._path(number)), shared=False, size=count, dtype=self._dtype)
            self._mapped[number] = mapped.view(-1, self._width)
        return self._mapped[number][row : row + self.texts[index].num_rows]

    def scale(self) -> Tensor:
        """[3] float32: 1 / the usual size (root mean square) of each of the three states.

        The median over the first texts' rows: the first token of a text is a hundred times as large as the others.
        """
        first = torch.cat([self.rows(index).to(torch.float32) for index in range(min(8, len(self.texts)))])
        size = first.view(len(first), NUM_TAPS, -1).pow(2).mean(-1).sqrt().median(0).values
        return 1 / size.clamp(min=1e-6)

    def _path(self, number: int) -> Path:
        return self._folder / f"shard-{number:05}.bin"

    def _bytes(self, number: int) -> int:
        return sum(text.num_rows for text in self._shards[number]) * self._width * self._dtype.itemsize

    def _is_there(self, number: int) -> bool:
        path = self._path(number)
        return path.is_file() and path.stat().st_size == self._bytes(number)


@torch.inference_mode()
def states_of(
    trunk: Decoder, taps: tuple[int, ...], texts: Sequence[Text], attention: AttentionBackend, device: torch.device
) -> Tensor:
    """The rows of some texts, one after the other: [sum of num_rows, len(taps) * hidden], in the model's dtype."""
    lens = tuple(len(text.token_ids) for text in texts)
    pages = [pages_for(length, PAGE_SIZE) for length in lens]
    tables = torch.zeros((len(texts), max(pages)), dtype=torch.int64)
    first = NUM_RESERVED_PAGES
    for row, count in enumerate(pages):
        tables[row, :count] = torch.arange(first, first + count)
        first += count
    layout = build_layout(
        page_tables=tables.to(device),
        page_size=PAGE_SIZE,
        base_lens=torch.zeros(len(texts), dtype=torch.int64, device=device),
        limits=torch.tensor(lens, device=device),
        query_lens=lens,
        max_key_lens=lens,
        num_chunks=len(texts),
    )
    kv = KVCache(trunk.kv_layers, first, PAGE_SIZE, device)
    tokens = torch.tensor([token for text in texts for token in text.token_ids], device=device)
    _, states = trunk.forward(tokens, attention.begin(layout, kv), taps)
    assert states is not None
    kept = [part[: text.num_rows] for part, text in zip(torch.split(states, list(lens)), texts, strict=True)]
    return torch.cat(kept)


def _trunk(model: Decoder) -> tuple[Decoder, tuple[int, ...]]:
    """The model up to the last layer that is looked at, and those layers."""
    taps = taps_of(model.num_layers)
    blocks = model.blocks[: max(taps)]
    kv_dtype = model.kv_layers[0].dtype
    return Decoder(model.embedding, blocks, model.norm, model.head, model.rotaries, model.context_len, kv_dtype=kv_dtype), taps


def _shards(texts: Sequence[Text]) -> Iterator[list[Text]]:
    return _grouped(texts, SHARD_TOKENS)


def _passes(texts: Sequence[Text]) -> Iterator[list[Text]]:
    return _grouped(texts, PASS_TOKENS)


def _grouped(texts: Sequence[Text], most: int) -> Iterator[list[Text]]:
    """Runs of texts of at most so many tokens, or of one longer text."""
    group: list[Text] = []
    for text in texts:
        if group and sum(len(one.token_ids) for one in group) + len(text.token_ids) > most:
            yield group
            group = []
        group.append(text)
    if group:
        yield group
