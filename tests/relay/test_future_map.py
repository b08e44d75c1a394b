"""FutureMap: what is stashed is what is resolved, and every way to break the relay's rules is found."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from slipstream.relay import EXTRAS, PADDING_SLOT, FieldSpec, FutureMap, RelayError, RelayPayload, RelaySpec, Rows

CPU = torch.device("cpu")
FULL = RelaySpec(
    {
        "topk_p": FieldSpec((3,), torch.float32),
        "topk_index": FieldSpec((3,), torch.int64),
        "hidden_states": FieldSpec((5,), torch.float64),
        "draft_probs": FieldSpec((2, 7), torch.float32),
    }
)
SPECS = {"off": RelaySpec(), "full": FULL, "other": RelaySpec({"topk_index": FieldSpec((1,), torch.int64)})}


def make(debug: bool = True, num_slots: int = 6) -> FutureMap:
    return FutureMap(num_slots, SPECS, CPU, debug)


def rows(*pairs: tuple[int, int]) -> Rows:
    return Rows(torch.tensor([slot for slot, _ in pairs]), torch.tensor([epoch for _, epoch in pairs]))


def opened(relay: FutureMap, *pairs: tuple[int, int]) -> Rows:
    who = rows(*pairs)
    relay.open(who, torch.zeros(len(pairs), dtype=torch.int64))
    return who


def full_payload(count: int, start: int = 0) -> RelayPayload:
    base = torch.arange(start, start + count)
    return RelayPayload(
        bonus_tokens=base,
        topk_p=(base[:, None] + torch.arange(3) * 0.25).float(),
        topk_index=base[:, None] * 10 + torch.arange(3),
        hidden_states=base[:, None].double() + torch.arange(5) / 8,
        draft_probs=(base[:, None, None] + torch.arange(14).view(2, 7) / 16).float(),
    )


def assert_same(got: RelayPayload, wanted: RelayPayload) -> None:
    assert torch.equal(got.bonus_tokens, wanted.bonus_tokens)
    assert got.extras().keys() == wanted.extras().keys()
    for name, value in wanted.extras().items():
        assert torch.equal(got.extras()[name], value) and got.extras()[name].dtype == value.dtype, name


@pytest.mark.parametrize("debug", [False, True])
def test_a_payload_comes_back_by_slot_in_any_order(debug: bool) -> None:
    relay = make(debug)
    who = opened(relay, (4, 1), (2, 7), (5, 3))
    payload = full_payload(3)
    relay.stash(who, payload, "full")
    order = [2, 0, 1]
    got = relay.resolve(rows((5, 3), (4, 1), (2, 7)), "full")
    assert_same(got, RelayPayload(payload.bonus_tokens[order], **{n: v[order] for n, v in payload.extras().items()}))


@pytest.mark.parametrize("debug", [False, True])
def test_lengths_cover_every_published_row(debug: bool) -> None:
    relay = make(debug)
    who = opened(relay, (1, 1), (3, 1))
    assert relay.lengths(who).tolist() == [0, 0]
    relay.publish(who, torch.tensor([7, 9]))
    relay.publish(rows((3, 1)), torch.tensor([12]))
    assert relay.lengths(who).tolist() == [7, 12]


def test_a_hundred_random_steps_equal_a_dictionary() -> None:
    """Rows of a step sample or not, are read or paused, retire and come back with a new epoch."""
    rng = random.Random(0)
    relay, epochs = make(num_slots=9), dict.fromkeys(range(1, 9), 0)
    held: dict[int, int] = {}
    for step in range(100):
        for slot in rng.sample(range(1, 9), 2):
            relay.forgive(torch.tensor([slot]))
            epochs[slot] += 1
            opened(relay, (slot, epochs[slot]))
            held.pop(slot, None)
        reading = [slot for slot in held if rng.random() < 0.6]
        if reading:
            got = relay.resolve(rows(*((slot, epochs[slot]) for slot in reading)), "full")
            for at, slot in enumerate(reading):
                assert_same(
                    RelayPayload(got.bonus_tokens[at : at + 1], **{n: v[at : at + 1] for n, v in got.extras().items()}),
                    full_payload(1, held.pop(slot)),
                )
        writing = [slot for slot in epochs if epochs[slot] and slot not in held and rng.random() < 0.5]
        if writing:
            start = step * 10
            relay.stash(rows(*((slot, epochs[slot]) for slot in writing)), full_payload(len(writing), start), "full")
            held.update({slot: start + at for at, slot in enumerate(writing)})


# -- poison, epochs, reads ------------------------------------------------------------------------------------------------


def test_a_row_is_read_once_and_poisoned() -> None:
    relay = make()
    who = opened(relay, (1, 1))
    relay.stash(who, full_payload(1, 40), "full")
    relay.resolve(who, "full")
    with pytest.raises(RelayError, match=r"slots \[1\] must be stashed before it is read"):
        relay.resolve(who, "full")
    assert relay._bonus[1] == -1
    assert relay._extras["full", "topk_index"][1].tolist() == [-1, -1, -1]
    assert relay._extras["full", "hidden_states"][1].isnan().all()


def test_fresh_buffers_are_poison_in_every_row() -> None:
    relay = make()
    relay.stash(opened(relay, (1, 1)), full_payload(1), "full")
    untouched = [0, 2, 3, 4, 5]
    assert relay._extras["full", "draft_probs"][untouched].isnan().all()
    assert (relay._extras["full", "topk_index"][untouched] == -1).all()


@pytest.mark.parametrize("call", ["stash", "resolve", "publish", "lengths"])
def test_a_stale_epoch_is_an_error_in_debug_mode(call: str) -> None:
    relay = make()
    relay.stash(opened(relay, (2, 1)), RelayPayload(torch.tensor([5])), "off")
    relay.forgive(torch.tensor([2]))
    opened(relay, (2, 2))
    stale = rows((2, 1))
    actions = {
        "stash": lambda: relay.stash(stale, RelayPayload(torch.tensor([9])), "off"),
        "resolve": lambda: relay.resolve(stale, "off"),
        "publish": lambda: relay.publish(stale, torch.tensor([9])),
        "lengths": lambda: relay.lengths(stale),
    }
    with pytest.raises(RelayError, match=r"slots \[2\] are stale"):
        actions[call]()


def test_a_stale_epoch_is_a_masked_no_op_otherwise() -> None:
    relay = make(debug=False)
    opened(relay, (2, 1))
    new = opened(relay, (2, 2), (3, 1))
    relay.publish(new, torch.tensor([4, 6]))
    relay.stash(new, full_payload(2, 10), "full")
    mixed = rows((2, 1), (3, 1))
    relay.publish(mixed, torch.tensor([100, 7]))
    relay.stash(mixed, full_payload(2, 50), "full")
    assert relay.lengths(mixed).tolist() == [0, 7]
    assert relay.lengths(new).tolist() == [4, 7]
    got = relay.resolve(rows((2, 2), (3, 1)), "full")
    assert got.bonus_tokens.tolist() == [10, 51]
    assert got.topk_index is not None and got.topk_index[:, 0].tolist() == [100, 510]
    stale = relay.resolve(mixed, "full")
    assert stale.bonus_tokens.tolist() == [0, 51]
    assert stale.hidden_states is not None and stale.hidden_states[0].tolist() == [0.0] * 5


def test_a_second_stash_needs_a_read_or_forgiveness() -> None:
    relay = make()
    who = opened(relay, (1, 1), (2, 1))
    relay.stash(who, RelayPayload(torch.tensor([5, 6])), "off")
    with pytest.raises(RelayError, match=r"slots \[1, 2\] was stashed twice"):
        relay.stash(who, RelayPayload(torch.tensor([7, 8])), "off")
    relay.forgive(torch.tensor([1, 2]))
    relay.stash(who, RelayPayload(torch.tensor([7, 8])), "off")
    assert relay.resolve(who, "off").bonus_tokens.tolist() == [7, 8]


def test_a_new_owner_needs_the_old_stash_read_or_forgiven() -> None:
    relay = make()
    relay.stash(opened(relay, (1, 1)), RelayPayload(torch.tensor([5])), "off")
    with pytest.raises(RelayError, match="a new owner took the slot"):
        opened(relay, (1, 2))
    relay.forgive(torch.tensor([1]))
    opened(relay, (1, 2))


def test_a_new_owner_does_not_inherit_the_old_ones_stash() -> None:
    relay = make()
    relay.stash(opened(relay, (1, 1)), full_payload(1), "full")
    relay.forgive(torch.tensor([1]))
    who = opened(relay, (1, 2))
    assert relay._bonus[1] == -1
    with pytest.raises(RelayError, match="must be stashed before it is read"):
        relay.resolve(who, "full")


def test_a_drafter_that_slept_is_forgiven_alone() -> None:
    relay = make()
    who = opened(relay, (1, 1))
    relay.stash(who, full_payload(1), "full")
    relay.resolve(who, "off")  # another drafter took the row's turn: the extras of `full` stay unread
    with pytest.raises(RelayError, match="was stashed twice"):
        relay.stash(who, full_payload(1), "full")
    relay.forgive(torch.tensor([1]), "full")
    with pytest.raises(RelayError, match=r"bonus_tokens.* was stashed twice"):  # the failed stash left a bonus nobody has read
        relay.stash(who, full_payload(1), "full")
    relay.resolve(who, "off")
    relay.stash(who, full_payload(1, 8), "full")
    assert_same(relay.resolve(who, "full"), full_payload(1, 8))


def test_the_padding_row_may_be_named_as_often_as_a_step_needs() -> None:
    relay = make()
    who = opened(relay, (1, 1))
    padded = rows((1, 1), (PADDING_SLOT, 0), (PADDING_SLOT, 0))
    for step in range(2):
        relay.publish(padded, torch.tensor([3 + step, 0, 0]))
        relay.stash(padded, RelayPayload(torch.tensor([5 + step, 0, 0])), "off")
        assert relay.resolve(padded, "off").bonus_tokens[0] == 5 + step
    relay.stash(padded, RelayPayload(torch.tensor([9, 0, 0])), "off")
    assert relay.resolve(who, "off").bonus_tokens.tolist() == [9]
    assert relay.lengths(who).tolist() == [4]


# -- declarations ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("debug", [False, True])
def test_a_bonus_only_drafter_allocates_nothing(debug: bool) -> None:
    relay = make(debug)
    who = opened(relay, (1, 1), (2, 1))
    for token in range(3):
        relay.stash(who, RelayPayload.from_draft_input(torch.tensor([token, token]), None), "off")
        assert relay.resolve(who, "off").extras() == {}
    assert relay.allocated() == ()


def test_each_field_is_allocated_at_the_first_payload_that_carries_it() -> None:
    relay = make()
    who = opened(relay, (1, 1))
    for number, name in enumerate(EXTRAS):
        value = full_payload(1).extras()[name]
        relay.stash(who, RelayPayload(torch.tensor([1]), **{name: value}), "full")
        assert relay.allocated() == tuple(("full", each) for each in EXTRAS[: number + 1])
        relay.forgive(torch.tensor([1]))


def test_drafters_that_relay_the_same_field_do_not_share_it() -> None:
    relay = make()
    one, other = opened(relay, (1, 1)), opened(relay, (2, 1))
    relay.stash(one, full_payload(1, 3), "full")
    relay.stash(other, RelayPayload(torch.tensor([4]), topk_index=torch.tensor([[77]])), "other")
    assert_same(relay.resolve(one, "full"), full_payload(1, 3))
    got = relay.resolve(other, "other")
    assert got.topk_index is not None and got.topk_index.tolist() == [[77]]


@pytest.mark.parametrize(
    ("drafter", "extras", "message"),
    [
        ("off", {"topk_p": torch.zeros(1, 3)}, r"off must relay only \[\], but its payload carries \['topk_p'\]"),
        ("other", {"hidden_states": torch.zeros(1, 5)}, r"other must relay only \['topk_index'\]"),
        ("full", {"topk_p": torch.zeros(1, 4)}, r"full.topk_p must have rows of \(3,\) torch.float32, but got \(4,\)"),
        ("full", {"hidden_states": torch.zeros(1, 5)}, "must have rows of .* torch.float64, but got .* torch.float32"),
        ("full", {"draft_probs": torch.zeros(1, 14)}, r"must have rows of \(2, 7\)"),
        ("full", {"topk_index": torch.zeros(1, 3, dtype=torch.int32)}, "torch.int64, but got .* torch.int32"),
    ],
)
@pytest.mark.parametrize("debug", [False, True])
def test_a_payload_must_match_what_its_drafter_declared(
    drafter: str, extras: dict[str, Tensor], message: str, debug: bool
) -> None:
    relay = make(debug)
    with pytest.raises(RelayError, match=message):
        relay.stash(opened(relay, (1, 1)), RelayPayload(torch.tensor([1]), **extras), drafter)
    assert relay.allocated() == ()


@pytest.mark.parametrize("debug", [False, True])
def test_one_value_is_not_spread_over_several_rows(debug: bool) -> None:
    relay = make(debug)
    who = opened(relay, (1, 1), (2, 1))
    with pytest.raises(RelayError, match="2 rows must get 2 values, but got 1"):
        relay.stash(who, RelayPayload(torch.tensor([1])), "off")
    with pytest.raises(RelayError, match="2 rows must get 2 values, but got 1"):
        relay.publish(who, torch.tensor([1]))


@pytest.mark.parametrize("debug", [False, True])
def test_a_seeded_row_goes_on_as_if_its_prompt_had_run_here(debug: bool) -> None:
    relay = make(debug)
    who = rows((3, 2))
    relay.seed(who, torch.tensor([11]), full_payload(1, 6), "full")
    assert relay.lengths(who).tolist() == [11]
    assert_same(relay.resolve(who, "full"), full_payload(1, 6))


def test_debug_reads_happen_where_they_are_declared() -> None:
    """Outside of a declared block a debug relay reads no device value; the engine's guard would refuse it."""
    inside: list[str] = []
    reads: list[bool] = []

    @contextmanager
    def declare(reason: str) -> Iterator[None]:
        inside.append(reason)
        yield
        inside.pop()

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") in ("__bool__", "item", "tolist", "nonzero"):
                reads.append(bool(inside))
            return func(*args, **(kwargs or {}))

    relay = FutureMap(6, SPECS, CPU, debug=True, declare=declare)
    with Watch():
        who = opened(relay, (1, 1), (2, 1))
        relay.publish(who, torch.tensor([1, 2]))
        relay.stash(who, full_payload(2), "full")
        relay.resolve(who, "full")
        relay.lengths(who)
    assert reads and all(reads)


def test_without_debug_nothing_is_read_from_the_device() -> None:
    reads: list[str] = []

    class Watch(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if getattr(func, "__name__", "") in ("__bool__", "item", "tolist", "nonzero", "__len__"):
                reads.append(func.__name__)
            return func(*args, **(kwargs or {}))

    relay = make(debug=False)
    with Watch():
        who = opened(relay, (1, 1), (2, 1))
        relay.publish(who, torch.tensor([1, 2]))
        relay.stash(who, full_payload(2), "full")
        relay.resolve(who, "full")
        relay.lengths(who)
    assert reads == []
