"""The KV tensors of one model: per layer two flat tensors indexed by KV slot (page * page_size + offset).

Page 0 is the padding page: always zero, read in place of keys a row does not have, so that nothing stale (or NaN) is ever
multiplied, not even by a zero probability. Page 1 is the scratch page: writes of draft nodes beyond a row's limit land there
and nobody reads it.

8-bit KV (dtype int8) stores a head of a token as codes and, behind them, the 4 bytes of a float32 scale: value = scale * code. So
it is moved, copied and kept like any other:

    row   c c c c ... c | s s s s       dim codes from -127 to 127, scale = largest magnitude / 127
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.kernels.cpu.memory import HUGE_PAGE_BYTES, huge_pages

PADDING_PAGE = 0
SCRATCH_PAGE = 1
NUM_RESERVED_PAGES = 2


SCALE_BYTES = 4  # of a float32
_SMALLEST = 1e-30  # rows below are stored as zeros: 127 / largest must be finite


def to_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[..., dim] floating-point -> as the cache stores it: [..., dim] of `dtype`, or for int8 [..., dim + 4].

    8-bit codes are rounded to even. A row with NaN or infinity gets the scale NaN and codes 0, so that reading it gives NaN.
    """
    if dtype != torch.int8 or not x.dtype.is_floating_point:
        return x.to(dtype)
    x = x.to(torch.float32)
    largest = x.abs().amax(-1, keepdim=True)
    finite = largest.isfinite()  # NaN wins in amax
    inverse = torch.full_like(largest, 127).div_(largest)  # `127 / largest` would round twice, as 127 * (1 / largest)
    codes = (x * inverse).round().nan_to_num(0).clamp(-127, 127)
    scale = (largest / 127).masked_fill(~finite, torch.nan)
    empty = largest < _SMALLEST
    scale, codes = scale.masked_fill(empty, 0), codes.masked_fill(empty | ~finite, 0)
    return torch.cat((codes.to(torch.int8), scale.contiguous().view(torch.int8)), -1)


def from_rows(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """What `to_rows` made -> [..., dim] of `dtype`."""
    if rows.dtype != torch.int8:
        return rows.to(dtype)
    scale = rows[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (rows[..., :-SCALE_BYTES].to(torch.float32) * scale).to(dtype)


def _empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Memory not yet touched; in huge pages where that is known to work: a sequence's pages lie anywhere, and finding each of
    them among small ones makes attention over many sequences a sixth slower.
    """
    num_bytes = math.prod(shape) * dtype.itemsize
    if sys.platform == "linux" and device.type == "cpu" and num_bytes >= HUGE_PAGE_BYTES:
        return huge_pages(num_bytes).view(dtype).view(shape)
    return torch.empty(shape, dtype=dtype, device=device)


@dataclass(frozen=True, slots=True)
class LayerKV:
    """What one layer stores for a token: `num_heads` keys of `key_dim` and values of `value_dim`; `dtype` int8: 8-bit KV."""

    num_heads: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's key and value in this layer."""
        return self.num_heads * (self.row_len(self.key_dim) + self.row_len(self.value_dim)) * self.dtype.itemsize

    def row_len(self, dim: int) -> int:
        """Elements of `dtype` that a head of `dim` numbers takes."""
        return dim + SCALE_BYTES if self.dtype == torch.int8 else dim


class KVCache:
    """KV of all layers, paged. Layer i: keys [num_slots, heads, key_dim], values [num_slots, heads, value_dim]; 8-bit rows are
    longer by their scale.

    Args:
        layers: what each layer stores.
        num_pages: pages, the two reserved ones included.
        page_size: tokens a page holds.
        device: where the tensors live.
        poison: fill with NaN (integers: -1, NaN as the scale of an 8-bit row) so that reading an unwritten slot shows; for tests.
    """

    def __init__(
        self, layers: tuple[LayerKV, ...], num_pages: int, page_size: int, device: torch.device, poison: bool = False
    ) -> None:
        self.page_size = page_size
        self.num_pages = num_pages
        self._device = device
        self._layers = [
            (self._tensor(s, s.key_dim, device, poison), self._tensor(s, s.value_dim, device, poison)) for s in layers
        ]

    def _tensor(self, spec: LayerKV, dim: int, device: torch.device, poison: bool) -> Tensor:
        shape = (self.num_pages * self.page_size, spec.num_heads, spec.row_len(dim))
        # Not zeroed: only the padding page is read before it is written, and memory nobody has used yet is not even touched.
        out = _empty(shape, spec.dtype, device)
        if poison:
            out.fill_(float("nan") if spec.dtype.is_floating_point else -1)
        out[: self.page_size].zero_()
        return out

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self._layers)

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys and values of layer `index`."""
        return self._layers[index]

    def move(self, source: Tensor, target: Tensor) -> None:
        """Copy KV slots `source` [n] int64 to `target` [n], all layers; every source is read before a target is written."""
        for keys, values in self._layers:
            keys.index_copy_(0, target, keys.index_select(0, source))
            values.index_copy_(0, target, values.index_select(0, source))

    def copy_pages_to(self, other: KVCache, pages: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (own, the other's) pairs, to a cache of the same layers and page size, or within this one.

        All sources are read before a target is written.
        """
        if not pages:
            return
        source, target = torch.tensor(pages, dtype=torch.int64).unbind(1)
        source, target = source.to(self._device), target.to(other._device)
        for own, others in zip(self._layers, other._layers, strict=True):
            for tensor, destination in zip(own, others, strict=True):
                paged = destination.view(-1, self.page_size, *destination.shape[1:])
                read = tensor.view(-1, self.page_size, *tensor.shape[1:]).index_select(0, source)
                paged.index_copy_(0, target, read.to(other._device))
