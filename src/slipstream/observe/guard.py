"""A guard against hidden synchronisation: reading a tensor's values on the host in the middle of a device step.

Such a read makes the host wait for the device, which is what overlapped scheduling exists to avoid. On the CPU it costs little,
so nobody would notice; the guard makes it an error in debug mode, on every machine.

    with SyncGuard():                  # one device step
        ...
        with declared("why"):          # a read that is meant
            tokens.tolist()

The guard sees torch operations of the thread that entered it and no other. It does not see reads made by C++ code or through a
tensor's data pointer.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from slipstream.errors import InvariantBroken

# Calls whose result, or the shape of whose result, is values of a tensor.
_READS: frozenset[str] = frozenset(
    {
        "__array__", "__bool__", "__complex__", "__contains__", "__float__", "__format__", "__index__", "__int__", "__repr__",
        "allclose", "argwhere", "bincount", "equal", "is_nonzero", "item", "masked_select", "nonzero", "numpy", "tolist",
        "unique", "unique_consecutive", "unique_dim",
    }
)
_INDEXING: frozenset[str] = frozenset({"__getitem__", "__setitem__", "index_put", "index_put_"})
_LOOKED_AT = _READS | _INDEXING | {"where", "tensor_split", "repeat_interleave"}


class _Lifted(threading.local):
    """How many `declared` blocks this thread is in."""

    depth = 0


_lifted = _Lifted()


@contextmanager
def declared(reason: str) -> Iterator[None]:
    """Lift the guard: reads inside are meant, for `reason` (one phrase, for the reader). Next to free without a guard."""
    if not reason:
        raise ValueError("a declared read must say why, but got no reason")
    _lifted.depth += 1
    try:
        yield
    finally:
        _lifted.depth -= 1


class SyncGuard(TorchFunctionMode):
    """While entered, an undeclared read of device values by this thread raises `InvariantBroken`."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Refuse what reads values, run everything else."""
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        # One look-up in the way of most calls: a step makes hundreds.
        if name in _LOOKED_AT and _lifted.depth == 0 and (name in _READS or _is_data_dependent(name, args, kwargs)):
            raise InvariantBroken(
                f"a device step must not read values of a tensor, but got {name}",
                hint="keep it on the device, or wrap it in declared(reason) where the read is meant",
            )
        return func(*args, **kwargs)


def _is_data_dependent(name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Whether a call that need not read values does so with these arguments."""
    if name in _INDEXING:
        return _reads_index(args[1] if len(args) > 1 else kwargs.get("indices"))
    if name == "where":
        return len(args) + len(kwargs) == 1
    if name == "tensor_split":
        return any(isinstance(part, Tensor) for part in (*args[1:], *kwargs.values()))
    if name == "repeat_interleave":
        counts = args[1] if len(args) > 1 else kwargs.get("repeats", args[0] if args else None)
        return isinstance(counts, Tensor) and kwargs.get("output_size") is None
    return False


def _reads_index(index: object) -> bool:
    """Whether an index holds a boolean tensor, whose ones decide how much it selects, or a slice bounded by a tensor."""
    if isinstance(index, Tensor):
        return index.dtype in (torch.bool, torch.uint8) and index.ndim > 0
    if isinstance(index, slice):
        return any(isinstance(bound, Tensor) for bound in (index.start, index.stop, index.step))
    if isinstance(index, (tuple, list)):
        return any(_reads_index(part) for part in index)
    return False
