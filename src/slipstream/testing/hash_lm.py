"""HashLM: a language model made of integer hashes. Its KV stores (token, position); its logits depend on all of it, bit by bit.

    layer     x = token ids                    KV[write slot] = (x, position)
              h = mix(own x and position + sum over visible keys of mix(key x, key position))
              x = h for the next layer, which stores h in turn
    logits    mix(h + id), id in the low bits (so no two ids tie), spread evenly over [-8, 8)

One wrong page, position, mask entry or stale row changes the whole output, and a step costs a few dozen small torch ops. The sum
makes a key's place in the read order irrelevant; its position counts. Arithmetic is int64 with wrap-around and arithmetic shifts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from slipstream.attention.base import AttentionStep, BatchLayout
from slipstream.attention.kv import KVCache, LayerKV
from slipstream.types import nothing

# Odd 63-bit constants: a key's token and position, the own token and position, a vocabulary id, a layer, the two of mix.
KEY_TOKEN = 0x1D8E4E27C47D124F
KEY_POSITION = 0x2B7E151628AED2A7
OWN_TOKEN = 0x3C6EF372FE94F82B
OWN_POSITION = 0x510E527FADE682D1
VOCAB_ID = 0x5BE0CD19137E2179
LAYER_SALT = 0x1F83D9ABFB41BD6B
MIX_A = 0x3F58476D1CE4E5B9
MIX_B = 0x14D049BB133111EB
NOT_FINITE = -(2**63)  # the hidden state whose logits are NaN

MANTISSA_BITS = 52
SPREAD = 16.0  # logits lie in [-SPREAD / 2, SPREAD / 2) before the EOS bias


def mix(x: Tensor) -> Tensor:
    """Bijective mixing of int64, of any shape. Writes over `x`."""
    x ^= x >> 30
    x *= MIX_A
    x ^= x >> 27
    x *= MIX_B
    x ^= x >> 31
    return x


class HashLM:
    """A `CausalLM` without weights.

    Args:
        vocab_size: ids 0..vocab_size - 1.
        context_len: most positions.
        num_layers: layers of KV, each one hashing what the layer below stored.
        eos_token_ids: ids that get `eos_bias`.
        eos_bias: added to the logits of EOS; 0 makes EOS the greedy choice once in vocab_size tokens, 1 about once in 16.
        nan_token_id: where this id is the input token, the logits are NaN. None: never.
        salt: another number is another model.
    """

    hidden_size = 1
    dtype = torch.float64

    def __init__(
        self,
        vocab_size: int = 64,
        context_len: int = 4096,
        num_layers: int = 1,
        eos_token_ids: tuple[int, ...] = (),
        eos_bias: float = 0.0,
        nan_token_id: int | None = None,
        salt: int = 0,
        device: torch.device | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.context_len = context_len
        self.num_layers = num_layers
        self.kv_layers = (LayerKV(1, 1, 1, torch.int64),) * num_layers
        self._nan_token_id = nan_token_id
        self.salt = salt
        self._id_bits = (vocab_size - 1).bit_length()
        self._ids = torch.arange(vocab_size, device=device)
        self._id_terms = self._ids * VOCAB_ID
        self._offset = torch.full((vocab_size,), -SPREAD / 2, dtype=torch.float64, device=device)
        self._offset[list(eos_token_ids)] += eos_bias

    def forward(
        self, tokens: Tensor, attention: AttentionStep, taps: tuple[int, ...] = (), computes: Callable[[], None] = nothing
    ) -> tuple[Tensor, Tensor | None]:
        """Hash tokens [T] int64 with all they see. Returns hidden [T, 1] int64 and taps [T, len(taps)] float64 in [0, 1)."""
        computes()
        layout = attention.layout
        visible = layout.visible()
        x, seen = tokens, {}
        for layer in range(self.num_layers):
            seen[layer] = x
            x = self._layer(layer, x, layout, visible, attention.kv)
        seen[self.num_layers] = x
        if self._nan_token_id is not None:
            x = torch.where(tokens == self._nan_token_id, NOT_FINITE, x)
        return x[:, None], torch.stack([_fraction(seen[layer]) for layer in taps], 1) if taps else None

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, 1] int64 -> [N, vocab_size] float64; no two of a row are equal."""
        hashed = mix(hidden + self._id_terms)
        hashed &= (1 << (MANTISSA_BITS - self._id_bits)) - 1
        hashed <<= self._id_bits
        hashed |= self._ids
        out = hashed.to(torch.float64).mul_(SPREAD / 2.0**MANTISSA_BITS).add_(self._offset)
        return out if self._nan_token_id is None else torch.where(hidden == NOT_FINITE, float("nan"), out)

    def _layer(self, layer: int, x: Tensor, layout: BatchLayout, visible: Tensor, kv: KVCache) -> Tensor:
        keys, values = kv.layer(layer)
        keys.index_copy_(0, layout.write_slots, x.view(-1, 1, 1))
        values.index_copy_(0, layout.write_slots, layout.positions.view(-1, 1, 1))
        slots = layout.read_slots
        # Indexing by a matrix of slots: [S, K, 1, 1] -> [S, K].
        read_x = keys.view(-1)[slots]
        read_position = values.view(-1)[slots]
        each = mix(torch.add(read_x * KEY_TOKEN, read_position, alpha=KEY_POSITION))
        total: Tensor = each.index_select(0, layout.segment).mul_(visible).sum(1)
        total += x * OWN_TOKEN
        total += layout.positions * OWN_POSITION
        total += self.salt + layer * LAYER_SALT
        return mix(total)


def _fraction(x: Tensor) -> Tensor:
    low: Tensor = x & (2**MANTISSA_BITS - 1)
    return low.to(torch.float64).mul(2.0**-MANTISSA_BITS)


class HashAttention:
    """The attention backend of HashLM: hands on layout and KV, attends to nothing itself."""

    def check(self, layers: Sequence[LayerKV]) -> None:
        """Whatever HashLM stores."""

    def begin(self, layout: BatchLayout, kv: KVCache) -> AttentionStep:
        """Hold what HashLM reads."""
        return _HashStep(layout, kv)


class _HashStep:
    def __init__(self, layout: BatchLayout, kv: KVCache) -> None:
        self.layout = layout
        self.kv = kv

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        raise RuntimeError("HashLM must read the KV itself, but something asked its attention step to attend")
