"""Logprobs of prompt tokens: at each position of a chunk, of the token that really comes next.

    chunk        t5   t6   t7   t8          last chunk    t9   t10
    logprob of   t6   t7   t8   t9                        t10   -     what t10 leads to is sampled
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from slipstream.engine.plan import ChunkLogprobs, StepPlan
from slipstream.engine.step_index import StepIndex
from slipstream.models.base import CausalLM
from slipstream.observe.guard import declared
from slipstream.sampling.logprobs import Logprobs, logprobs_of

MAX_BLOCK_LOGITS = 2**23  # logits at a time: 32 MB in float32, however long the chunk and large the vocabulary


def prompt_logprobs(
    plan: StepPlan, index: StepIndex, hidden: Tensor, history: Tensor, model: CausalLM
) -> dict[int, ChunkLogprobs]:
    """Place in the plan's chunks -> its logprobs on the host, for the chunks that ask.

    Always of the model's own logits: penalties, masks and temperature are about what is sampled, and a prompt is not.

    Args:
        plan: which chunks ask, and for how many.
        index: where their tokens are.
        hidden: [T, hidden], the step's states after the final norm.
        history: [slots, context + 2] int64, where the next tokens are read.
        model: turns states into logits.
    """
    asking = [place for place, chunk in enumerate(plan.chunks) if chunk.num_scored]
    if not asking:
        return {}
    lens = [chunk.num_tokens for chunk in plan.chunks]
    starts = np.cumsum([0, *lens])
    counts = [plan.chunks[place].num_scored for place in asking]
    flat = np.concatenate([starts[place] + np.arange(count) for place, count in zip(asking, counts, strict=True)])
    places = torch.from_numpy(flat).to(hidden.device)
    tokens = history[index.chunk_slots.index_select(0, places), index.chunk_positions.index_select(0, places) + 1]
    num_top = max(plan.chunks[place].num_prompt_logprobs or 0 for place in asking)
    found = _in_blocks(model, hidden, places, tokens, num_top)
    with declared("the result travels to the host"):
        arrays = [tensor.numpy(force=True) for tensor in (tokens, found.chosen, found.ranks, found.top_ids, found.top_logprobs)]
    ends = np.cumsum(counts)
    return {
        place: ChunkLogprobs(*(array[end - count : end] for array in arrays))
        for place, count, end in zip(asking, counts, ends, strict=True)
    }


def _in_blocks(model: CausalLM, hidden: Tensor, places: Tensor, tokens: Tensor, num_top: int) -> Logprobs:
    """`logprobs_of` tokens [n] at places [n] of hidden, a bounded number of logits at a time."""
    size = max(1, MAX_BLOCK_LOGITS // model.vocab_size)
    blocks = [
        logprobs_of(model.logits(hidden.index_select(0, places[at : at + size])), tokens[at : at + size], num_top)
        for at in range(0, len(tokens), size)
    ]
    return Logprobs(
        torch.cat([block.chosen for block in blocks]),
        torch.cat([block.ranks for block in blocks]),
        torch.cat([block.top_ids for block in blocks]),
        torch.cat([block.top_logprobs for block in blocks]),
    )
