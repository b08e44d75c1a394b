"""Groups of nodes whose rows need the same steps, and chunks of them whose scores stay in the cache while they are worked on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby

import torch
from torch import Tensor

from slipstream.observe.guard import declared
from slipstream.sampling.nodes import GrammarMasks, NodeRun, Nodes
from slipstream.sampling.noise import noise_keys
from slipstream.sampling.state import RowEdits, RowNeeds, RowNumbers, RowSampling

CHUNK_ELEMENTS = 1 << 16  # scores a chunk has at most, if it has more than one node


@dataclass(frozen=True, slots=True)
class Group:
    """n nodes with the same needs.

    Attributes:
        needs: of their rows. edits: of all rows of the step, by row.
        all_logits: [N, V] of the whole step. nodes: of the whole step.
        places: which of the step's nodes (host). at: [n] int64, the same.
        rows: row of each (host); nodes of one row follow each other.
        maybe_numbers: of each node's row, where it needs any. maybe_keys: [n] int32 each, of the noise, where it has any.
        bits: [n, words] int32 where a grammar masks these nodes.
    """

    needs: RowNeeds
    edits: tuple[RowEdits, ...]
    all_logits: Tensor
    nodes: Nodes
    places: tuple[int, ...]
    at: Tensor
    rows: tuple[int, ...]
    maybe_numbers: RowNumbers | None
    maybe_keys: tuple[Tensor, Tensor] | None
    bits: Tensor | None

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        return self.all_logits.shape[1]

    @property
    def edited(self) -> bool:
        """Whether masks, bias or penalties change the logits."""
        return self.needs.edits or self.needs.penalties or self.bits is not None

    @property
    def logits(self) -> Tensor:
        """[n, V] as they came, a view where that is possible: not to be written."""
        first, last = self.places[0], self.places[-1]
        if self.places == tuple(range(first, last + 1)):
            return self.all_logits[first : last + 1]
        return self.all_logits.index_select(0, self.at)

    @property
    def numbers(self) -> RowNumbers:
        """The numbers of each node's row; a group with needs has them."""
        assert self.maybe_numbers is not None
        return self.maybe_numbers

    @property
    def keys(self) -> tuple[Tensor, Tensor]:
        """Keys of each node's noise; a group with noise has them."""
        assert self.maybe_keys is not None
        return self.maybe_keys

    def chunks(self, whole: bool = False) -> list[Group]:
        """The group in parts of at most CHUNK_ELEMENTS scores, in order; `whole`: in one part."""
        most = max(1, CHUNK_ELEMENTS // self.vocab_size)
        if whole or len(self.places) <= most:
            return [self]
        return [self._part(start, min(start + most, len(self.places))) for start in range(0, len(self.places), most)]

    def runs(self) -> Iterator[tuple[int, int, int]]:
        """(start, stop, row) of the nodes of one row, within the group."""
        start = 0
        for row, same in groupby(self.rows):
            stop = start + sum(1 for _ in same)
            yield start, stop, row
            start = stop

    def run(self, start: int, stop: int, row: int) -> NodeRun:
        """The nodes of one row."""
        nodes, at = self.nodes, self.at[start:stop]
        length = nodes.max_history_len
        return NodeRun(
            history=nodes.history[:, :length].index_select(0, nodes.slots[row : row + 1])[0],
            history_len=nodes.history_lens[row],
            path=nodes.path.index_select(0, at),
            depth=nodes.depth.index_select(0, at),
            position=nodes.position.index_select(0, at),
        )

    def _part(self, start: int, stop: int) -> Group:
        numbers, keys = self.maybe_numbers, self.maybe_keys
        return replace(
            self,
            places=self.places[start:stop],
            at=self.at[start:stop],
            rows=self.rows[start:stop],
            maybe_numbers=None if numbers is None else RowNumbers(numbers.floats[start:stop], numbers.integers[start:stop]),
            maybe_keys=None if keys is None else (keys[0][start:stop], keys[1][start:stop]),
            bits=None if self.bits is None else self.bits[start:stop],
        )


def groups_of(logits: Tensor, rows: RowSampling, nodes: Nodes, masks: GrammarMasks | None) -> list[Group]:
    """Split the N nodes of a step. Each node is in exactly one group."""
    constrained: dict[int, int] = {}
    if masks is not None:
        with declared("which nodes have grammar masks: the host built them"):
            constrained = {node: place for place, node in enumerate(masks.nodes.tolist())}
    row_ids = _row_ids(nodes)
    members: dict[tuple[RowNeeds, bool], list[int]] = {}
    for place, row in enumerate(row_ids):
        members.setdefault((rows.needs[row], place in constrained), []).append(place)

    def put(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(logits.device)

    groups = []
    for (needs, masked), places in members.items():
        places.sort(key=row_ids.__getitem__)
        at = put(places)
        numbers = keys = bits = None
        if rows.numbers is not None and not needs.nothing:
            numbers = rows.numbers.at(nodes.row.index_select(0, at))
            if needs.noise:
                keys = noise_keys(numbers.integer("seed"), nodes.position.index_select(0, at), nodes.noise)
        if masked and masks is not None:
            bits = masks.bits.index_select(0, put([constrained[place] for place in places]))
        groups.append(
            Group(needs, rows.edits, logits, nodes, tuple(places), at, tuple(row_ids[p] for p in places), numbers, keys, bits)
        )
    return groups


def _row_ids(nodes: Nodes) -> tuple[int, ...]:
    if nodes.row_ids is not None:
        return nodes.row_ids
    with declared("which row each node belongs to: the caller did not say"):
        return tuple(nodes.row.tolist())
