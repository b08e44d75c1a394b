"""verify on drawn trees: what is accepted, where the KV path runs, limits, and the tree bookkeeping behind it."""

from __future__ import annotations

import random

import pytest
import torch

from slipstream.attention.layout import tree_ancestors
from slipstream.sampling.sampler import Choice
from slipstream.speculate import verify as module
from slipstream.speculate.accept import COUPLED
from slipstream.speculate.base import Draft, Verdict
from slipstream.speculate.sampled_rows import SampledRows, draft_paths, row_ancestors
from slipstream.speculate.verify import verify

VOCAB = 32


@pytest.fixture(autouse=True)
def greedy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The target's token at each node is what the test put on top."""
    monkeypatch.setattr(module, "choose", lambda logits, sampling, nodes, masks: Choice(logits.argmax(1), logits.amax(1)))


def rows_of(
    tokens: list[list[int]], parents: list[list[int]] | None, bases: list[int], limits: list[int], depth: int
) -> SampledRows:
    draft = Draft(
        torch.tensor(tokens, dtype=torch.int64).view(len(tokens), -1),
        torch.tensor([len(row) for row in tokens]),
        None if parents is None else torch.tensor(parents),
    )
    num_rows, width = draft.tokens.shape
    return SampledRows(
        slots=torch.arange(1, num_rows + 1),
        base_lens=torch.tensor(bases),
        limits=torch.tensor(limits),
        roots=torch.full((num_rows,), 31),
        draft=draft,
        ancestors=row_ancestors(draft),
        flat_row=torch.arange(num_rows).repeat_interleave(width + 1),
        flat_node=torch.arange(width + 1).repeat(num_rows),
        flat_index=torch.arange(num_rows * (width + 1)).view(num_rows, width + 1),
        row_ids=tuple(r for r in range(num_rows) for _ in range(width + 1)),
        depth=depth,
        history=torch.zeros((num_rows + 1, 64), dtype=torch.int64),
        max_history_len=32,
    )


def decide(rows: SampledRows, target: list[list[int]]) -> Verdict:
    """`target[r][j]` is the target's own token at node j of row r."""
    logits = torch.nn.functional.one_hot(torch.tensor(target).flatten(), VOCAB).double()
    return verify(logits, rows, None, None, COUPLED)


def test_without_a_draft_one_token_is_committed() -> None:
    verdict = decide(rows_of([[], []], None, [4, 9], [100, 100], 0), [[7], [8]])
    assert verdict.tokens.tolist() == [[7], [8]]
    assert verdict.accept_lens.tolist() == [1, 1] and verdict.new_lengths.tolist() == [5, 10]
    assert verdict.bonus_tokens.tolist() == [7, 8] and verdict.path.tolist() == [[0], [0]]


@pytest.mark.parametrize("agreeing", range(4))
def test_a_chain_is_accepted_up_to_its_first_miss(agreeing: int) -> None:
    draft = [1, 2, 3]
    target = [draft[j] if j < agreeing else 20 + j for j in range(4)]
    verdict = decide(rows_of([draft], None, [10], [100], 3), [target])
    wanted = [*draft[:agreeing], 20 + agreeing]
    assert verdict.tokens.tolist() == [wanted + [-1] * (3 - agreeing)]
    assert verdict.accept_lens.tolist() == [agreeing + 1]
    assert verdict.bonus_tokens.tolist() == [wanted[-1]]
    assert verdict.path.tolist() == [[*range(agreeing + 1), *[0] * (3 - agreeing)]]


def test_a_tree_follows_the_child_that_agrees() -> None:
    #  root ─ 1:a ─ 3:c          the target says b at the root, d at node 2, z at node 4
    #       └ 2:b ─ 4:d
    tokens, parents = [[10, 11, 12, 13]], [[0, 0, 1, 2]]
    verdict = decide(rows_of(tokens, parents, [5], [100], 2), [[11, 0, 13, 0, 25]])
    assert verdict.tokens.tolist() == [[11, 13, 25]]
    assert verdict.path.tolist() == [[0, 2, 4]]


def test_nodes_that_do_not_count_are_never_accepted() -> None:
    rows = rows_of([[1, 2, 3]], None, [5], [100], 3)
    short = SampledRows(**{f: getattr(rows, f) for f in rows.__slots__} | {"draft": Draft(rows.draft.tokens, torch.tensor([1]))})
    verdict = decide(short, [[1, 2, 3, 4]])
    assert verdict.tokens.tolist() == [[1, 2, -1, -1]]


@pytest.mark.parametrize("room, kept", [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 3, 9]), (9, [1, 2, 3, 9])])
def test_the_limit_clamps_what_is_committed(room: int, kept: list[int]) -> None:
    verdict = decide(rows_of([[1, 2, 3]], None, [5], [5 + 1 + room], 3), [[1, 2, 3, 9]])
    assert verdict.tokens.tolist() == [kept + [-1] * (4 - len(kept))]
    assert verdict.new_lengths.tolist() == [5 + len(kept)]
    assert verdict.bonus_tokens.tolist() == [kept[-1] if kept else 31], "at its limit a row keeps its root"


def test_non_finite_logits_count_only_on_the_accepted_path() -> None:
    rows = rows_of([[1, 2]], None, [5], [100], 2)
    logits = torch.nn.functional.one_hot(torch.tensor([1, 9, 0]), VOCAB).double()
    for node, bad in ((2, -1), (1, 1), (0, 0)):  # node 1 is accepted and its own sample misses node 2
        sick = logits.clone()
        sick[node, 9] = float("inf")
        assert verify(sick, rows, None, None, COUPLED).non_finite.tolist() == [bad]
    everything = torch.full((3, VOCAB), -torch.inf, dtype=torch.float64)
    assert verify(everything, rows, None, None, COUPLED).non_finite.tolist() == [0]


def test_random_trees_against_a_walk_in_plain_python() -> None:
    rng = random.Random(0)
    for _ in range(200):
        width, depth_bound = rng.randint(1, 9), 9
        tokens = [[rng.randrange(4) for _ in range(width)] for _ in range(3)]
        parents = [[rng.randint(0, j) for j in range(width)] for _ in range(3)]
        target = [[rng.randrange(4) for _ in range(width + 1)] for _ in range(3)]
        verdict = decide(rows_of(tokens, parents, [5, 6, 7], [100] * 3, depth_bound), target)
        for r in range(3):
            node, out = 0, []
            while True:
                out.append(target[r][node])
                child = [j + 1 for j in range(width) if parents[r][j] == node and tokens[r][j] == out[-1]]
                if not child:
                    break
                node = child[0]
            assert verdict.tokens[r, : len(out)].tolist() == out and verdict.accept_lens[r] == len(out)


def test_ancestors_and_paths_of_random_trees() -> None:
    rng = random.Random(1)
    for width in (1, 2, 3, 7, 8, 16, 33):
        parents = [rng.randint(0, j) for j in range(width)]
        tokens = list(range(100, 100 + width))
        reach = tree_ancestors(torch.tensor([parents]))[0]
        draft = Draft(torch.tensor([tokens]), torch.tensor([width]), torch.tensor([parents]))
        paths, depths = draft_paths(draft, reach[None], width)
        for node in range(width + 1):
            chain, at = [], node
            while at:
                chain.append(at)
                at = parents[at - 1]
            assert sorted([0, *chain]) == reach[node].nonzero()[:, 0].tolist()
            assert depths[0, node] == len(chain)
            assert paths[0, node].tolist() == [tokens[a - 1] for a in reversed(chain)] + [-1] * (width - len(chain))
