"""Index tensors of one plan: where each chunk token, node and sampled row sits in the step's flat tensors. All known to the host.

    tokens       [ c0 c0 c0 | c1 c1 | r0 n n | r1 n n n ]          T: chunk tokens, then each verify row's root and nodes
    sampled        c1's last token (c1 is a last chunk), r0 n n, r1 n n n            N nodes whose logits are needed
    rows           c1, r0, r1                                                        S rows that sample
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.plan import Chunk, IntArray, StepPlan

NUM_KEPT = 256  # indices of steps without prompts: most steps are like one before


@dataclass(frozen=True, slots=True)
class StepIndex:
    """Attributes:
    chunk_slots, chunk_positions: [T_c] int64, slot and position of each chunk token.
    chunk_roots: [C + R] int64, place of each chunk's last token in it; 0 for a verify row. num_chunks: C.
    sampled_parts: [S] int64, which of the plan's parts (chunks, then verify rows) sample. num_last: how many of them are chunks.
    verify_row, verify_node: [T_v] int64, verify row and node of each token behind the chunks.
    sampled: [N] int64, flat token of each node that is sampled.
    flat_row, flat_node: [N] int64, sampled row and node of each. row_ids: flat_row on the host.
    flat_index: [S, W + 1] int64, the inverse; a row's root where it has no such node.
    query_lens: tokens of each segment, chunks first.
    """

    chunk_slots: Tensor
    chunk_positions: Tensor
    chunk_roots: Tensor
    num_chunks: int
    sampled_parts: Tensor
    num_last: int
    verify_row: Tensor
    verify_node: Tensor
    sampled: Tensor
    flat_row: Tensor
    flat_node: Tensor
    flat_index: Tensor
    row_ids: tuple[int, ...]
    query_lens: tuple[int, ...]

    @classmethod
    def of(cls, plan: StepPlan, device: torch.device) -> StepIndex:
        """Index a plan. Nobody may write into what it returns: steps alike share it."""
        num_nodes = tuple(row.num_nodes for row in plan.rows)
        return cls._made(plan.chunks, num_nodes, device) if plan.chunks else _of_rows(num_nodes, device)

    @classmethod
    def _made(cls, chunks: tuple[Chunk, ...], num_nodes: tuple[int, ...], device: torch.device) -> StepIndex:
        chunk_lens = np.array([chunk.num_tokens for chunk in chunks], dtype=np.int64)
        row_lens = 1 + np.array(num_nodes, dtype=np.int64)
        starts = np.array([chunk.start for chunk in chunks], dtype=np.int64)
        slots = np.array([chunk.slot for chunk in chunks], dtype=np.int64)
        chunk_of, place = _ragged(chunk_lens)
        last = np.flatnonzero([chunk.is_last for chunk in chunks])
        verify_row, verify_node = _ragged(row_lens)

        num_chunk_tokens = int(chunk_lens.sum())
        last_tokens = (np.cumsum(chunk_lens) - 1)[last]
        flat_row = np.concatenate([np.arange(len(last)), len(last) + verify_row])
        flat_node = np.concatenate([np.zeros(len(last), dtype=np.int64), verify_node])
        node_counts = np.concatenate([np.ones(len(last), dtype=np.int64), row_lens])
        first = np.cumsum(node_counts) - node_counts
        nodes = np.arange(max(num_nodes, default=0) + 1)

        def put(array: IntArray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(array, dtype=np.int64)).to(device)

        return cls(
            chunk_slots=put(slots[chunk_of]),
            chunk_positions=put(starts[chunk_of] + place),
            chunk_roots=put(np.concatenate([chunk_lens - 1, 0 * row_lens])),
            num_chunks=len(chunks),
            sampled_parts=put(np.concatenate([last, len(chunks) + np.arange(len(num_nodes))])),
            num_last=len(last),
            verify_row=put(verify_row),
            verify_node=put(verify_node),
            sampled=put(np.concatenate([last_tokens, num_chunk_tokens + np.arange(len(verify_row))])),
            flat_row=put(flat_row),
            flat_node=put(flat_node),
            flat_index=put(first[:, None] + np.where(nodes < node_counts[:, None], nodes, 0)),
            row_ids=tuple(flat_row.tolist()),
            query_lens=tuple(int(n) for n in (*chunk_lens, *row_lens)),
        )


@functools.lru_cache(maxsize=NUM_KEPT)
def _of_rows(num_nodes: tuple[int, ...], device: torch.device) -> StepIndex:
    return StepIndex._made((), num_nodes, device)


def _ragged(lens: IntArray) -> tuple[IntArray, IntArray]:
    """Owner and place of each element of ragged rows of these lengths."""
    owner = np.repeat(np.arange(len(lens)), lens)
    return owner, np.arange(len(owner)) - np.repeat(np.cumsum(lens) - lens, lens)
