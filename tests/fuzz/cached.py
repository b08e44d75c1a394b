"""Looks into the prefix cache of an idle engine: what is in it, and whether its pages hold what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.cache.ledger import Ledger
from slipstream.cache.prefix import NOWHERE, Node
from slipstream.engine.runner import Runner
from slipstream.speculate.base import Drafter
from slipstream.speculate.draft_model import DraftModel
from tests.fuzz.auditor import must


def paths(ledger: Ledger) -> Iterator[tuple[str, tuple[Node, ...]]]:
    """Every path from a root to a node, with its salt."""
    stack = [(salt, (child,)) for salt, root in ledger._tree._roots.items() for child in root.children.values()]
    while stack:
        salt, path = stack.pop()
        yield salt, path
        stack.extend((salt, (*path, child)) for child in path[-1].children.values())


def check_cached(ledger: Ledger, answered: Sequence[tuple[str, Sequence[int], Sequence[int]]], runner: Runner | None) -> None:
    """Hold the cache against what was asked and answered, and, where a HashLM ran, against its KV.

    Args:
        answered: salt, prompt and computed part of the answer, of every request. Behind a cut there is nothing: a cached path
            must spell the beginning of one of them.
        runner: of a HashLM, whose first layer stores each token and its position; so does that of its draft model.
    """
    size = ledger.page_size
    for salt, path in paths(ledger):
        tokens = tuple(token for node in path for token in node.tokens)
        known = any(salt == own and tokens == (*prompt, *answer)[: len(tokens)] for own, prompt, answer in answered)
        must(known, f"cached work must be the beginning of an answer, but {tokens} is of none")
        if runner is None:
            continue
        drafter = runner._drafting._drafters.get(path[-1].drafter)
        start = len(tokens) - size
        for kv, host_kv in runner._pages._caches:
            whose = "the target's" if kv is runner.kv else "the draft model's"
            if kv is not runner.kv and (drafter is None or kv is not drafter.kv):  # nobody's, or another drafter's
                continue
            end = len(tokens) if kv is runner.kv else min(len(tokens), _context_of(drafter))
            for cache, page in ((kv, path[-1].page), (host_kv, path[-1].host_page)):
                if page == NOWHERE:
                    continue
                assert cache is not None
                slots = slice(page * size, (page + 1) * size)
                keys, positions = (one[slots].flatten().tolist()[: max(end - start, 0)] for one in cache.layer(0))
                must(keys == list(path[-1].tokens)[: len(keys)], f"{whose} page {page} must hold {path[-1].tokens}")
                must(positions == list(range(start, start + len(keys))), f"{whose} page {page} is out of place")


def _context_of(drafter: Drafter | None) -> int:
    """Positions from which on its own KV holds nothing."""
    return drafter._model.context_len if isinstance(drafter, DraftModel) else 0
