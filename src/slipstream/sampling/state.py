"""Sampling parameters of every slot on the device, and the rows of one step gathered from them.

The host keeps, beside each slot's numbers, what that slot *needs*. A step looks at these and runs nothing else: rows that are all
greedy and unconstrained cost one argmax.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from slipstream.sampling.transforms import num_candidates
from slipstream.seeds import signed64
from slipstream.types import EngineRequest, SamplingParams

FLOATS = ("temperature", "top_p", "log_min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
INTEGERS = ("seed", "top_k", "prompt_len")


@dataclass(frozen=True, slots=True)
class RowNeeds:
    """What sampling a row takes, beyond an argmax. Rows with equal needs are computed together.

    Attributes:
        noise: temperature above 0. scaled: and not 1.
        top_k, top_p, min_p: those are on. Off for a greedy row: they keep the best token.
        num_candidates: how many tokens are ranked at first for these three; 0 where all are off.
        penalties: any of the three. output_counts: presence or frequency.
        edits: allowed_token_ids, bad_words, min_tokens or logit_bias.
    """

    noise: bool = False
    scaled: bool = False
    top_k: bool = False
    top_p: bool = False
    min_p: bool = False
    num_candidates: int = 0
    penalties: bool = False
    output_counts: bool = False
    edits: bool = False

    @property
    def nothing(self) -> bool:
        """Whether an argmax of the logits is all."""
        return not (self.noise or self.penalties or self.edits)


@dataclass(frozen=True, slots=True)
class RowEdits:
    """The parameters of a slot that name tokens, on the device. None where a slot has none.

    Attributes:
        allowed: [A] int64, unique: only these may be sampled.
        word_ends: [B] int64, last token of each banned word. word_starts: [B, L] int64, the tokens before it, aligned right;
            -1 in front of shorter ones.
        early: [E] int64, tokens that cannot come among the first `min_tokens` ones.
        bias_ids, bias: [C] int64 (unique), [C] float64.
    """

    allowed: Tensor | None = None
    word_ends: Tensor | None = None
    word_starts: Tensor | None = None
    early: Tensor | None = None
    min_tokens: int = 0
    bias_ids: Tensor | None = None
    bias: Tensor | None = None


@dataclass(frozen=True, slots=True)
class RowNumbers:
    """Numbers of R rows on the device, one column each.

    Attributes:
        floats: [R, 6] float64, columns as in FLOATS. integers: [R, 3] int64, columns as in INTEGERS.
    """

    floats: Tensor
    integers: Tensor

    def at(self, rows: Tensor) -> RowNumbers:
        """The numbers of the given rows."""
        return RowNumbers(self.floats.index_select(0, rows), self.integers.index_select(0, rows))

    def number(self, name: str) -> Tensor:
        """One number of each row: [R] float64, of FLOATS."""
        return self.floats[:, FLOATS.index(name)]

    def integer(self, name: str) -> Tensor:
        """One number of each row: [R] int64, of INTEGERS."""
        return self.integers[:, INTEGERS.index(name)]


@dataclass(frozen=True, slots=True)
class RowSampling:
    """Sampling parameters of the R rows of a step.

    Attributes:
        needs, edits: one a row (host).
        numbers: None where every row is greedy, without penalties and edits.
    """

    needs: tuple[RowNeeds, ...]
    edits: tuple[RowEdits, ...]
    numbers: RowNumbers | None

    def __len__(self) -> int:
        return len(self.needs)


NO_NEEDS = RowNeeds()
NO_EDITS = RowEdits()


class SamplingState:
    """Parameters by slot.

    Args:
        num_slots: rows, the padding row included.
        vocab_size: columns of the logits.
        eos_token_ids: masked, with a request's stop_token_ids, while it has fewer than min_tokens tokens.
        device: where the numbers live.
    """

    def __init__(self, num_slots: int, vocab_size: int, eos_token_ids: tuple[int, ...], device: torch.device) -> None:
        self.vocab_size = vocab_size
        self._eos = eos_token_ids
        self._device = device
        self._needs = [NO_NEEDS] * num_slots
        self._edits = [NO_EDITS] * num_slots
        self._floats = torch.ones(num_slots, len(FLOATS), dtype=torch.float64, device=device)
        self._integers = torch.zeros(num_slots, len(INTEGERS), dtype=torch.int64, device=device)

    def admit(self, slot: int, request: EngineRequest, prompt_len: int) -> None:
        """Give a slot to a request whose original prompt had `prompt_len` tokens (a resumed request's history is longer)."""
        params = request.params
        needs = _needs(params, self.vocab_size)
        edits = _edits(request, self._eos, self.vocab_size, self._device)
        self._needs[slot] = replace(needs, edits=edits is not NO_EDITS)
        self._edits[slot] = edits
        floats = (
            params.temperature if needs.noise else 1.0,
            params.top_p,
            math.log(params.min_p) if params.min_p > 0 else -math.inf,
            params.repetition_penalty,
            params.presence_penalty,
            params.frequency_penalty,
        )
        integers = (signed64(request.seed), params.top_k, prompt_len)
        self._floats[slot] = torch.tensor(floats, dtype=torch.float64).to(self._device)
        self._integers[slot] = torch.tensor(integers, dtype=torch.int64).to(self._device)

    def rows(self, slots: Sequence[int]) -> RowSampling:
        """The rows of a step, by slot, as the plan names them (host integers)."""
        needs = tuple(self._needs[slot] for slot in slots)
        edits = tuple(self._edits[slot] for slot in slots)
        if all(row.nothing for row in needs):
            return RowSampling(needs, edits, None)
        index = torch.tensor(slots, dtype=torch.int64).to(self._device)
        return RowSampling(needs, edits, RowNumbers(self._floats, self._integers).at(index))


def _needs(params: SamplingParams, vocab_size: int) -> RowNeeds:
    noise = params.temperature > 0
    top_k = params.top_k if noise and 0 < params.top_k < vocab_size else 0
    top_p = noise and params.top_p < 1.0
    min_p = noise and params.min_p > 0.0
    return RowNeeds(
        noise=noise,
        scaled=noise and params.temperature != 1.0,
        top_k=top_k > 0,
        top_p=top_p,
        min_p=min_p,
        num_candidates=num_candidates(top_k, top_p or min_p),
        penalties=params.has_penalties,
        output_counts=params.presence_penalty != 0.0 or params.frequency_penalty != 0.0,
    )


def _edits(request: EngineRequest, eos: tuple[int, ...], vocab_size: int, device: torch.device) -> RowEdits:
    params = request.params

    def put(values: list[int] | list[list[int]]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64).to(device)

    edits = NO_EDITS
    if params.allowed_token_ids is not None:
        edits = replace(edits, allowed=put(sorted(set(params.allowed_token_ids))))
    words = sorted({word for word in request.bad_word_ids if word})
    if words:
        longest = max(len(word) for word in words) - 1
        starts = [[-1] * (longest + 1 - len(word)) + list(word[:-1]) for word in words]
        ends = [word[-1] for word in words]
        edits = replace(edits, word_ends=put(ends), word_starts=put(starts).view(len(words), longest))
    # With ignore_eos an EOS id is a token like any other: it ends nothing, so it need not be held back.
    early = sorted(set(params.stop_token_ids) | (set() if params.ignore_eos else {t for t in eos if t < vocab_size}))
    if params.min_tokens > 0 and early:
        edits = replace(edits, early=put(early), min_tokens=params.min_tokens)
    bias = {token: value for token, value in params.logit_bias.items() if value != 0.0}
    if bias:
        values = torch.tensor(list(bias.values()), dtype=torch.float64).to(device)
        edits = replace(edits, bias_ids=put(list(bias)), bias=values)
    return edits
