"""FutureMap: slot-indexed device rows that carry a step's outcome to the next step before the host has seen it.

    step N                                   step N+1
    ... verify ─► publish(rows, lengths) ──► lengths(rows)      every row of a step, prompt chunks too
        observe ─► stash(rows, payload)  ──► resolve(rows)      exactly the rows that sampled

Rows are gathered by slot; slot 0 is the padding row. Every row carries the epoch of its slot, counted up each time the slot
gets a new owner. A stale epoch is an error in debug mode and a masked no-op otherwise.

In debug mode a row is poisoned (integers -1, floats NaN) as soon as it has been read, so that each stash is read at most once,
and a stash on top of an unread one is an error unless the row was forgiven (`forgive`: retired or retracted rows, or a drafter
that slept). The padding row, which steps name as often as they need, is exempt.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.relay.payload import RelayPayload, RelaySpec

PADDING_SLOT = 0


class RelayError(RuntimeError):
    """A rule of the relay was broken. Always a bug of the engine, never of a request."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows of a step: slots [rows] int64 and the epochs [rows] int64 they were planned with.

    `fresh` [rows] bool: the epoch is the slot's; None where nobody has looked yet (`FutureMap.looked_up`).
    """

    slots: Tensor
    epochs: Tensor
    fresh: Tensor | None = None

    def __len__(self) -> int:
        return self.slots.shape[0]

    def __getitem__(self, part: slice) -> Rows:
        return Rows(self.slots[part], self.epochs[part], None if self.fresh is None else self.fresh[part])

    def at(self, places: Tensor) -> Rows:
        """The rows at places [n] int64."""
        fresh = None if self.fresh is None else self.fresh.index_select(0, places)
        return Rows(self.slots.index_select(0, places), self.epochs.index_select(0, places), fresh)


class FutureMap:
    """Lengths, bonus tokens and declared draft extras of every slot, on the device.

    Args:
        num_slots: rows, the padding row included.
        specs: drafter name -> what it relays. Buffers of extras are allocated at the first payload that carries the field.
        device: where the rows live.
        debug: poison read rows and check epochs and reads. Reads the device, so it is for tests and diagnosis.
        declare: makes the context that debug checks read the device in, given the reason.
    """

    def __init__(
        self,
        num_slots: int,
        specs: Mapping[str, RelaySpec],
        device: torch.device,
        debug: bool = False,
        declare: Callable[[str], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._specs = dict(specs)
        self._debug = debug
        self._declare = declare
        self._device = device
        self._num_slots = num_slots
        self._epochs = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._lengths = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._bonus = torch.full((num_slots,), -1, dtype=torch.int64, device=device)
        self._extras: dict[tuple[str, str], Tensor] = {}
        # Debug only: which (drafter, field) rows hold a stash nobody has read. The bonus is filed under drafter "".
        self._unread: dict[tuple[str, str], Tensor] = {}

    def open(self, rows: Rows, lengths: Tensor) -> None:
        """Give slots to new owners: set their epochs and lengths [rows] int64 (tokens whose KV exists)."""
        if self._debug:
            with self._declare("relay check"):
                self._check_all_read(rows, "a new owner took the slot")
        self._epochs.index_copy_(0, rows.slots, rows.epochs)
        self._lengths.index_copy_(0, rows.slots, lengths)
        self._bonus.index_fill_(0, rows.slots, -1)

    def forgive(self, slots: Tensor, drafter: str | None = None) -> None:
        """Declare that unread stashes of these slots are legal: retired or retracted rows, or `drafter` slept."""
        for (owner, _), unread in self._unread.items():
            if drafter is None or owner == drafter:
                unread.index_fill_(0, slots, False)

    def looked_up(self, rows: Rows) -> Rows:
        """The rows with their freshness, which holds until the next `open`."""
        return Rows(rows.slots, rows.epochs, self._fresh(rows))

    def publish(self, rows: Rows, lengths: Tensor) -> None:
        """Store new committed lengths [rows] int64 of every row of a step."""
        self._lengths.index_copy_(0, rows.slots, self._masked(rows, lengths, self._lengths))

    def lengths(self, rows: Rows) -> Tensor:
        """Committed lengths [rows] int64; 0 for a stale row."""
        return torch.where(self._fresh(rows), self._lengths.index_select(0, rows.slots), 0)

    def stash(self, rows: Rows, payload: RelayPayload, drafter: str) -> None:
        """Store the payload of exactly the rows that sampled, extras as `drafter` declared them."""
        self._put(rows, ("", "bonus_tokens"), self._bonus, payload.bonus_tokens)
        fields = self._specs[drafter].fields
        extras = payload.extras()
        if extras.keys() - fields.keys():
            raise RelayError(f"{drafter} must relay only {sorted(fields)}, but its payload carries {sorted(extras)}")
        for name, value in extras.items():
            spec = fields[name]
            if tuple(value.shape[1:]) != spec.shape or value.dtype != spec.dtype:
                given = f"{tuple(value.shape[1:])} {value.dtype}"
                raise RelayError(f"{drafter}.{name} must have rows of {spec.shape} {spec.dtype}, but got {given}")
            if (drafter, name) not in self._extras:
                self._extras[drafter, name] = _poisoned((self._num_slots, *spec.shape), spec.dtype, self._device)
            self._put(rows, (drafter, name), self._extras[drafter, name], value)

    def resolve(self, rows: Rows, drafter: str) -> RelayPayload:
        """Gather the payload of rows about to be verified. A stale row reads as token 0 and zeros."""
        bonus = self._take(rows, ("", "bonus_tokens"), self._bonus)
        extras = {
            name: self._take(rows, (drafter, name), self._extras[drafter, name])
            for name in self._specs[drafter].fields
            if (drafter, name) in self._extras
        }
        return RelayPayload(bonus, **extras)

    def seed(self, rows: Rows, lengths: Tensor, payload: RelayPayload, drafter: str) -> None:
        """Start rows from a payload computed elsewhere (a handed-over request), as if their prompt had run here."""
        self.open(rows, lengths)
        self.stash(rows, payload, drafter)

    def allocated(self) -> tuple[tuple[str, str], ...]:
        """(drafter, field) of every extras buffer that exists; a bonus-only drafter never has one."""
        return tuple(self._extras)

    # -- rows -------------------------------------------------------------------------------------------------------

    def _fresh(self, rows: Rows) -> Tensor:
        if rows.fresh is not None:
            return rows.fresh
        fresh = self._epochs.index_select(0, rows.slots) == rows.epochs
        if self._debug:
            with self._declare("relay check"):
                if not bool(fresh.all()):
                    raise RelayError(f"rows must carry their slot's epoch, but slots {rows.slots[~fresh].tolist()} are stale")
        return fresh

    def _masked(self, rows: Rows, new: Tensor, buffer: Tensor) -> Tensor:
        if new.shape[0] != len(rows):  # one row would be broadcast to all
            raise RelayError(f"{len(rows)} rows must get {len(rows)} values, but got {new.shape[0]}")
        return torch.where(_beside(self._fresh(rows), new), new.to(buffer.dtype), buffer.index_select(0, rows.slots))

    def _put(self, rows: Rows, key: tuple[str, str], buffer: Tensor, value: Tensor) -> None:
        buffer.index_copy_(0, rows.slots, self._masked(rows, value, buffer))
        if self._debug:
            with self._declare("relay check"):
                self._mark_stashed(rows, key)

    def _take(self, rows: Rows, key: tuple[str, str], buffer: Tensor) -> Tensor:
        fresh = self._fresh(rows)
        value = buffer.index_select(0, rows.slots)
        if self._debug:
            with self._declare("relay check"):
                self._mark_read(rows, key)
            buffer.index_copy_(0, rows.slots, _poisoned(tuple(value.shape), buffer.dtype, self._device))
        return torch.where(_beside(fresh, value), value, 0)

    # -- debug --------------------------------------------------------------------------------------------------------

    def _mark_stashed(self, rows: Rows, key: tuple[str, str]) -> None:
        unread = self._unread.setdefault(key, torch.zeros(self._num_slots, dtype=torch.bool, device=self._device))
        twice = unread.index_select(0, rows.slots) & (rows.slots != PADDING_SLOT)
        if bool(twice.any()):
            raise RelayError(f"{key} of slots {rows.slots[twice].tolist()} was stashed twice without being read")
        unread.index_fill_(0, rows.slots, True)

    def _mark_read(self, rows: Rows, key: tuple[str, str]) -> None:
        unread = self._unread.setdefault(key, torch.zeros(self._num_slots, dtype=torch.bool, device=self._device))
        readable = unread.index_select(0, rows.slots) | (rows.slots == PADDING_SLOT)
        if not bool(readable.all()):
            raise RelayError(f"{key} of slots {rows.slots[~readable].tolist()} must be stashed before it is read")
        unread.index_fill_(0, rows.slots, False)

    def _check_all_read(self, rows: Rows, why: str) -> None:
        for key, unread in self._unread.items():
            held = unread.index_select(0, rows.slots)
            if bool(held.any()):
                raise RelayError(f"{why}, but {key} of slots {rows.slots[held].tolist()} is unread and was not forgiven")


def _beside(rows: Tensor, value: Tensor) -> Tensor:
    """[rows], with as many axes as `value` has."""
    return rows if value.ndim == 1 else rows.view(-1, *[1] * (value.ndim - 1))


def _poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    poison = float("nan") if dtype.is_floating_point else -1
    return torch.full(shape, poison, dtype=dtype, device=device)
