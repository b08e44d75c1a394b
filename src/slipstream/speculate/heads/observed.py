"""What a step leaves a head to observe: T tokens, those of prompt chunks and behind them the accepted ones of each verify row.

    taps        c c c c | r n n n | r n         rows of the step's states: chunk tokens, then each root and its nodes
    observed    c c c c | r n n   | r           a row has as many places as it could have accepted, in the order of its path

Places behind a row's last accepted token see no key of their own and write to the scratch page.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.attention.base import BatchLayout
from slipstream.attention.layout import NUM_KEPT, build_layout
from slipstream.speculate.base import StepContext, Verdict


@dataclass(frozen=True, slots=True)
class Observed:
    """See the module.

    Attributes:
        taps: [T] int64, rows of the step's taps.
        next_tokens: [T] int64, the token behind each; 0 where there is none.
        layout: of the head's pass.
        last: [R] int64, the token at which each sampled row's first level is foretold.
    """

    taps: Tensor
    next_tokens: Tensor
    layout: BatchLayout
    last: Tensor

    @classmethod
    def of(cls, ctx: StepContext, verdict: Verdict, page_size: int) -> Observed:
        """Index a step. A light drafter that stepped in may have gone deeper than the head would."""
        chunks = ctx.chunks
        chunk_lens: tuple[int, ...] = () if chunks is None else chunks.lens
        num_last = 0 if chunks is None else sum(chunks.is_last)
        places = _places(sum(chunk_lens), num_last, ctx.num_nodes[num_last:], verdict.path.shape[1], ctx.slots.device)
        taps = places.first_taps + verdict.path.flatten().index_select(0, places.steps)
        next_tokens = verdict.tokens.flatten().index_select(0, places.steps)
        base, stop = ctx.lengths[num_last:], verdict.new_lengths[num_last:]
        tables, first = ctx.page_tables[num_last:], ctx.draft_from[num_last:]
        max_lens = [length + count for length, count in zip(ctx.max_lens[num_last:], places.row_lens, strict=True)]
        last = places.starts + (verdict.accept_lens[num_last:] - 1).clamp(min=0)
        if chunks is not None:
            device = ctx.slots.device
            taps = torch.cat((torch.arange(sum(chunk_lens), device=device), taps))
            next_tokens = torch.cat((chunks.next_tokens, next_tokens))
            stop = torch.cat((chunks.starts + torch.tensor(chunk_lens, device=device), stop))
            base, tables = torch.cat((chunks.starts, base)), torch.cat((chunks.page_tables, tables))
            first = torch.cat((chunks.draft_from, first))
            max_lens = [*chunks.ends, *max_lens]
            ends = zip(itertools.accumulate(chunk_lens), chunks.is_last, strict=True)
            sampled = torch.tensor([end - 1 for end, is_last in ends if is_last], dtype=torch.int64, device=device)
            last = torch.cat((sampled, last))
        layout = build_layout(
            page_tables=tables,
            page_size=page_size,
            base_lens=base,
            limits=stop,
            query_lens=(*chunk_lens, *places.row_lens),
            max_key_lens=tuple(max_lens),
            num_chunks=len(chunk_lens),
            first_keys=first,
        )
        # Behind a row's end, and behind a prompt that may have no answer, there is no next token.
        return cls(taps, next_tokens.clamp(min=0), layout, last)


@dataclass(frozen=True, slots=True)
class _Places:
    """Of P places of verify rows, what the plan alone decides. Not to be written to.

    Attributes:
        row_lens: of each row (host).
        first_taps: [P] int64, the row's root among the taps.
        steps: [P] int64, the place in the verdict's paths and tokens, flat.
        starts: [rows] int64, each row's first place among all that is observed.
    """

    row_lens: tuple[int, ...]
    first_taps: Tensor
    steps: Tensor
    starts: Tensor


@functools.lru_cache(maxsize=NUM_KEPT)
def _places(
    num_chunk_tokens: int, num_last: int, num_nodes: tuple[int, ...], path_len: int, device: torch.device
) -> _Places:
    row_lens = tuple(1 + min(path_len - 1, count) for count in num_nodes)
    roots = itertools.accumulate((1 + count for count in num_nodes), initial=num_chunk_tokens)
    first_taps = [root for root, length in zip(roots, row_lens, strict=False) for _ in range(length)]
    steps = [(num_last + row) * path_len + step for row, length in enumerate(row_lens) for step in range(length)]
    starts = list(itertools.accumulate(row_lens, initial=num_chunk_tokens))[:-1]

    def put(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    return _Places(row_lens, put(first_taps), put(steps), put(starts))
