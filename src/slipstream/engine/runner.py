"""The runner: one plan becomes one device step. It knows slots and tensors; not requests, queues or answers.

    apply plan ─► resolve, propose ─► forward ─► verify ─► publish, commit, compact ─► observe, stash ─► result
                            └──── mask worker ────┘
                              (constrained rows only)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.base import AttentionBackend, AttentionStep
from slipstream.attention.kv import SCRATCH_PAGE, KVCache
from slipstream.attention.layout import build_layout
from slipstream.engine.device_state import DeviceState
from slipstream.engine.drafting import Drafting
from slipstream.engine.masks import MaskPort
from slipstream.engine.page_moves import PageMoves
from slipstream.engine.parts import Parts
from slipstream.engine.plan import IntArray, StepPlan, StepResult
from slipstream.engine.prompt_logprobs import prompt_logprobs
from slipstream.engine.row_logprobs import LogprobsMode, RowLogprobs
from slipstream.engine.step_index import StepIndex
from slipstream.models.base import CausalLM
from slipstream.observe.guard import SyncGuard, declared
from slipstream.relay import FutureMap, Rows
from slipstream.sampling.state import SamplingState
from slipstream.speculate.accept import COUPLED, AcceptRule
from slipstream.speculate.base import Draft, Drafter, Verdict
from slipstream.speculate.sampled_rows import SampledRows, row_ancestors
from slipstream.speculate.verify import verify
from slipstream.types import nothing


class Runner:
    """Runs plans, in order, on one device.

    Args:
        model: the target.
        attention: the attention backend.
        drafters: by name.
        kv: the target's KV cache.
        paged: every cache over the same pages, the target's and drafters', with where its evicted pages are kept; None: nowhere.
        num_slots: most requests that run at once (the padding row comes on top).
        context_len: most tokens a request may have.
        num_known_ids: ids from here on stand for nothing, they fill the model's head up; they are never said.
        eos_token_ids: masked while a row has fewer than min_tokens tokens.
        logprobs_mode: of the model's logits as they are, or after all transforms.
        accept: which drafted tokens are accepted.
        debug: poison relay rows and histories, and guard the step against hidden synchronisation.
    """

    def __init__(
        self,
        *,
        model: CausalLM,
        attention: AttentionBackend,
        drafters: Mapping[str, Drafter],
        kv: KVCache,
        paged: Sequence[tuple[KVCache, KVCache | None]],
        num_slots: int,
        context_len: int,
        num_known_ids: int,
        eos_token_ids: tuple[int, ...],
        device: torch.device,
        logprobs_mode: LogprobsMode = "raw",
        accept: AcceptRule = COUPLED,
        debug: bool = False,
    ) -> None:
        self.model = model
        self.kv = kv
        self._attention = attention
        self._num_known_ids = num_known_ids
        self._device = device
        self._debug = debug
        self._accept = accept
        self.state = DeviceState(num_slots + 1, context_len, kv.page_size, device, debug)
        specs = {name: drafter.relay for name, drafter in drafters.items()}
        self.relay = FutureMap(num_slots + 1, specs, device, debug, declare=declared)
        self.sampling = SamplingState(num_slots + 1, model.vocab_size, eos_token_ids, device)
        self._drafting = Drafting(drafters, self.relay, self.state, self.sampling, kv)
        self._pages = PageMoves(paged)
        self._masks = MaskPort(model.vocab_size, device)
        self._logprobs = RowLogprobs(logprobs_mode)

    @torch.inference_mode()
    def run(self, plan: StepPlan, computes: Callable[[], None] = nothing) -> StepResult:
        """Compute one step and bring its result to the host. See `Device`."""
        started = time.perf_counter()
        guard: AbstractContextManager[object] = SyncGuard() if self._debug else nullcontext()
        with guard:
            self._apply(plan)
            index = StepIndex.of(plan, self._device)
            parts = self._parts(plan)
            roots, draft = self._propose(plan, parts, computes)
            at_roots = self._at_roots(index, parts)
            sampled = self._sampled_rows(plan, index, at_roots, roots, draft)

            masks = self._masks.start(plan, sampled)
            given, attention = self._tokens(plan, index, sampled), self._begin(plan, index, parts, sampled)
            hidden, taps = self.model.forward(given, attention, self._drafting.taps(plan), computes)
            logits = self.model.logits(hidden.index_select(0, index.sampled) if plan.chunks else hidden)
            if self._num_known_ids < logits.shape[1]:
                logits[:, self._num_known_ids :] = -torch.inf
            params = self.sampling.rows([part.slot for part in plan.sampled])
            allowed = masks.wait()
            verdict = verify(logits, sampled, params, allowed, self._accept)

            self._publish(index, parts, verdict)
            self.state.commit(sampled.slots, sampled.base_lens, verdict.tokens, verdict.accept_lens)
            if draft.parents is not None:
                self._compact(at_roots, verdict)
            self._drafting.observe(plan, index, at_roots, params, verdict, taps)
            logprobs = self._logprobs.of(plan, sampled, logits, params, verdict, allowed)
            of_prompts = prompt_logprobs(plan, index, hidden, self.state.history, self.model)
            counts = torch.stack([verdict.accept_lens, sampled.draft.num_nodes, verdict.non_finite], 1)
            with declared("the result travels to the host"):
                taken: IntArray = torch.cat([counts, verdict.tokens], 1).numpy(force=True)
        accept_lens, num_drafted, non_finite, tokens = taken[:, 0], taken[:, 1], taken[:, 2], taken[:, 3:]
        propose_s, observe_s = self._drafting.take_seconds()
        # Tokens of sick logits mean nothing; a matcher that took them would blame the grammar.
        sound = np.where(non_finite < 0, accept_lens, non_finite)
        grammar_ends, errors = self._masks.commit(plan, tokens, sound)
        return StepResult(
            step=plan.step,
            tokens=tokens,
            accept_lens=accept_lens,
            num_drafted=num_drafted,
            non_finite=non_finite,
            grammar_ends=grammar_ends,
            grammar_errors=errors,
            logprobs=logprobs,
            device_s=time.perf_counter() - started,
            propose_s=propose_s,
            observe_s=observe_s,
            prompt_logprobs=of_prompts,
        )

    def close(self) -> None:
        """Stop the mask worker."""
        self._masks.close()

    # -- parts of a step, in order ----------------------------------------------------------------------------------

    def _apply(self, plan: StepPlan) -> None:
        upload = self.state.upload
        if plan.retires:
            self.relay.forgive(upload([retire.slot for retire in plan.retires]))
            for retire in plan.retires:
                self._masks.retire(retire)
        for admit in plan.admits:
            self.state.admit(admit)
            self.sampling.admit(admit.slot, admit.request, admit.prompt_len)
            self._masks.admit(admit)
            self._logprobs.admit(admit)
        if plan.admits:
            opened = Rows(upload([admit.slot for admit in plan.admits]), upload([admit.epoch for admit in plan.admits]))
            self.relay.open(opened, upload([admit.computed_len for admit in plan.admits]))
        for delta in plan.page_deltas:
            self.state.extend(delta)
        if plan.page_saves or plan.page_loads or plan.page_copies:
            self._pages.move(plan)

    def _parts(self, plan: StepPlan) -> Parts:
        """The plan knows where chunks start, the relay how long decoding rows are."""
        named = self.state.upload([[part.slot for part in plan.parts], [part.epoch for part in plan.parts]])
        rows = self.relay.looked_up(Rows(named[0], named[1]))
        lengths = self.relay.lengths(rows)
        if plan.chunks:
            starts = self.state.upload([chunk.start for chunk in plan.chunks])
            lengths = torch.cat([starts, lengths[len(starts) :]])
        limits, tables = (each.index_select(0, rows.slots) for each in (self.state.limits, self.state.page_tables))
        return Parts(rows, lengths, limits, tables)

    def _propose(self, plan: StepPlan, parts: Parts, computes: Callable[[], None]) -> tuple[Tensor, Draft]:
        if plan.rows:
            return self._drafting.propose(plan, parts[len(plan.chunks) :] if plan.chunks else parts, computes)
        none = parts.lengths.new_empty(0)
        return none, Draft(none.view(0, 0), none)

    def _at_roots(self, index: StepIndex, parts: Parts) -> Parts:
        """The parts that sample. A last chunk is a row whose root is the last prompt token; the verify rows come behind."""
        if not index.num_chunks:
            return parts
        return replace(parts, lengths=parts.lengths + index.chunk_roots).at(index.sampled_parts)

    def _sampled_rows(self, plan: StepPlan, index: StepIndex, at_roots: Parts, roots: Tensor, draft: Draft) -> SampledRows:
        """Last chunks, as rows without a draft; behind them the verify rows."""
        slots, base_lens, num_last = at_roots.rows.slots, at_roots.lengths, index.num_last
        if num_last:
            roots = torch.cat([self.state.history[slots[:num_last], base_lens[:num_last]], roots])
            pad = torch.nn.functional.pad
            draft = Draft(
                tokens=pad(draft.tokens, (0, 0, num_last, 0)),
                num_nodes=pad(draft.num_nodes, (num_last, 0)),
                parents=None if draft.parents is None else pad(draft.parents, (0, 0, num_last, 0)),
                probs=None if draft.probs is None else pad(draft.probs, (0, 0, 0, 0, num_last, 0)),
            )
        return SampledRows(
            slots=slots,
            base_lens=base_lens,
            limits=at_roots.limits,
            roots=roots,
            draft=draft,
            ancestors=row_ancestors(draft),
            flat_row=index.flat_row,
            flat_node=index.flat_node,
            flat_index=index.flat_index,
            row_ids=index.row_ids,
            depth=self._drafting.depth(plan),
            history=self.state.history,
            max_history_len=max((part.max_len + 1 for part in plan.sampled), default=0),
        )

    def _tokens(self, plan: StepPlan, index: StepIndex, sampled: SampledRows) -> Tensor:
        """What the target computes: the chunks, then each verify row's root and nodes. [T] int64."""
        num_last = index.num_last
        tokens, nodes = sampled.roots[num_last:], sampled.draft.tokens[num_last:]
        if nodes.shape[1]:
            # A drafter may propose ids it made up; they are never accepted, but they must not index past the embedding.
            nodes = nodes.clamp(0, self.model.vocab_size - 1)
            tokens = torch.cat([tokens[:, None], nodes], 1)[index.verify_row, index.verify_node]
        if plan.chunks:
            tokens = torch.cat([self.state.history[index.chunk_slots, index.chunk_positions], tokens])
        return tokens

    def _begin(self, plan: StepPlan, index: StepIndex, parts: Parts, sampled: SampledRows) -> AttentionStep:
        layout = build_layout(
            page_tables=parts.page_tables,
            page_size=self.kv.page_size,
            base_lens=parts.lengths,
            limits=parts.limits,
            query_lens=index.query_lens,
            max_key_lens=tuple(part.max_len + 1 + part.num_nodes for part in plan.parts),
            num_chunks=index.num_chunks,
            ancestors=None if sampled.ancestors is None else sampled.ancestors[index.num_last :],
        )
        return self._attention.begin(layout, self.kv)

    def _publish(self, index: StepIndex, parts: Parts, verdict: Verdict) -> None:
        """New lengths of every row of the step: chunks that do not sample too."""
        lengths = verdict.new_lengths
        if index.num_chunks:
            ends = parts.lengths[: index.num_chunks] + index.chunk_roots[: index.num_chunks] + 1
            lengths = torch.cat([ends, lengths[index.num_last :]])
        self.relay.publish(parts.rows, lengths)

    def _compact(self, parts: Parts, verdict: Verdict) -> None:
        """Make the KV of accepted paths contiguous: node path[i] was written at base + path[i] and belongs at base + i."""
        step = torch.arange(verdict.path.shape[1], device=self._device)
        kept = step < verdict.accept_lens[:, None]
        scratch = SCRATCH_PAGE * self.kv.page_size
        tables, base = parts.page_tables, parts.lengths[:, None]
        last_page = tables.shape[1] - 1

        def kv_slots(positions: Tensor) -> Tensor:
            pages = tables.gather(1, (positions // self.kv.page_size).clamp(max=last_page))
            return torch.where(kept, pages * self.kv.page_size + positions % self.kv.page_size, scratch).flatten()

        self.kv.move(kv_slots(base + verdict.path), kv_slots(base + step))
