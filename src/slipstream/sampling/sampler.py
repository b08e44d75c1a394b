"""THE sampler: plain decoding, drafters and verification all come here.

    logits ─► masks ─► bias ─► penalties ─► / T ─► top_k, top_p, min_p ─► - log E ─► argmax
              grammar, allowed, bad words, min_tokens        │                │
                                              `process` ◄────┘   `perturbed` ◄┘      `sample`

The result at a node depends on that node alone: its logits, its row's parameters and seed, its position and the tokens before it.
Not on the other rows of the call, in no bit. Nodes whose rows need the same steps are computed together, and steps that nobody
needs are not run; in an all-greedy step that leaves one argmax.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.observe.guard import declared
from slipstream.sampling.blocks import MIN_VOCAB, column_ids, column_max, largest, lowest_best
from slipstream.sampling.groups import Group, groups_of
from slipstream.sampling.masks import apply_bits, apply_edits
from slipstream.sampling.nodes import GrammarMasks, Nodes
from slipstream.sampling.noise import all_id_bits, log_exponential, noise_bits
from slipstream.sampling.penalties import Penalties, apply_penalties
from slipstream.sampling.state import RowSampling
from slipstream.sampling.transforms import Candidates, Cut, above_floor, keep, ranked, truncated

NUM_COLUMNS = 128  # columns of the vocabulary looked at before the bound is checked
BOUND_SLACK = 1e-4  # nats; far above what rounding does to log E, far below what it costs


@dataclass(frozen=True, slots=True)
class Choice:
    """What was sampled at N nodes: tokens [N] int64 and their final scores [N] (noise included).

    A score that is not finite says that the token means nothing: NaN or +inf came from the logits, -inf from masks that left no
    token.
    """

    tokens: Tensor
    scores: Tensor


def sample(logits: Tensor, rows: RowSampling, nodes: Nodes, masks: GrammarMasks | None = None) -> Tensor:
    """The token at each node: [N] int64, the lower id on ties. Arguments as in `process`."""
    return choose(logits, rows, lambda: nodes, masks).tokens


def choose(logits: Tensor, rows: RowSampling, nodes: Callable[[], Nodes], masks: GrammarMasks | None = None) -> Choice:
    """`sample`, with the winning scores; an all-greedy step does not ask for its nodes."""
    if (rows.numbers is None and masks is None) or not len(logits):
        return _greedy(logits.to(score_dtype(logits)))  # also quicker: 16-bit floats reduce slowly on the CPU
    groups = groups_of(logits, rows, nodes(), masks)
    parts = [_choose(group) for group in groups]
    if len(groups) == 1 and groups[0].places == tuple(range(len(logits))):
        return parts[0]
    order = torch.cat([group.at for group in groups])
    tokens = torch.empty_like(order).index_copy_(0, order, torch.cat([part.tokens for part in parts]))
    found = torch.cat([part.scores for part in parts])
    return Choice(tokens, torch.empty_like(found).index_copy_(0, order, found))


def process(logits: Tensor, rows: RowSampling, nodes: Nodes, masks: GrammarMasks | None = None) -> Tensor:
    """Scores [N, V] of every token, without noise: exp of them, normalised, is what a node samples from.

    Dropped tokens have -inf. float32, or float64 if the logits are. Rows with temperature 0 are not divided and not truncated.

    Args:
        logits: [N, V] any float dtype, one row a node; not written.
        rows: parameters of the R rows.
        nodes: the N nodes.
        masks: what grammars allow at some of the nodes.
    """
    return _gathered(logits, _processed, groups_of(logits, rows, nodes, masks))


def perturbed(logits: Tensor, rows: RowSampling, nodes: Nodes, masks: GrammarMasks | None = None) -> Tensor:
    """`process`, minus log E of each (seed, position, token) where the temperature is above 0: [N, V]; its argmax is `sample`."""
    return _gathered(logits, _perturbed, groups_of(logits, rows, nodes, masks))


def _gathered(logits: Tensor, of: Callable[[Group], Tensor], groups: list[Group]) -> Tensor:
    out = torch.empty(logits.shape, dtype=score_dtype(logits), device=logits.device)
    for group in groups:
        for chunk in group.chunks():
            out.index_copy_(0, chunk.at, of(chunk))
    return out


def score_dtype(logits: Tensor) -> torch.dtype:
    """The dtype that scores of these logits are computed in."""
    return torch.float64 if logits.dtype == torch.float64 else torch.float32


# -- one group ------------------------------------------------------------------------------------------------------


def _choose(group: Group) -> Choice:
    if not group.needs.noise:
        return _stacked([_greedy(_edited(chunk)) for chunk in group.chunks(whole=not group.edited)])
    chunks = group.chunks()
    if group.needs.num_candidates:
        found, enough = _choose_by_rank(group, chunks)
    elif group.vocab_size >= MIN_VOCAB:
        found, enough = _choose_by_columns(chunks)
    else:
        return _stacked([_choose_exactly(chunk) for chunk in chunks])
    with declared("is the best of the tokens that were looked at the best of all?"):
        if bool(enough.all()):
            return found
        lens = [len(chunk.rows) for chunk in chunks]
        doubtful = [not bool(part.all()) for part in torch.split(enough, lens)]
    firm = map(Choice, torch.split(found.tokens, lens), torch.split(found.scores, lens))
    return _stacked([_choose_exactly(c) if doubt else f for c, doubt, f in zip(chunks, doubtful, firm, strict=True)])


def _choose_by_rank(group: Group, chunks: list[Group]) -> tuple[Choice, Tensor]:
    """Rank the best tokens of each node, then truncate and choose among those of all nodes at once. [n] bool: surely right."""
    first = [ranked(_scaled(_edited(chunk), chunk), _cut(chunk)) for chunk in chunks]
    found, enough = keep(Candidates.stacked(first), _cut(group))
    return Choice(*lowest_best(_noisy(found, group), found.ids)), enough


def _choose_by_columns(chunks: list[Group]) -> tuple[Choice, Tensor]:
    """argmax(score - log E) over a whole vocabulary, without most of the logarithms. [n] bool: surely right.

    No token of a column exceeds the column's best score plus the noise of the column's best hash. The few columns with the
    highest such bound are computed; if their best token is above the next bound, it is the best of all.
    """
    parts = []
    for chunk in chunks:
        scores = _scaled(_edited(chunk), chunk)
        bits = noise_bits(*chunk.keys, all_id_bits(chunk.vocab_size, scores.device))
        bound = column_max(scores) - log_exponential(column_max(bits), scores.dtype)
        highest = bound.topk(NUM_COLUMNS + 1, 1)
        ids = column_ids(highest.indices[:, :-1], chunk.vocab_size)
        parts.append((ids, scores.gather(1, ids), bits.gather(1, ids), highest.values[:, -1]))
    ids, scores, bits, bound = (torch.cat(part) if len(part) > 1 else part[0] for part in zip(*parts, strict=True))
    tokens, best = lowest_best(scores - log_exponential(bits, scores.dtype), ids)
    # log E of the best hash may round to more than that of another, by far less than this.
    return Choice(tokens, best), bound + BOUND_SLACK + bound.abs().clamp(max=1e30) * 1e-6 < best


def _choose_exactly(chunk: Group) -> Choice:
    """The same, however many tokens it takes."""
    scores = _scaled(_edited(chunk), chunk)
    found = _truncated(scores, chunk)
    if found is not None:
        return Choice(*lowest_best(_noisy(found, chunk), found.ids))
    return _greedy(_all_noisy(_above_floor(scores, chunk), chunk))


def _greedy(scores: Tensor) -> Choice:
    return Choice(*largest(scores))


def _stacked(parts: list[Choice]) -> Choice:
    if len(parts) == 1:
        return parts[0]
    return Choice(torch.cat([part.tokens for part in parts]), torch.cat([part.scores for part in parts]))


def _processed(chunk: Group) -> Tensor:
    scores = _edited(chunk)
    if not chunk.needs.noise:
        return scores
    scores = _scaled(scores, chunk)
    found = _truncated(scores, chunk)
    return _above_floor(scores, chunk) if found is None else found.scatter(chunk.vocab_size, found.scores)


def _perturbed(chunk: Group) -> Tensor:
    scores = _edited(chunk)
    if not chunk.needs.noise:
        return scores
    scores = _scaled(scores, chunk)
    found = _truncated(scores, chunk)
    if found is None:
        return _all_noisy(_above_floor(scores, chunk), chunk)
    return found.scatter(chunk.vocab_size, _noisy(found, chunk))


def _edited(chunk: Group) -> Tensor:
    """Masks, bias and penalties. The logits themselves where there is nothing to edit: not to be written."""
    logits = chunk.logits
    scores = logits.to(score_dtype(logits))
    if not chunk.edited:
        return scores
    if scores.data_ptr() == logits.data_ptr():
        scores = scores.clone()
    if chunk.bits is not None:
        apply_bits(scores, chunk.bits)
    needs = chunk.needs
    if not (needs.edits or needs.penalties):
        return scores
    prompt_lens = chunk.numbers.integer("prompt_len")
    factors = [chunk.numbers.number(f"{name}_penalty").to(scores.dtype) for name in ("repetition", "presence", "frequency")]
    for start, stop, row in chunk.runs():
        run = chunk.run(start, stop, row)
        if needs.edits:
            apply_edits(scores[start:stop], chunk.edits[row], run, prompt_lens[start])
        if needs.penalties:
            repetition, presence, frequency = (factor[start] for factor in factors)
            penalties = Penalties(repetition, presence, frequency, prompt_lens[start])
            apply_penalties(scores[start:stop], run, penalties, needs.output_counts)
    return scores


def _scaled(scores: Tensor, chunk: Group) -> Tensor:
    return scores / chunk.numbers.number("temperature").to(scores.dtype)[:, None] if chunk.needs.scaled else scores


def _cut(group: Group) -> Cut:
    needs, numbers = group.needs, group.numbers
    return Cut(
        num_candidates=needs.num_candidates,
        top_k=numbers.integer("top_k") if needs.top_k else None,
        top_p=numbers.number("top_p") if needs.top_p else None,
        log_min_p=numbers.number("log_min_p") if needs.min_p else None,
    )


def _truncated(scores: Tensor, chunk: Group) -> Candidates | None:
    """What top_k, top_p and min_p leave. None: all, or so many that `_above_floor` is to say."""
    return truncated(scores, _cut(chunk)) if chunk.needs.num_candidates else None


def _above_floor(scores: Tensor, chunk: Group) -> Tensor:
    return above_floor(scores, chunk.numbers.number("log_min_p")) if chunk.needs.min_p else scores


def _noisy(found: Candidates, group: Group) -> Tensor:
    """Scores of candidates [n, K] minus log E."""
    id_bits = all_id_bits(group.vocab_size, found.ids.device)[0][found.ids]
    return found.scores - log_exponential(noise_bits(*group.keys, id_bits), found.scores.dtype)


def _all_noisy(scores: Tensor, chunk: Group) -> Tensor:
    """Scores of a whole vocabulary [n, V] minus log E."""
    return scores - log_exponential(noise_bits(*chunk.keys, all_id_bits(chunk.vocab_size, scores.device)), scores.dtype)
