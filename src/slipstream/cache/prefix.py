"""The prefix cache: a radix tree over pages. Each node is one full page, its edge the page's tokens; a path is a prefix.

    salt "" ── [The cat sat on] ─┬─ [the mat and then] ── [it slept ...]        page size 4: four tokens an edge
                page 7           │   page 9                page 4
                                 └─ [a roof, singing]
                                     page 12

Only whole pages are in the tree, and what is in it is never written again. A page somebody holds is pinned; the others wait in
one line, least recently used first. The line needs no sorting: who holds a page holds all pages before it, and a holding lets go
of its last page first, so a child always stands before its parent and the front of the line is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slipstream.errors import InvariantBroken

PageTokens = tuple[int, ...]


@dataclass(slots=True, eq=False)
class Node:
    """One cached page.

    Attributes:
        page: its number; -1 at a root.
        tokens: what it holds, page_size tokens.
        parent: the page before it; None at a root.
        drafter: whose draft KV the page holds as well.
        children: pages that come behind it, by their tokens.
    """

    page: int
    tokens: PageTokens
    parent: Node | None
    drafter: str
    children: dict[PageTokens, Node] = field(default_factory=dict)


class PrefixTree:
    """Finds, adds and forgets cached pages. Knows tokens and pages, not requests.

    Args:
        page_size: tokens of a page.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._roots: dict[str, Node] = {}
        self._node_of: dict[int, Node] = {}
        self._line: OrderedDict[int, Node] = OrderedDict()  # nobody holds these; the next to be evicted first

    @property
    def num_evictable(self) -> int:
        """Cached pages that nobody holds."""
        return len(self._line)

    def root(self, salt: str) -> Node:
        """The empty prefix of a salt; requests of different salts share nothing."""
        return self._roots.setdefault(salt, Node(-1, (), None, ""))

    def match(self, salt: str, tokens: Sequence[int]) -> list[Node]:
        """The longest cached path that spells the beginning of `tokens`."""
        node = self._roots.get(salt)
        found: list[Node] = []
        for key in self.keys(tokens, 0, len(tokens)):
            node = node.children.get(key) if node is not None else None
            if node is None:
                break
            found.append(node)
        return found

    def keys(self, tokens: Sequence[int], first_page: int, num_tokens: int) -> Iterator[PageTokens]:
        """Tokens of each full page from `first_page` on, among the first `num_tokens` tokens."""
        size = self._page_size
        return (tuple(tokens[at : at + size]) for at in range(first_page * size, num_tokens - size + 1, size))

    def add(self, parent: Node, tokens: PageTokens, page: int, drafter: str) -> Node:
        """Put a page somebody holds behind `parent`."""
        if page in self._node_of or tokens in parent.children:
            raise InvariantBroken(f"a page must enter the prefix cache once, but page {page} or its prefix is there")
        node = parent.children[tokens] = self._node_of[page] = Node(page, tokens, parent, drafter)
        return node

    def holds(self, page: int) -> bool:
        """Whether a page is cached."""
        return page in self._node_of

    def pin(self, page: int) -> None:
        """Somebody holds the page from now on: out of the line."""
        self._line.pop(page, None)

    def unpin(self, page: int) -> None:
        """Nobody holds the page any more: to the end of the line."""
        self._line[page] = self._node_of[page]

    def evict(self) -> int:
        """Forget the page unused for longest and return it."""
        page, node = self._line.popitem(last=False)
        if node.children or node.parent is None:
            raise InvariantBroken(f"only a leaf may be evicted, but page {page} has pages behind it")
        del node.parent.children[node.tokens]
        del self._node_of[page]
        return page

    def clear(self) -> list[int]:
        """Forget everything. Returns the pages that nobody holds; the others are their holders' own from now on."""
        pages = list(self._line)
        self._roots.clear()
        self._node_of.clear()
        self._line.clear()
        return pages
