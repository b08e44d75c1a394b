"""The mask port: the one place where a step needs the host. It knows which rows are constrained; the worker alone has matchers.

    device     propose ──► forward ───────────► verify ──► ...
                  │ draft                ▲ bits    │ tokens
    worker        └─► fill the nodes ────┘         └─► advance: where did the grammar close?

Steps without a constrained row never touch it.
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import numpy as np
import torch

from slipstream.engine.plan import Admit, IntArray, Retire, StepPlan
from slipstream.observe.guard import declared
from slipstream.sampling.grammar import NOT_CLOSED, HostMasks, MaskWorker, RowKey
from slipstream.sampling.nodes import GrammarMasks
from slipstream.speculate.sampled_rows import SampledRows


@dataclass(frozen=True, slots=True)
class PendingMasks:
    """Masks being worked out beside the forward pass; None where no row is constrained."""

    future: Future[HostMasks] | None
    device: torch.device

    def wait(self) -> GrammarMasks | None:
        """Wait for the worker and bring the masks to the device."""
        if self.future is None:
            return None
        masks = self.future.result()
        return GrammarMasks(torch.from_numpy(masks.nodes).to(self.device), torch.from_numpy(masks.bits).to(self.device))


class MaskPort:
    """Tells the mask worker what a step needs to tell it."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._worker = MaskWorker(vocab_size)
        self._device = device
        self._constrained: set[int] = set()

    def admit(self, admit: Admit) -> None:
        """A new owner of a slot; its matcher is rebuilt from what it has generated before."""
        if admit.request.grammar is not None:
            self._constrained.add(admit.slot)
            self._worker.open(admit.slot, admit.epoch, admit.request.grammar, admit.tokens[admit.prompt_len :].tolist())

    def retire(self, retire: Retire) -> None:
        """The owner is gone."""
        if retire.slot in self._constrained:
            self._constrained.remove(retire.slot)
            self._worker.close(retire.slot, retire.epoch)

    def start(self, plan: StepPlan, rows: SampledRows) -> PendingMasks:
        """Ask for the masks of this step's constrained rows, at their roots and draft nodes."""
        own, keys = self._rows(plan)
        if not own:
            return PendingMasks(None, self._device)
        with declared("grammars need the draft on the host"):
            draft = rows.draft
            future = self._worker.masks(
                keys,
                draft.tokens.numpy(force=True)[own],
                None if draft.parents is None else draft.parents.numpy(force=True)[own],
                draft.num_nodes.numpy(force=True)[own],
                rows.flat_index.numpy(force=True)[own],
            )
        return PendingMasks(future, self._device)

    def commit(self, plan: StepPlan, tokens: IntArray, accept_lens: IntArray) -> tuple[IntArray, dict[int, str]]:
        """Advance the matchers by what was committed.

        Returns [rows] int64, tokens up to and with the one that closed the row's grammar (-1: it did not close), and what went
        wrong with a row's matcher, by row.
        """
        ends = np.full(len(plan.sampled), NOT_CLOSED, dtype=np.int64)
        own, keys = self._rows(plan)
        if not own:
            return ends, {}
        committed = self._worker.commit(keys, tokens[own], accept_lens[own]).result()
        ends[own] = committed.ends
        return ends, {own[place]: error for place, error in committed.errors.items()}

    def close(self) -> None:
        """Stop the worker."""
        self._worker.shutdown()

    def _rows(self, plan: StepPlan) -> tuple[list[int], list[RowKey]]:
        """Which sampled rows are constrained, and their (slot, epoch)."""
        if not self._constrained:
            return [], []
        own = [(row, (part.slot, part.epoch)) for row, part in enumerate(plan.sampled) if part.slot in self._constrained]
        return [row for row, _ in own], [key for _, key in own]
