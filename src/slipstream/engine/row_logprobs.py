"""Logprobs of the rows that asked for them, taken at the nodes their committed tokens were sampled at."""

from __future__ import annotations

from typing import Literal

from torch import Tensor

from slipstream.engine.plan import Admit, StepLogprobs, StepPlan
from slipstream.observe.guard import declared
from slipstream.sampling.logprobs import logprobs_of
from slipstream.sampling.nodes import GrammarMasks
from slipstream.sampling.sampler import process
from slipstream.sampling.state import RowSampling
from slipstream.speculate.base import Verdict
from slipstream.speculate.sampled_rows import SampledRows, sampling_nodes

LogprobsMode = Literal["raw", "processed"]


class RowLogprobs:
    """Which slots want logprobs, and how many.

    Args:
        mode: `raw` takes the model's logits, `processed` what is left of them after masks, penalties, temperature and truncation.
    """

    def __init__(self, mode: LogprobsMode) -> None:
        self._mode = mode
        self._num_top: dict[int, int] = {}

    def admit(self, admit: Admit) -> None:
        """A new owner of a slot."""
        self._num_top.pop(admit.slot, None)
        if admit.request.params.logprobs is not None:
            self._num_top[admit.slot] = admit.request.params.logprobs

    def of(
        self, plan: StepPlan, rows: SampledRows, logits: Tensor, params: RowSampling, verdict: Verdict, masks: GrammarMasks | None
    ) -> StepLogprobs | None:
        """The step's logprobs on the host; None when no row asked."""
        sampled = plan.sampled
        wanted = [row for row, part in enumerate(sampled) if part.slot in self._num_top]
        if not wanted:
            return None
        if self._mode == "processed":
            logits = process(logits, params, sampling_nodes(rows), masks)
        places = rows.slots.new_tensor(wanted)
        nodes = rows.flat_index.gather(1, verdict.path).index_select(0, places)
        scores = logits.index_select(0, nodes.flatten()).view(*nodes.shape, -1)
        num_top = max(self._num_top[sampled[row].slot] for row in wanted)
        found = logprobs_of(scores, verdict.tokens.index_select(0, places), num_top)
        with declared("the result travels to the host"):
            return StepLogprobs(
                rows={row: place for place, row in enumerate(wanted)},
                chosen=found.chosen.numpy(force=True),
                ranks=found.ranks.numpy(force=True),
                top_ids=found.top_ids.numpy(force=True),
                top_logprobs=found.top_logprobs.numpy(force=True),
            )
