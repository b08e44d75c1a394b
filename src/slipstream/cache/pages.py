"""The pages of one request, in order: page i holds positions [i * page_size, (i + 1) * page_size)."""

from __future__ import annotations


def pages_for(num_tokens: int, page_size: int) -> int:
    """Pages that hold `num_tokens` positions."""
    return -(-num_tokens // page_size)


class PageTable:
    """Pages a request holds; it only grows until the request ends."""

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.pages: list[int] = []

    def missing(self, num_tokens: int) -> int:
        """Pages still to add before positions [0, num_tokens) are covered."""
        return max(0, pages_for(num_tokens, self.page_size) - len(self.pages))
