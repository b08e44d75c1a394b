"""Builds the tensors of a step from plain rows, so that tests can state a row in words and ask the oracle about each node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from slipstream.sampling.nodes import GrammarMasks, Nodes
from slipstream.sampling.state import RowSampling, SamplingState
from slipstream.types import EngineRequest, SamplingParams
from tests.sampling.oracle import Array, Asked, edited, perturbed, truncated

EOS = (1, 2)
CPU = torch.device("cpu")


@dataclass
class Row:
    """A row of a step: its request, its tokens so far, and its draft: node j + 1 has tokens[j] and hangs below parents[j]."""

    asked: Asked
    prompt: list[int]
    output: list[int] = field(default_factory=list)
    draft: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    allowed: dict[int, set[int]] = field(default_factory=dict)  # node -> what its grammar allows

    def path(self, node: int) -> list[int]:
        tokens: list[int] = []
        while node:
            tokens.insert(0, self.draft[node - 1])
            node = self.parents[node - 1]
        return tokens

    def params(self) -> SamplingParams:
        asked = self.asked
        return SamplingParams(
            temperature=asked.temperature,
            top_k=asked.top_k,
            top_p=asked.top_p,
            min_p=asked.min_p,
            repetition_penalty=asked.repetition_penalty,
            presence_penalty=asked.presence_penalty,
            frequency_penalty=asked.frequency_penalty,
            logit_bias=dict(asked.logit_bias),
            allowed_token_ids=None if asked.allowed_token_ids is None else tuple(asked.allowed_token_ids),
            min_tokens=asked.min_tokens,
            max_tokens=None,
            stop_token_ids=tuple(asked.stop_token_ids),
            ignore_eos=asked.ignore_eos,
        )

    def request(self) -> EngineRequest:
        words = tuple(tuple(word) for word in self.asked.bad_words)
        return EngineRequest("r", tuple(self.prompt), self.params(), self.asked.seed, words)


@dataclass
class Step:
    """The sampler's arguments for some nodes (row, node), in this order."""

    rows: RowSampling
    nodes: Nodes
    masks: GrammarMasks | None


def step_of(rows: Sequence[Row], places: Sequence[tuple[int, int]], vocab_size: int, host_rows: bool = True) -> Step:
    """Tensors of the given nodes of the given rows. Slots are dealt from the end, histories are dirty behind their lengths."""
    slots = [len(rows) - i for i in range(len(rows))]
    state = SamplingState(len(rows) + 1, vocab_size, EOS, CPU)
    longest = max(len(row.prompt) + len(row.output) for row in rows)
    history = torch.full((len(rows) + 1, longest + 3), -1, dtype=torch.int64)
    for slot, row in zip(slots, rows, strict=True):
        state.admit(slot, row.request(), len(row.prompt))
        tokens = [*row.prompt, *row.output]
        history[slot, : len(tokens)] = torch.tensor(tokens)
        history[slot, len(tokens) :] = vocab_size - 1
    depth = max(len(rows[r].path(n)) for r, n in places)
    path = torch.full((len(places), depth), -1, dtype=torch.int64)
    for i, (r, n) in enumerate(places):
        tokens = rows[r].path(n)
        path[i, : len(tokens)] = torch.tensor(tokens, dtype=torch.int64)
    lens = [len(row.prompt) + len(row.output) for row in rows]
    depths = [len(rows[r].path(n)) for r, n in places]
    nodes = Nodes(
        row=torch.tensor([r for r, _ in places]),
        position=torch.tensor([lens[r] + d for (r, _), d in zip(places, depths, strict=True)]),
        path=path,
        depth=torch.tensor(depths),
        slots=torch.tensor(slots),
        history=history,
        history_lens=torch.tensor(lens),
        max_history_len=longest + 1,
        row_ids=tuple(r for r, _ in places) if host_rows else None,
    )
    masked = [(i, rows[r].allowed[n]) for i, (r, n) in enumerate(places) if n in rows[r].allowed]
    masks = None
    if masked:
        bits = np.zeros((len(masked), -(-vocab_size // 32)), dtype=np.uint32)
        for k, (_, allowed) in enumerate(masked):
            for token in allowed:
                bits[k, token // 32] |= np.uint32(1 << (token % 32))
        masks = GrammarMasks(torch.tensor([i for i, _ in masked]), torch.from_numpy(bits.view(np.int32)))
    return Step(state.rows(slots), nodes, masks)


def oracle_scores(row: Row, node: int, logits: Array) -> Array:
    """What `process` must give at one node."""
    output = [*row.output, *row.path(node)]
    return truncated(edited(logits, row.asked, row.prompt, output, EOS, row.allowed.get(node)), row.asked)


def oracle_perturbed(row: Row, node: int, logits: Array) -> Array:
    """What `perturbed` must give at one node."""
    position = len(row.prompt) + len(row.output) + len(row.path(node))
    return perturbed(oracle_scores(row, node, logits), row.asked, position)
