"""The parts of a step as the device sees them: prompt chunks, then verify rows."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from slipstream.relay import Rows


@dataclass(frozen=True, slots=True)
class Parts:
    """P parts of a step, gathered once for all who need them.

    Attributes:
        rows: slots and epochs.
        lengths: [P] int64, tokens whose KV exists: where a chunk starts, and the position of a verify row's root.
        limits: [P] int64, most tokens the row may ever have.
        page_tables: [P, max_pages] int64.
    """

    rows: Rows
    lengths: Tensor
    limits: Tensor
    page_tables: Tensor

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, part: slice) -> Parts:
        return Parts(self.rows[part], self.lengths[part], self.limits[part], self.page_tables[part])

    def at(self, places: Tensor) -> Parts:
        """The parts at places [n] int64."""
        lengths, limits, tables = (each.index_select(0, places) for each in (self.lengths, self.limits, self.page_tables))
        return Parts(self.rows.at(places), lengths, limits, tables)
