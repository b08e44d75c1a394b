"""The layouts of a growing chain, all at once, are those that `build_layout` makes pass by pass."""

from __future__ import annotations

import pytest
import torch

from slipstream.attention.kv import NUM_RESERVED_PAGES
from slipstream.attention.layout import build_layout, chain_layouts


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("has_first_keys", [False, True])
@pytest.mark.parametrize("seed", range(8))
def test_they_are_those_of_single_passes(seed: int, has_first_keys: bool, page_size: int) -> None:
    g = torch.Generator().manual_seed(seed)
    num_rows, num_levels, num_pages = 1 + seed, 4, 160 // page_size
    pages = torch.randperm(num_rows * num_pages, generator=g).view(num_rows, num_pages) + NUM_RESERVED_PAGES
    base = torch.randint(1, 100, (num_rows,), generator=g)
    # Some end within the chain, some before it, some behind it.
    limits = base + torch.randint(0, 2 * num_levels, (num_rows,), generator=g)
    slack = torch.randint(0, 3, (num_rows,), generator=g)
    first = torch.minimum(base, torch.randint(0, 60, (num_rows,), generator=g)) if has_first_keys else None
    bounds = tuple((base + 1 + slack).tolist())
    made = chain_layouts(
        page_tables=pages,
        page_size=page_size,
        base_lens=base,
        limits=limits,
        max_key_lens=bounds,
        num_levels=num_levels,
        first_keys=first,
    )
    assert len(made) == num_levels
    for level, layout in enumerate(made):
        expected = build_layout(
            page_tables=pages,
            page_size=page_size,
            base_lens=base + level,
            limits=limits,
            query_lens=(1,) * num_rows,
            max_key_lens=tuple(bound + level for bound in bounds),
            first_keys=first,
        )
        assert (layout.query_lens, layout.max_key_lens) == (expected.query_lens, expected.max_key_lens)
        assert layout.num_chunks == 0 and layout.ancestors is None
        for name in ("segment", "index", "positions", "base_lens", "write_slots", "read_slots"):
            assert torch.equal(getattr(layout, name), getattr(expected, name)), (level, name)


def test_no_level_needs_no_layout() -> None:
    one = torch.zeros(1, dtype=torch.int64)
    none = chain_layouts(
        page_tables=one[:, None], page_size=16, base_lens=one, limits=one, max_key_lens=(1,), num_levels=0
    )
    assert none == []
