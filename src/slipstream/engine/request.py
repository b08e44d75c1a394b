"""A request as the host knows it. The scheduler thread alone changes it; settle alone appends tokens.

tokens     prompt ............ | output settled ...... |
bound                                                  | - - in flight - - |     what the device may have reached
"""

from __future__ import annotations

import sys
from collections import deque
from dataclasses import dataclass, field

from slipstream.cache.ledger import Holding
from slipstream.speculate.choice import RowDrafting
from slipstream.types import DraftCounts, EngineRequest, FinishReason, TokenLogprobs


@dataclass(slots=True, eq=False)
class Request:
    """Host truth of one answer.

    Attributes:
        request: what the front sent.
        limit: most tokens, prompt and output, it may ever have.
        tokens: prompt and settled output.
        arrival: order of arrival. arrived_s: when, on the monotonic clock.
        holding: its slot and pages while it runs.
        prefill_len: tokens to prefill before it samples: len(tokens) when it was admitted.
        prefilled: of those, how many have been launched or were cached.
        steps_in_flight: for each unsettled step in which it samples, the most tokens that step may commit.
        prompt_logprobs: entry i is of prompt token i + 1; all that has been settled and not yet handed out.
        has_prompt_logprobs: they are complete and have been handed out: nothing is left to ask for.
        finish_reason: set once, when it has ended; later results of it are dropped.
        is_leaving: it will be retracted once its last step is settled; no further step names it.
        num_cached: prompt tokens found in the prefix cache when it was first admitted. queue_s: how long that took.
        num_overtaken: requests of lower rank that were admitted before it.
        drafting: who watches and drafts it, and how that has fared.
        draft_counts: what its drafts came to, by drafter.
    """

    request: EngineRequest
    limit: int
    tokens: list[int]
    arrival: int
    arrived_s: float = 0.0
    holding: Holding | None = None
    prefill_len: int = 0
    prefilled: int = 0
    steps_in_flight: deque[int] = field(default_factory=deque)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    has_prompt_logprobs: bool = False
    finish_reason: FinishReason | None = None
    is_leaving: bool = False
    num_cached: int = 0
    queue_s: float | None = None
    num_retractions: int = 0
    num_overtaken: int = 0
    drafting: RowDrafting = field(default_factory=RowDrafting)
    draft_counts: dict[str, DraftCounts] = field(default_factory=dict)

    @property
    def request_id(self) -> str:
        """The front's id."""
        return self.request.request_id

    @property
    def prompt_len(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def num_output(self) -> int:
        """Settled output tokens."""
        return len(self.tokens) - self.prompt_len

    @property
    def num_drafted(self) -> int:
        """Draft nodes verified for it."""
        return sum(one.num_drafted for one in self.draft_counts.values())

    @property
    def num_accepted(self) -> int:
        """Of these, tokens that were accepted and kept."""
        return sum(one.num_accepted for one in self.draft_counts.values())

    @property
    def num_prompt_logprobs(self) -> int | None:
        """How many prompt logprobs its chunks must ask for at each position; None: none at all, or none any more."""
        return None if self.has_prompt_logprobs else self.request.params.prompt_logprobs

    @property
    def max_nodes(self) -> int:
        """Most nodes it wants drafted in a step."""
        cap = self.request.params.speculate
        return sys.maxsize if cap is None else cap

    @property
    def is_prefilling(self) -> bool:
        """Prompt tokens are still to be launched."""
        return self.prefilled < self.prefill_len

    @property
    def num_in_flight(self) -> int:
        """Unsettled steps that name it, chunks included."""
        return self.holding.num_in_flight if self.holding is not None else 0

    @property
    def has_launched_prompt(self) -> bool:
        """All its prompt tokens have been launched in an earlier step: their KV is there for the next one."""
        return not self.is_prefilling and (bool(self.steps_in_flight) or len(self.tokens) > self.prefill_len)

    @property
    def max_committed_len(self) -> int:
        """Upper bound of the committed length (tokens whose KV exists) once all launched steps are done."""
        if self.is_prefilling:
            return self.prefilled
        return min(len(self.tokens) - 1 + sum(self.steps_in_flight), self.limit - 1)

    @property
    def surely_done(self) -> bool:
        """The steps in flight reach its limit even if each commits one token only: nothing more to launch."""
        return len(self.tokens) + len(self.steps_in_flight) >= self.limit

    def admitted(self, holding: Holding, computed_len: int, now_s: float) -> None:
        """It has a slot; `computed_len` of its tokens are there already."""
        self.holding = holding
        self.prefill_len = len(self.tokens)
        self.prefilled = computed_len
        if self.queue_s is None:
            self.queue_s = now_s - self.arrived_s
            self.num_cached = computed_len

    def retracted(self) -> None:
        """It has lost its slot and is back in the queue, with the tokens it has."""
        self.holding = None
        self.is_leaving = False
        self.prefill_len = self.prefilled = 0
        self.num_retractions += 1
