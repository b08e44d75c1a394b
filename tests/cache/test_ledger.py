"""The ledger's rules: pages on demand, shared prefixes, counted steps, single release."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from slipstream.cache.ledger import NO_END, NO_MATCH, Holding, Ledger, Match
from slipstream.errors import InvariantBroken

PAGE = 4


def ledger(
    num_slots: int = 2,
    num_pages: int = 8,
    order: str = "oldest",
    caching: bool = True,
    num_host_pages: int = 0,
    shifted_kv: bool = False,
) -> Ledger:
    return Ledger(num_slots, num_pages, PAGE, 2, order, caching, num_host_pages, shifted_kv)


def admit(books: Ledger, num_tokens: int, match: Match = NO_MATCH, salt: str = "", drafter: str = "d") -> Holding:
    return books.admit(match, num_tokens, salt, drafter)


def look(books: Ledger, tokens: Sequence[int], salt: str = "", **how: object) -> Match:
    return books.match(salt, tokens, "d", **how)


def finish(books: Ledger, holding: Holding, tokens: Sequence[int], salt: str = "") -> None:
    """A request that ran over `tokens` and ended."""
    books.cache(holding, tokens, len(tokens))
    books.release(holding)


def ids(match: Match) -> list[int]:
    return [node.page for node in match.nodes]


def test_pages_grow_only_when_a_position_needs_one() -> None:
    books = ledger()
    holding = admit(books, 1)
    assert holding.table.pages == [2]
    assert books.reserve(holding, 4) == ()
    assert books.reserve(holding, 5) == (3,)
    assert holding.table.pages == [2, 3]


def test_a_reservation_that_cannot_be_is_refused_whole() -> None:
    books = ledger(num_pages=3)
    first, second = admit(books, 4), admit(books, 4)
    assert books.reserve(first, 12) is None and first.table.pages == [2]
    assert books.reserve(second, 8) == (4,)
    assert books.room_for(NO_MATCH, 1) == -1


def test_a_slot_in_flight_is_not_reused() -> None:
    books = ledger(num_slots=1)
    holding = admit(books, 8)
    books.launch(holding)
    books.launch(holding)
    books.release(holding)
    assert not books.has_free_slot and books.num_free_pages == 6 and books.is_waiting
    books.settle(holding)
    assert not books.has_free_slot
    books.settle(holding)
    assert books.has_free_slot and not books.is_waiting
    books.check_balanced()


def test_each_owner_of_a_slot_has_its_own_epoch() -> None:
    books = ledger(num_slots=1)
    first = admit(books, 4)
    books.release(first)
    second = admit(books, 4)
    assert (first.slot, first.epoch) == (1, 1) and (second.slot, second.epoch) == (1, 2)


def test_reuse_order() -> None:
    taken = {}
    for order in ("oldest", "newest"):
        books = ledger(order=order, num_pages=4)
        holding = admit(books, 4)
        books.release(holding)
        taken[order] = holding.table.pages == admit(books, 4).table.pages
    assert taken == {"oldest": False, "newest": True}


def test_settling_or_releasing_twice_is_an_error() -> None:
    books = ledger()
    holding = admit(books, 4)
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
    holding = admit(books, 5)
    with pytest.raises(InvariantBroken, match=r"slots \[1\] are held and of 8 pages 6 are free and 0 evictable"):
        books.check_balanced()
    books.release(holding)
    books.check_balanced()


# -- the prefix cache ---------------------------------------------------------------------------------------------------------


def test_finished_work_is_found_by_whole_pages_and_the_last_token_is_left_to_compute() -> None:
    books = ledger()
    finish(books, admit(books, 11), range(11))
    assert books.num_free_pages == 6 and books.num_evictable_pages == 2
    assert look(books, range(100)).computed_len == 8
    assert look(books, range(9)).computed_len == 8
    assert look(books, range(7)).computed_len == 4
    assert look(books, [0, 1, 2, 9]).computed_len == 0
    exact = look(books, range(8))
    assert (ids(exact), exact.copied, exact.computed_len) == ([2], 3, 7), "the page of its last token is copied"


def test_a_match_is_shared_and_pinned_while_somebody_holds_it() -> None:
    books = ledger(num_pages=4)
    finish(books, admit(books, 8), range(8))
    found = look(books, range(20))
    assert books.room_for(found, 20) == -1 and books.room_for(found, 16) == 0
    first = admit(books, 12, found)
    second = admit(books, 12, look(books, range(20)))
    assert first.table.pages[:2] == second.table.pages[:2] and books.num_evictable_pages == 0
    assert books.reserve(first, 13) is None, "what others read is not evicted"
    books.release(first)
    assert books.num_evictable_pages == 0
    books.release(second)
    assert books.num_evictable_pages == 2
    books.check_balanced()


def test_a_copied_page_waits_for_the_step_that_copies_it() -> None:
    books = ledger(num_pages=3)
    finish(books, admit(books, 8), range(8))
    holding = admit(books, 8, look(books, range(8)))
    assert books.take_moves().copies == ((3, 4),) and holding.table.pages == [2, 4]
    books.launch(holding)
    assert books.num_available_pages == 0, "neither the shared page nor the copied one can be had"
    books.settle(holding)
    assert books.num_available_pages == 1
    books.release(holding)
    books.check_balanced()


def test_the_least_recently_used_leaf_is_evicted_first() -> None:
    books = ledger(num_pages=4, num_slots=3)
    finish(books, admit(books, 8), range(8))
    finish(books, admit(books, 8), [0, 1, 2, 3, 9, 9, 9, 9])
    books.release(admit(books, 8, look(books, range(9))))  # used again: [4..7] is younger than [9, 9, 9, 9] now
    admit(books, 8)  # one free page, one evicted
    assert look(books, range(9)).computed_len == 8
    assert look(books, [0, 1, 2, 3, 9, 9, 9, 9, 9]).computed_len == 4
    admit(books, 4)
    assert look(books, range(9)).computed_len == 4, "a leaf goes before its parent"


def test_two_that_compute_the_same_prefix_end_with_one_copy() -> None:
    books = ledger()
    first, second = admit(books, 9), admit(books, 9)
    for holding in (first, second):
        books.launch(holding)
    assert books.cache(first, range(9), 9) == []
    assert books.cache(second, range(9), 9) == [(0, 2), (1, 3)]
    assert second.table.pages[:2] == first.table.pages[:2]
    assert books.num_free_pages == 2, "the second copy is still written by a step in flight"
    books.settle(second)
    assert books.num_free_pages == 4
    books.settle(first)
    for holding in (first, second):
        books.release(holding)
    books.check_balanced()


def test_salts_share_nothing() -> None:
    books = ledger()
    finish(books, admit(books, 8, salt="a"), range(8))
    assert look(books, range(9), salt="a").computed_len == 8
    assert look(books, range(9)).computed_len == look(books, range(9), salt="b").computed_len == 0


def test_a_sibling_copies_the_page_that_is_still_being_written() -> None:
    books = ledger()
    first = admit(books, 6)
    books.launch(first)
    books.cache(first, range(6), 6)
    found = look(books, range(6), sibling=first)
    assert (ids(found), found.copied, found.computed_len) == ([2], 3, 5)
    assert look(books, range(6)).computed_len == 4


def test_shifted_draft_kv_is_shared_by_those_who_go_on_with_the_same_token() -> None:
    books = ledger(shifted_kv=True)
    finish(books, admit(books, 9), range(9))
    assert look(books, [*range(8), 8, 99]).computed_len == 8
    found = look(books, [*range(8), 99])
    assert (ids(found), found.copied, found.computed_len) == ([2], None, 4)
    other = admit(books, 13, found)
    books.cache(other, [*range(8), *range(99, 104)], 12)
    assert look(books, [*range(8), *range(99, 104)]).computed_len == 12, "what comes behind the fork is cached too"
    assert look(books, [*range(8), 8, 99]).computed_len == 8
    assert look(books, range(8)).computed_len == 4, "what comes behind the second page is not known"
    books.release(other)
    books.check_balanced()


def test_a_shifted_page_is_cached_once_the_token_behind_it_is_known() -> None:
    books = ledger(shifted_kv=True)
    holding = admit(books, 8)
    books.cache(holding, range(8), 8)
    assert look(books, range(9)).computed_len == 4
    books.cache(holding, range(9), 8)
    assert look(books, range(9)).computed_len == 8


def test_pages_of_another_drafter_count_for_the_target_alone() -> None:
    books = ledger()
    finish(books, admit(books, 8), range(8))
    found = books.match("", range(13), "other")
    assert (found.computed_len, found.draft_from) == (8, 8)
    holding = admit(books, 13, found, drafter="other")
    books.cache(holding, range(13), 12)
    assert books.match("", range(13), "d").draft_from == 12
    assert books.match("", range(9), "d").draft_from == 0


def test_a_copy_of_another_drafters_page_is_nobodys() -> None:
    """Its own drafter goes on in the middle of the page; once the original is evicted, the copy must not pass for its own."""
    books = ledger(num_pages=4)
    finish(books, admit(books, 8), range(8))
    found = books.match("", range(8), "other")
    assert (ids(found), found.copied, found.computed_len, found.draft_from) == ([2], 3, 7, 7)
    holding = admit(books, 8, found, drafter="other")
    books.launch(holding)
    books.settle(holding)
    other = admit(books, 4)  # evicts the original
    books.cache(holding, range(8), 8)
    books.release(other)
    books.release(holding)
    assert ids(books.match("", range(9), "other")) == holding.table.pages
    assert books.match("", range(9), "other").draft_from == 8


def test_a_siblings_page_of_another_drafter_counts_for_the_target_alone() -> None:
    books = ledger()
    first = admit(books, 7)
    books.cache(first, range(7), 7)
    found = books.match("", range(7), "other", sibling=first)
    assert (found.computed_len, found.draft_from) == (6, 6)


@pytest.mark.parametrize(("draft_from", "draft_to"), [(5, NO_END), (7, NO_END), (0, 5)])
def test_a_siblings_page_with_half_of_the_draft_kv_counts_for_the_target_alone(draft_from: int, draft_to: int) -> None:
    """Its drafter came when the prompt was computed already, or left before it was."""
    books = ledger(shifted_kv=True)
    first = admit(books, 7, drafter="")
    books.cache(first, range(7), 7)
    first.drafter, first.draft_from, first.draft_to = "d", draft_from, draft_to
    found = look(books, range(7), sibling=first)
    assert (found.computed_len, found.draft_from) == (6, 6)


def test_a_reset_forgets_everything_and_takes_nothing_from_who_runs() -> None:
    books = ledger()
    finish(books, admit(books, 8), range(8))
    running = admit(books, 12, look(books, range(12)))
    books.reset_cache()
    assert look(books, range(9)).computed_len == 0 and books.num_evictable_pages == 0 and books.num_free_pages == 5
    finish(books, running, range(12))
    assert look(books, range(9)).computed_len == 0, "what ran over the reset is not cached"
    books.check_balanced()
    assert books.num_free_pages == 8


def test_without_caching_nothing_is_kept_or_shared() -> None:
    books = ledger(caching=False)
    finish(books, admit(books, 8), range(8))
    assert look(books, range(9)) == NO_MATCH and books.num_free_pages == 8


# -- host memory behind the pool --------------------------------------------------------------------------------------------


def test_an_evicted_page_is_kept_in_host_memory_and_brought_back() -> None:
    books = ledger(num_pages=3, num_host_pages=2)
    finish(books, admit(books, 8), range(8))
    finish(books, admit(books, 12), [9] * 12)  # takes one free page and both of the first
    assert books.take_moves().saves == ((3, 0), (2, 1)), "children leave first"
    found = look(books, range(9))
    assert found.computed_len == 8 and ids(found) == [-1, -1]
    assert books.room_for(found, 9) == 0
    holding = admit(books, 9, found)
    moves = books.take_moves()
    assert [source for source, _ in moves.loads] == [1, 0]
    assert [target for _, target in moves.loads] == holding.table.pages[:2]
    books.release(holding)
    books.check_balanced()


def test_a_page_that_is_still_in_host_memory_is_not_saved_again() -> None:
    books = ledger(num_pages=2, num_host_pages=4)
    finish(books, admit(books, 4), range(4))
    admit_and_leave(books, [9] * 8)
    assert len(books.take_moves().saves) == 1
    books.release(admit(books, 5, look(books, range(5))))
    assert len(books.take_moves().loads) == 1
    admit_and_leave(books, [8] * 8)
    assert books.take_moves().saves == ()
    assert look(books, range(5)).computed_len == 4


def test_the_oldest_host_copy_is_forgotten_first_and_never_one_that_this_plan_reads() -> None:
    books = ledger(num_pages=2, num_host_pages=1, num_slots=3)
    finish(books, admit(books, 4), range(4))
    finish(books, admit(books, 4), [7] * 4)
    admit_and_leave(books, [9] * 4)
    assert books.take_moves().saves == ((2, 0),)
    holding = admit(books, 5, look(books, range(5)))  # loads from host page 0, and takes the two pages there are
    moves = books.take_moves()
    assert moves.loads == ((0, holding.table.pages[0]),) and moves.saves == ()
    assert look(books, [7] * 5).computed_len == 0 and look(books, [9] * 5).computed_len == 0
    books.release(holding)
    books.check_balanced()


def test_the_page_of_the_last_token_is_loaded_straight_into_the_copy() -> None:
    books = ledger(num_pages=2, num_host_pages=2)
    finish(books, admit(books, 8), range(8))
    admit_and_leave(books, [9] * 8)
    books.take_moves()
    found = look(books, range(8))
    assert found.computed_len == 7 and found.copied is not None and not isinstance(found.copied, int)
    holding = admit(books, 8, found)
    moves = books.take_moves()
    assert moves.loads == ((1, holding.table.pages[0]), (0, holding.table.pages[1])) and moves.copies == ()


def test_what_is_computed_again_without_draft_kv_is_nobodys() -> None:
    """The host's copy has a drafter's KV; the page that takes its place on the device has not."""
    books = ledger(num_pages=4, num_host_pages=2)
    finish(books, admit(books, 4), range(4))
    finish(books, admit(books, 16), [9] * 16)  # evicts it to the host
    holding = admit(books, 4, drafter="")
    books.cache(holding, range(4), 4)
    assert ids(look(books, range(5))) == holding.table.pages
    assert look(books, range(5)).draft_from == 4


def test_what_is_computed_again_although_the_host_has_it_is_shared_from_then_on() -> None:
    books = ledger(num_pages=4, num_host_pages=2)
    finish(books, admit(books, 4), range(4))
    finish(books, admit(books, 16), [9] * 16)
    holding = admit(books, 4)  # without a match, as for prompt logprobs
    assert books.cache(holding, range(4), 4) == []
    assert ids(look(books, range(5))) == holding.table.pages
    books.release(holding)
    books.check_balanced()


def admit_and_leave(books: Ledger, tokens: Sequence[int]) -> None:
    finish(books, admit(books, len(tokens)), tokens)
