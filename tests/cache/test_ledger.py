"""The ledger's rules: promises, counted steps, single release."""

from __future__ import annotations

import pytest

from slipstream.cache.ledger import Ledger
from slipstream.errors import InvariantBroken


def ledger(num_slots: int = 2, num_pages: int = 8, page_size: int = 4, order: str = "oldest") -> Ledger:
    return Ledger(num_slots, num_pages, page_size, first_page=2, order=order)  # type: ignore[arg-type]


def test_admission_promises_the_whole_limit_and_never_over_commits() -> None:
    books = ledger()
    first = books.admit(17)  # 5 pages of 4
    assert books.can_admit(12) and not books.can_admit(13)
    second = books.admit(12)
    assert not books.can_admit(1), "no slot is left"
    assert len(books.reserve(first, 17)) == 5
    assert len(books.reserve(second, 12)) == 3
    assert books.num_free_pages == 0


def test_a_promise_cannot_be_exceeded() -> None:
    books = ledger()
    holding = books.admit(8)
    with pytest.raises(InvariantBroken, match="promise of 2 pages"):
        books.reserve(holding, 9)


def test_pages_grow_only_when_a_position_needs_one() -> None:
    books = ledger()
    holding = books.admit(16)
    assert books.reserve(holding, 1) == (2,)
    assert books.reserve(holding, 4) == ()
    assert books.reserve(holding, 5) == (3,)
    assert holding.table.pages == [2, 3]


def test_a_slot_in_flight_is_not_reused() -> None:
    books = ledger(num_slots=1)
    holding = books.admit(8)
    books.reserve(holding, 8)
    books.launch(holding)
    books.launch(holding)
    books.release(holding)
    assert not books.can_admit(1) and books.num_free_pages == 6
    books.settle(holding)
    assert not books.can_admit(1)
    books.settle(holding)
    assert books.can_admit(32)
    books.check_balanced()


def test_each_owner_of_a_slot_has_its_own_epoch() -> None:
    books = ledger(num_slots=1)
    first = books.admit(4)
    books.release(first)
    second = books.admit(4)
    assert (first.slot, first.epoch) == (1, 1) and (second.slot, second.epoch) == (1, 2)


def test_reuse_order() -> None:
    taken = {}
    for order in ("oldest", "newest"):
        books = ledger(order=order, num_pages=4)
        holding = books.admit(4)
        first = books.reserve(holding, 4)
        books.release(holding)
        taken[order] = first == books.reserve(books.admit(4), 4)
    assert taken == {"oldest": False, "newest": True}


def test_settling_or_releasing_twice_is_an_error() -> None:
    books = ledger()
    holding = books.admit(4)
    books.launch(holding)
    books.settle(holding)
    with pytest.raises(InvariantBroken, match="settled once"):
        books.settle(holding)
    books.release(holding)
    with pytest.raises(InvariantBroken, match="released once"):
        books.release(holding)
    with pytest.raises(InvariantBroken, match="after its release"):
        books.launch(holding)


def test_balance_names_what_is_held() -> None:
    books = ledger()
    holding = books.admit(8)
    books.reserve(holding, 5)
    with pytest.raises(InvariantBroken, match=r"slots \[1\] are held, 2 pages are taken and 2 promised"):
        books.check_balanced()
    books.release(holding)
    books.check_balanced()
