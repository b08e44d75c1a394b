"""Attention over paged KV, the ctypes side of csrc/attention.h: structs, tasks and one call a layer.

    AttentionBatch (a pass)  ──plan──>  tasks, once for each shape and window of its layers  ──attend──>  one call a layer
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from slipstream.errors import InvariantBroken
from slipstream.kernels.cpu.library import Function, kernels

MIN_DIM, MAX_DIM, DIM_STEP = 16, 256, 16  # of a head

_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2}
_SCALE_BYTES = 4  # behind the codes of a row of int8


class _Batch(ctypes.Structure):
    """slip_attention_batch."""

    _fields_ = (
        ("num_tokens", ctypes.c_int64),
        ("num_segments", ctypes.c_int64),
        ("num_chunks", ctypes.c_int64),
        ("read_width", ctypes.c_int64),
        ("tree_width", ctypes.c_int64),
        ("starts", ctypes.c_void_p),
        ("index", ctypes.c_void_p),
        ("base_lens", ctypes.c_void_p),
        ("write_slots", ctypes.c_void_p),
        ("read_slots", ctypes.c_void_p),
        ("ancestors", ctypes.c_void_p),
        ("depths", ctypes.c_void_p),
        ("sick", ctypes.c_void_p),
    )


class _KV(ctypes.Structure):
    """slip_kv."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("num_slots", ctypes.c_int64),
        ("kv_heads", ctypes.c_int32),
        ("key_dim", ctypes.c_int32),
        ("value_dim", ctypes.c_int32),
        ("type", ctypes.c_int32),
    )


class _IO(ctypes.Structure):
    """slip_attention_io."""

    _fields_ = (
        ("query", ctypes.c_void_p),
        ("key", ctypes.c_void_p),
        ("value", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("query_token", ctypes.c_int64),
        ("query_head", ctypes.c_int64),
        ("key_token", ctypes.c_int64),
        ("key_head", ctypes.c_int64),
        ("value_token", ctypes.c_int64),
        ("value_head", ctypes.c_int64),
        ("heads", ctypes.c_int32),
        ("type", ctypes.c_int32),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("window", ctypes.c_int64),
    )


class _Rope(ctypes.Structure):
    """slip_rope."""

    _fields_ = (
        ("cos", ctypes.c_void_p),
        ("sin", ctypes.c_void_p),
        ("angles", ctypes.c_void_p),
        ("query_norm", ctypes.c_void_p),
        ("key_norm", ctypes.c_void_p),
        ("eps", ctypes.c_float),
        ("dim", ctypes.c_int32),
    )


class _Task(ctypes.Structure):
    """slip_attention_task."""

    _fields_ = tuple(
        (name, ctypes.c_int32)
        for name in ("segment", "first_head", "end_head", "first_token", "end_token", "first_span", "end_span", "partial")
    )


@cache
def _functions() -> tuple[Function, Function]:
    """plan and attend. Raises `InvariantBroken` where there are no kernels."""
    library = kernels()
    if library is None:
        raise InvariantBroken("attention kernels must be there when a pass begins, but this machine has none")
    pointer, i32, i64 = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    plan = library.bind("slip_attention_plan", pointer, i64, i32, i32, i64, pointer, i64, pointer)
    attend = library.bind("slip_attention", pointer, pointer, pointer, pointer, pointer, i64)
    return plan, attend


class LayerTensors:
    """Keys and values of one layer as the kernels see them; holds the tensors.

    Args:
        keys, values: [num_slots, kv_heads, row], dense. A row is the head's numbers in float32 or bfloat16, or their int8 codes
            and behind them the 4 bytes of a float32 scale.
    """

    __slots__ = ("_struct", "_tensors", "address", "kv_heads", "num_slots", "value_dim")

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        if not (keys.is_contiguous() and values.is_contiguous()):
            raise InvariantBroken("keys and values of the cache must be dense, but they have other strides")
        scale = _SCALE_BYTES if keys.dtype == torch.int8 else 0
        self.num_slots, self.kv_heads = keys.shape[:2]
        self.value_dim = values.shape[2] - scale
        self._tensors = keys, values
        kind = _TYPES[keys.dtype]
        key_dim = keys.shape[2] - scale
        self._struct = _KV(
            keys.data_ptr(), values.data_ptr(), self.num_slots, self.kv_heads, key_dim, self.value_dim, kind
        )
        self.address = ctypes.addressof(self._struct)


class CacheTensors:
    """All layers of a cache; holds their tensors.

    Attributes:
        layers: in order.
        address: of an array of pointers to their structs.
    """

    __slots__ = ("_array", "address", "layers")

    def __init__(self, layers: Sequence[LayerTensors]) -> None:
        self.layers = tuple(layers)
        self._array = (ctypes.c_void_p * len(self.layers))(*(layer.address for layer in self.layers))
        self.address = ctypes.addressof(self._array)


@dataclass(frozen=True, slots=True)
class _Tasks:
    array: ctypes.Array[_Task]
    address: int
    count: int


class Turn:
    """How heads turn on their way: rotary tables of a pass and, where a model has them, norms of each head.

    Args:
        cos, sin: [T, dim / 2] float32, dense; the pair (i, i + dim / 2) turns by entry i. dim may be less than the head's.
        query_norm, key_norm: [head_dim] float32 weights of an RMS norm before the turn, or None.
        eps: of the norms.
    """

    __slots__ = ("_struct", "_tensors", "address")

    def __init__(
        self, cos: Tensor, sin: Tensor, query_norm: Tensor | None = None, key_norm: Tensor | None = None, eps: float = 0.0
    ) -> None:
        self._tensors = cos, sin, query_norm, key_norm
        norms = [None if norm is None else norm.data_ptr() for norm in (query_norm, key_norm)]
        self._struct = _Rope(cos.data_ptr(), sin.data_ptr(), None, *norms, eps, 2 * cos.shape[1])
        self.address = ctypes.addressof(self._struct)


class AttentionBatch:
    """The tokens of one pass, for any number of layers. Tensors are int64 on the CPU and dense; see `BatchLayout` for them.

    Args:
        query_lens: tokens of each segment. num_chunks: leading prompt chunks.
        index, write_slots: [T]. base_lens: [S]. read_slots: [S, K].
        ancestors: [T, W] bool, or None for chains.
    """

    __slots__ = ("_io", "_io_address", "_plans", "_struct", "_tensors", "address", "ancestors", "num_tokens")

    def __init__(
        self,
        query_lens: Sequence[int],
        num_chunks: int,
        index: Tensor,
        base_lens: Tensor,
        write_slots: Tensor,
        read_slots: Tensor,
        ancestors: Tensor | None,
    ) -> None:
        num_tokens = self.num_tokens = index.shape[0]
        starts = (ctypes.c_int64 * (len(query_lens) + 1))(*itertools.accumulate(query_lens, initial=0))
        sick = (ctypes.c_uint8 * num_tokens)()
        index, base_lens, write_slots, read_slots = (x.contiguous() for x in (index, base_lens, write_slots, read_slots))
        self.ancestors = None if ancestors is None else ancestors.contiguous()
        depths = None if self.ancestors is None else self.ancestors.sum(1) - 1
        self._tensors = starts, sick, index, base_lens, write_slots, read_slots, depths
        self._struct = _Batch(
            num_tokens,
            len(query_lens),
            num_chunks,
            read_slots.shape[1],
            0 if ancestors is None else ancestors.shape[1],
            ctypes.addressof(starts),
            index.data_ptr(),
            base_lens.data_ptr(),
            write_slots.data_ptr(),
            read_slots.data_ptr(),
            None if self.ancestors is None else self.ancestors.data_ptr(),
            None if depths is None else depths.data_ptr(),
            ctypes.addressof(sick),
        )
        self.address = ctypes.addressof(self._struct)
        self._io = _IO()
        self._io_address = ctypes.addressof(self._io)
        self._plans: dict[tuple[int, int, int, int], _Tasks] = {}

    def attend(
        self,
        kv: LayerTensors,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        turn: Turn | None = None,
    ) -> Tensor:
        """Write key and value [T, kv_heads, dim] to the cache, then attend: [T, heads, value_dim] in query's dtype.

        All three are float32 or bfloat16, of one dtype, dense in their last axis. With `turn` they are float32, and queries are
        turned where they lie. Raises `InvariantBroken` for what does not fit.
        """
        heads = query.shape[1]
        tasks = self._tasks(kv, heads, window or 0)
        out = query.new_empty((query.shape[0], heads, kv.value_dim))
        io = self._io
        io.query, io.key, io.value, io.out = query.data_ptr(), key.data_ptr(), value.data_ptr(), out.data_ptr()
        io.query_token, io.query_head = query.stride()[:2]
        io.key_token, io.key_head = key.stride()[:2]
        io.value_token, io.value_head = value.stride()[:2]
        io.heads, io.type, io.scale = heads, _TYPES[query.dtype], scale
        io.softcap, io.window = softcap or 0.0, window or 0
        rope = None if turn is None else turn.address
        _functions()[1](self.address, kv.address, self._io_address, rope, tasks.address, tasks.count)
        return out

    def _tasks(self, kv: LayerTensors, heads: int, window: int) -> _Tasks:
        shape = (heads, kv.kv_heads, kv.num_slots, window)
        found = self._plans.get(shape)
        if found is not None:
            return found
        plan, count = _functions()[0], ctypes.c_int64()
        room = 4 * self._struct.num_segments * kv.kv_heads
        while True:
            array = (_Task * room)()
            address = ctypes.addressof(array)
            plan(self.address, kv.num_slots, heads, kv.kv_heads, window, address, room, ctypes.addressof(count))
            if count.value <= room:
                break
            room = count.value
        tasks = self._plans[shape] = _Tasks(array, address, count.value)
        return tasks
