"""Looks into the prefix cache of an idle engine: what is in it, and whether its pages hold what it says."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.cache.ledger import Ledger
from slipstream.cache.prefix import NOWHERE, Node
from slipstream.engine.runner import Runner
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
        runner: of a HashLM, whose first layer stores each token and its position.
    """
    size = ledger.page_size
    for salt, path in paths(ledger):
        tokens = tuple(token for node in path for token in node.tokens)
        known = any(salt == own and tokens == (*prompt, *answer)[: len(tokens)] for own, prompt, answer in answered)
        must(known, f"cached work must be the beginning of an answer, but {tokens} is of none")
        if runner is None:
            continue
        ((kv, host_kv),) = runner._pages._caches
        for cache, page in ((kv, path[-1].page), (host_kv, path[-1].host_page)):
            if page == NOWHERE:
                continue
            assert cache is not None
            keys, positions = cache.layer(0)
            slots = slice(page * size, (page + 1) * size)
            start = len(tokens) - size
            must(keys[slots].flatten().tolist() == list(path[-1].tokens), f"page {page} must hold {path[-1].tokens}")
            must(positions[slots].flatten().tolist() == list(range(start, start + size)), f"page {page} is out of place")
