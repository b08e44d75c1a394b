"""A draft head for HashLM that is always right, as long as every page, position, mask and relay row is: EAGLE's SELF.

    position               0         1         2         3
    target's KV          x0, 0     x1, 1     x2, 2     x3, 3
    head's KV            x0, x1    x1, x2    x2, x3    x3, x4?      the state's token and the one that follows, with the position

So behind tokens 0..t of states and token t + 1 it knows all that HashLM of one layer hashes at t + 1, and hashes it. Its state is
(what it hashed, the token it hashed, its position): the target's taps tell it the token, and in a draft it tells itself.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.attention.base import AttentionStep
from slipstream.attention.kv import LayerKV
from slipstream.speculate.base import Drafter
from slipstream.speculate.eagle import Eagle
from slipstream.speculate.registry import Target
from slipstream.testing.drafters import DrafterFactory
from slipstream.testing.hash_lm import KEY_POSITION, KEY_TOKEN, MANTISSA_BITS, OWN_POSITION, OWN_TOKEN, HashLM, mix

FOLLOWING = 1 << 32  # a value is position * FOLLOWING + the token that follows


def hash_eagle(topk: int, steps: int, draft_tokens: int | None = None) -> DrafterFactory:
    """EAGLE with the head above."""

    def make(target: Target) -> Drafter:
        if not isinstance(target.model, HashLM):
            raise TypeError(f"a HashHead must have a HashLM as target, but got {type(target.model).__name__}")
        return Eagle(HashHead(target.model), target, topk, steps, draft_tokens or steps)

    return make


class HashHead:
    """See the module; satisfies `DraftHead`.

    Args:
        model: the target. Where it has several layers the head hashes as its first one does, and is mostly wrong.
    """

    hidden_size = 3
    dtype = torch.int64
    taps: tuple[int, ...] = (0,)
    kv_layer = LayerKV(1, 1, 1, torch.int64)
    target_ids: Tensor | None = None
    num_parameters = 0
    weight_bytes = 0

    def __init__(self, model: HashLM) -> None:
        self._model = model

    def states(self, taps: Tensor) -> Tensor:
        """Taps [T, 1] float64 -> [T, 3] int64: of this only the token is known. Layer 0's fraction of 2^52 is the token."""
        tokens = taps.mul(2.0**MANTISSA_BITS).round().to(torch.int64)
        return torch.cat([torch.zeros_like(tokens), tokens, torch.zeros_like(tokens)], 1)

    def forward(self, tokens: Tensor, states: Tensor, attention: AttentionStep) -> Tensor:
        """See `DraftHead.forward`."""
        layout = attention.layout
        keys, values = attention.kv.layer(0)
        keys.index_copy_(0, layout.write_slots, states[:, 1].reshape(-1, 1, 1))
        values.index_copy_(0, layout.write_slots, (layout.positions * FOLLOWING + tokens).view(-1, 1, 1))
        read = values.view(-1)[layout.read_slots]
        each = mix(keys.view(-1)[layout.read_slots] * KEY_TOKEN + read // FOLLOWING * KEY_POSITION)
        total: Tensor = each.index_select(0, layout.segment).mul_(layout.visible()).sum(1)
        position = layout.positions + 1
        total += mix(tokens * KEY_TOKEN + position * KEY_POSITION)
        total += tokens * OWN_TOKEN + position * OWN_POSITION + self._model.salt
        return torch.stack([mix(total), tokens, position], 1)

    def logits(self, states: Tensor) -> Tensor:
        """The target's."""
        return self._model.logits(states[:, :1])
