"""What the device keeps for every slot: page table, token history, limits. Written by plans and by the step that commits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from slipstream.attention.kv import PADDING_PAGE
from slipstream.cache.pages import pages_for
from slipstream.engine.plan import Admit, PageDelta


class DeviceState:
    """Slot-indexed buffers; slot 0 is the padding row.

    Args:
        num_slots: rows, the padding row included.
        context_len: most tokens a request may have.
        page_size: tokens a page holds.
        device: where the buffers live.
        debug: fill histories of new owners with -1 so that a stale read shows.
    """

    def __init__(self, num_slots: int, context_len: int, page_size: int, device: torch.device, debug: bool = False) -> None:
        self.device = device
        self.page_size = page_size
        self.context_len = context_len
        self._debug = debug
        max_pages = pages_for(context_len, page_size)
        self.page_tables = torch.full((num_slots, max_pages), PADDING_PAGE, dtype=torch.int64, device=device)
        # Column context_len + 1 takes the writes of tokens that are not committed; nobody reads it.
        self.history = torch.full((num_slots, context_len + 2), -1, dtype=torch.int64, device=device)
        self.limits = torch.ones(num_slots, dtype=torch.int64, device=device)
        self.draft_from = torch.zeros(num_slots, dtype=torch.int64, device=device)

    def admit(self, admit: Admit) -> None:
        """A new owner: its whole history and its limit; its pages follow as deltas."""
        slot = admit.slot
        self.page_tables[slot] = PADDING_PAGE
        if self._debug:
            self.history[slot] = -1
        self.history[slot, : len(admit.tokens)] = torch.from_numpy(admit.tokens).to(self.device)
        self.limits[slot] = admit.limit
        self.draft_from[slot] = admit.draft_from

    def extend(self, delta: PageDelta) -> None:
        """Write pages into a slot's table."""
        self.page_tables[delta.slot, delta.start : delta.start + len(delta.pages)] = self.upload(delta.pages)

    def upload(self, values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
        """Host integers as an int64 tensor of the same shape on the device."""
        return torch.from_numpy(np.asarray(values, dtype=np.int64)).to(self.device)

    def commit(self, slots: Tensor, base_lens: Tensor, tokens: Tensor, accept_lens: Tensor) -> None:
        """Append committed tokens [R, D + 1] (accept_lens [R] of each count) behind positions base_lens [R]."""
        step = torch.arange(tokens.shape[1], device=self.device)
        column = torch.where(step < accept_lens[:, None], base_lens[:, None] + 1 + step, self.context_len + 1)
        self.history.index_put_((slots[:, None].expand_as(column), column), tokens)
