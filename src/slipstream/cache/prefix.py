"""The prefix cache: a radix tree over pages. Each node is one full page, its edge the page's tokens; a path is a prefix.

    salt "" ── [The cat sat on] ─┬─ [the mat and then] ── [it slept ...]        page size 4: four tokens an edge
                page 7           │   page 9                page 4
                                 └─ [a roof, singing]
                                     page 12

Where there is host memory for it, an evicted page is copied there and its node stays (`host_page`); a match brings it back. Host
copies have a line of their own, which is in order for the same reason: what is on the device is a tree's upper part, so children
leave the device, and enter the line of host copies, before their parents.

Where a drafter's KV at a position depends on the token behind it (EAGLE), a page is good for those alone who go on with the same
token: then an edge is the page's tokens and the one behind them, and neighbouring edges overlap by one.

Only whole pages are in the tree, and what is in it is never written again. A page somebody holds is pinned; the others wait in
one line, least recently used first. The line needs no sorting: who holds a page holds all pages before it, and a holding lets go
of its last page first, so a child always stands before its parent and the front of the line is always a leaf.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from slipstream.cache.pool import FreeList
from slipstream.errors import InvariantBroken

PageTokens = tuple[int, ...]
NOWHERE = -1
NOBODY = ""


@dataclass(slots=True, eq=False)
class Node:
    """One cached page.

    Attributes:
        page: its number; NOWHERE at a root, and where only the host has it.
        tokens: its edge: what it holds, page_size tokens, and the one behind them where edges overlap.
        parent: the page before it; None at a root.
        drafter: whose draft KV the page holds as well; NOBODY: nobody's.
        children: pages that come behind it, by their tokens.
        host_page: the copy in host memory; NOWHERE: none.
    """

    page: int
    tokens: PageTokens
    parent: Node | None
    drafter: str
    children: dict[PageTokens, Node] = field(default_factory=dict)
    host_page: int = NOWHERE


class PrefixTree:
    """Finds, adds and forgets cached pages. Knows tokens and pages, not requests.

    Args:
        page_size: tokens of a page.
        num_host_pages: pages of host memory that evicted pages are copied to.
        overlapping: an edge has the token behind its page as well.
    """

    def __init__(self, page_size: int, num_host_pages: int = 0, overlapping: bool = False) -> None:
        self._page_size = page_size
        self._edge_len = page_size + overlapping
        self._host_pages = FreeList(0, num_host_pages)
        self._host_line: OrderedDict[int, Node] = OrderedDict()  # host copies, the next to be forgotten first
        self._kept: set[int] = set()  # host pages that the plan in the making reads: not to be written by it
        self._roots: dict[str, Node] = {}
        self._node_of: dict[int, Node] = {}
        self._line: OrderedDict[int, Node] = OrderedDict()  # nobody holds these; the next to be evicted first

    @property
    def num_evictable(self) -> int:
        """Cached pages that nobody holds."""
        return len(self._line)

    def root(self, salt: str) -> Node:
        """The empty prefix of a salt; requests of different salts share nothing."""
        return self._roots.setdefault(salt, Node(NOWHERE, (), None, NOBODY))

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
        """Edge of each full page from `first_page` on, among the first `num_tokens` tokens, where `tokens` has all of it."""
        size, length = self._page_size, self._edge_len
        last = min(num_tokens - size, len(tokens) - length)
        return (tuple(tokens[at : at + length]) for at in range(first_page * size, last + 1, size))

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

    def evict(self) -> tuple[int, int]:
        """Give up the page unused for longest. Returns it and the host page it must be copied to; NOWHERE: to none."""
        page, node = self._line.popitem(last=False)
        if any(child.page != NOWHERE for child in node.children.values()):
            raise InvariantBroken(f"only a leaf may be evicted, but page {page} has pages behind it")
        del self._node_of[page]
        node.page = NOWHERE
        if node.host_page != NOWHERE:  # what is in the tree is never written again: the copy is still right
            self._host_line.move_to_end(node.host_page)
            return page, NOWHERE
        host_page = self._take_host_page()
        if host_page == NOWHERE:
            self._forget(node)
        else:
            node.host_page = host_page
            self._host_line[host_page] = node
        return page, host_page

    def place(self, node: Node, page: int) -> None:
        """A node that only the host has is on the device again, as `page`, which somebody holds."""
        node.page = page
        self._node_of[page] = node

    def keep(self, node: Node) -> None:
        """The plan in the making reads the node's host copy."""
        self._host_line.move_to_end(node.host_page)
        self._kept.add(node.host_page)

    def planned(self) -> None:
        """The plan is made: later ones come behind it on the device, and may write what it reads."""
        self._kept.clear()

    def clear(self) -> list[int]:
        """Forget everything. Returns the pages that nobody holds; the others are their holders' own from now on."""
        pages = list(self._line)
        for host_page in self._host_line:
            self._host_pages.give(host_page)
        for each in (self._roots, self._node_of, self._line, self._host_line):
            each.clear()
        self._kept.clear()
        return pages

    def _take_host_page(self) -> int:
        if len(self._host_pages):
            return self._host_pages.take()
        oldest = next(iter(self._host_line), NOWHERE)
        if oldest == NOWHERE or oldest in self._kept:
            return NOWHERE
        node = self._host_line.pop(oldest)
        node.host_page = NOWHERE
        if node.page == NOWHERE:
            self._forget(node)
        return oldest

    def _forget(self, node: Node) -> None:
        """Take a node that is nowhere out of the tree, with what is behind it: host copies that nobody could reach."""
        if node.parent is not None:
            del node.parent.children[node.tokens]
        behind = list(node.children.values())
        while behind:
            each = behind.pop()
            behind.extend(each.children.values())
            del self._host_line[each.host_page]
            self._host_pages.give(each.host_page)
