"""Looks into the prefix cache of an idle engine: what is in it, and whether its pages hold what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.cache.ledger import Ledger
from slipstream.cache.prefix import NOWHERE, Node
from slipstream.engine.runner import Runner
from slipstream.speculate.draft_model import DraftModel
from slipstream.testing.hash_head import FOLLOWING
from tests.fuzz.auditor import must


def paths(ledger: Ledger) -> Iterator[tuple[str, tuple[Node, ...]]]:
    """Every path from a root to a node, with its salt."""
    stack = [(salt, (child,)) for salt, root in ledger._tree._roots.items() for child in root.children.values()]
    while stack:
        salt, path = stack.pop()
        yield salt, path
        stack.extend((salt, (*path, child)) for child in path[-1].children.values())


def check_cached(ledger: Ledger, answered: Sequence[tuple[str, Sequence[int], int]], runner: Runner | None) -> None:
    """Hold the cache against what was asked and answered, and, where a HashLM ran, against its KV.

    Args:
        answered: of every request the salt, prompt and answer, and how many of these tokens have KV at most. Behind a cut there
            is nothing: a cached path must spell the beginning of one of them.
        runner: of a HashLM, whose first layer stores each token and its position; so does that of its draft model. A draft head
            stores the token behind as well.
    """
    size = ledger.page_size
    for salt, path in paths(ledger):
        page = path[-1]
        tokens = [*(token for node in path[:-1] for token in node.tokens[:size]), *page.tokens]
        start, end = (len(path) - 1) * size, len(path) * size
        known = any(
            salt == own and end <= num_computed and tokens == list(spelled[: len(tokens)])
            for own, spelled, num_computed in answered
        )
        must(known, f"cached work must be the beginning of an answer, but {tokens} is of none")
        if runner is None:
            continue
        drafter = runner._drafting._drafters.get(page.drafter)
        for kv, host_kv in runner._pages._caches:
            if kv is not runner.kv and (drafter is None or kv is not drafter.kv):  # nobody's, or another drafter's
                continue
            wanted = tokens[start:end], list(range(start, end))
            if kv is not runner.kv and isinstance(drafter, DraftModel):  # from the end of its context on it has nothing
                wanted = wanted[0][: max(drafter._model.context_len - start, 0)], wanted[1]
            elif kv is not runner.kv:
                following = tokens[start + 1 :]
                must(len(following) == size, f"a page of draft KV that is shifted must be cached with {size + 1} tokens")
                wanted = wanted[0], [at * FOLLOWING + token for at, token in zip(wanted[1], following, strict=True)]
            for cache, number in ((kv, page.page), (host_kv, page.host_page)):
                if number == NOWHERE:
                    continue
                assert cache is not None
                stored = (one[number * size : (number + 1) * size].flatten().tolist() for one in cache.layer(0))
                for got, right in zip(stored, wanted, strict=True):
                    num_there = len(wanted[0])
                    must(got[:num_there] == right[:num_there], f"page {number} must hold {right}, but got {got}")
