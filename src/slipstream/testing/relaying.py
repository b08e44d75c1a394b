"""A drafter that relays every field there is, and checks on each side of the relay what the engine shows it.

What it relays for a row is a function of (slot, epoch, bonus token, committed length). `propose` computes it once more from what
it is given: a value that went to another row, came from another step or was lost on the way differs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.attention.kv import KVCache, LayerKV
from slipstream.observe.guard import declared
from slipstream.relay import DraftInput, FieldSpec, RelayPayload, RelaySpec
from slipstream.speculate.base import Draft, Drafter, StepContext, Verdict
from slipstream.speculate.registry import Target
from slipstream.testing.drafters import DrafterFactory, hash_of
from slipstream.testing.hash_lm import LAYER_SALT, MANTISSA_BITS, HashLM, mix

HIDDEN = 5


class RelayMismatch(AssertionError):
    """A drafter was shown something else than what the contract says."""


def relaying(inner: DrafterFactory, k: int, probs_steps: int = 0) -> DrafterFactory:
    """Drafts what `inner` drafts, relays k scores and ids, a hidden state and probs of (vocab,) or (probs_steps, vocab)."""
    return lambda target: RelayingDrafter(target, inner(target), k, probs_steps)


class RelayingDrafter:
    """See the module.

    Args:
        target: its vocabulary shapes `draft_probs`. Where it is a HashLM, the taps are checked as well.
        inner: proposes. It must relay nothing itself.
        k: first-level candidates relayed.
        probs_steps: rows of `draft_probs`; 0: it has one row less, (vocab,).
    """

    shifted_kv = False
    kv_layers: tuple[LayerKV, ...] = ()
    kv: KVCache | None = None
    kv_behind = 0
    catches_up = False
    num_parameters = 0
    weight_bytes = 0

    def __init__(self, target: Target, inner: Drafter, k: int, probs_steps: int = 0) -> None:
        self._inner = inner
        self._vocab_size = target.model.vocab_size
        self.depth, self.num_nodes, self.max_writes = inner.depth, inner.num_nodes, inner.max_writes
        self.relay = RelaySpec(
            {
                "topk_p": FieldSpec((k,), torch.float32),
                "topk_index": FieldSpec((k,), torch.int64),
                "hidden_states": FieldSpec((HIDDEN,), torch.float64),
                "draft_probs": FieldSpec((probs_steps, self._vocab_size) if probs_steps else (self._vocab_size,), torch.float32),
            }
        )
        self.taps: tuple[int, ...] = (0, target.model.num_layers)
        self._tokens_are_taps = isinstance(target.model, HashLM)

    def propose(self, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        """Check what came back, then draft as the inner drafter does."""
        wanted = self._extras(ctx.slots, ctx.epochs, payload.bonus_tokens, ctx.lengths)
        given = payload.extras()
        with declared("a test's check"):
            if given.keys() != wanted.keys():
                raise RelayMismatch(f"propose must get {sorted(wanted)}, but got {sorted(given)}")
            for name, value in wanted.items():
                if not torch.equal(given[name], value):
                    wrong = (given[name] != value).flatten(1).any(1)
                    raise RelayMismatch(f"{name} of slots {ctx.slots[wrong].tolist()} is not what observe returned for them")
        return self._inner.propose(ctx, RelayPayload(payload.bonus_tokens), width)

    def observe(self, ctx: StepContext, verdict: Verdict, taps: Tensor | None) -> DraftInput | None:
        """Check what is shown of chunks, taps and verdicts; relay."""
        with declared("a test's check"):
            self._check_verdict(ctx, verdict)
            self._check_chunks(ctx, verdict)
            self._check_taps(ctx, verdict, taps)
        return DraftInput(**self._extras(ctx.slots, ctx.epochs, verdict.bonus_tokens, verdict.new_lengths))

    def _extras(self, slots: Tensor, epochs: Tensor, bonus: Tensor, lengths: Tensor) -> dict[str, Tensor]:
        key = hash_of(0, slots, epochs, bonus, lengths)
        out: dict[str, Tensor] = {}
        for salt, (name, spec) in enumerate(self.relay.fields.items()):
            cells = torch.arange(torch.Size(spec.shape).numel(), device=key.device)
            hashed = mix(key[:, None] + cells * LAYER_SALT + salt) % 65521
            if name == "topk_index":
                hashed = hashed % self._vocab_size
            out[name] = hashed.to(spec.dtype).view(len(slots), *spec.shape)
        return out

    def _check_verdict(self, ctx: StepContext, verdict: Verdict) -> None:
        _must(torch.equal(verdict.new_lengths, ctx.lengths + verdict.accept_lens), "new_lengths are lengths + accept_lens")
        counted = torch.arange(verdict.tokens.shape[1], device=ctx.slots.device) < verdict.accept_lens[:, None]
        _must(bool(((verdict.tokens >= 0) == counted).all()), "tokens are -1 exactly behind the committed ones")
        columns = (ctx.lengths[:, None] + verdict.accept_lens[:, None]).clamp(max=ctx.history.shape[1] - 1)
        last = ctx.history[ctx.slots[:, None], columns][:, 0]
        _must(torch.equal(last, verdict.bonus_tokens), "the bonus is the last token of the history")
        _must(bool((verdict.new_lengths < ctx.limits).all()), "no row commits past its limit")

    def _check_chunks(self, ctx: StepContext, verdict: Verdict) -> None:
        chunks = ctx.chunks
        if chunks is None:
            return
        _must(chunks.tokens.shape == chunks.next_tokens.shape == (sum(chunks.lens),), "chunk tokens are flat")
        tokens, following = (torch.split(flat, list(chunks.lens)) for flat in (chunks.tokens, chunks.next_tokens))
        sampled = 0
        for place, (mine, after, is_last) in enumerate(zip(tokens, following, chunks.is_last, strict=True)):
            _must(torch.equal(mine[1:], after[:-1]), "next_tokens are the tokens, one further")
            if is_last:
                _must(int(ctx.slots[sampled]) == int(chunks.slots[place]), "last chunks are the first rows, in order")
                _must(int(after[-1]) == int(verdict.tokens[sampled, 0]), "behind a last chunk comes the sampled token")
                sampled += 1
            else:
                _must(int(after[-1]) >= 0, "behind a chunk comes the prompt's next token")

    def _check_taps(self, ctx: StepContext, verdict: Verdict, taps: Tensor | None) -> None:
        chunks = ctx.chunks
        num_chunk_tokens = 0 if chunks is None else sum(chunks.lens)
        num_last = 0 if chunks is None else sum(chunks.is_last)
        nodes = [1 + count for count in ctx.num_nodes[num_last:]]
        if taps is None:
            raise RelayMismatch("observe must get the taps it declared, but got None")
        _must(taps.shape[0] == num_chunk_tokens + sum(nodes), "taps hold the chunk tokens, then each row's root and nodes")
        if not self._tokens_are_taps:
            return
        shown = taps[:, 0].mul(2.0**MANTISSA_BITS).to(torch.int64)
        if chunks is not None:
            _must(torch.equal(shown[:num_chunk_tokens], chunks.tokens), "the first taps are the chunk tokens'")
        if nodes:
            starts = torch.tensor([0, *nodes[:-1]]).cumsum(0) + num_chunk_tokens
            roots = ctx.history[ctx.slots[num_last:], ctx.lengths[num_last:]]
            _must(torch.equal(shown[starts], roots), "behind them come the rows', root first")


def _must(holds: bool, what: str) -> None:
    if not holds:
        raise RelayMismatch(f"what a drafter sees must hold: {what}")
