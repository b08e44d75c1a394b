"""Attention by the compiled CPU kernels: `--attention-backend cpu`.

A token's result is the same, bit for bit, whatever else the pass holds: alone, in a batch, in a prompt cut anywhere, as a draft
node, on any pages, with any number of threads.

| KV in    | products                                    | what is rounded                                           |
| -------- | ------------------------------------------- | --------------------------------------------------------- |
| float32  | float32                                     | nothing                                                   |
| bfloat16 | bfloat16 times bfloat16, summed in float32  | queries and weights to bfloat16                           |
| int8     | the codes as bfloat16, likewise             | the same, and the cache has a scale for each token's head |
"""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from slipstream.attention.base import BatchLayout
from slipstream.attention.kv import KVCache, LayerKV
from slipstream.errors import ConfigError, InvariantBroken
from slipstream.kernels.cpu.attention import DIM_STEP, MAX_DIM, MIN_DIM, AttentionBatch, CacheTensors, LayerTensors
from slipstream.kernels.cpu.library import kernels

_KV_DTYPES = (torch.float32, torch.bfloat16, torch.int8)
_DTYPES = (torch.float32, torch.bfloat16)
_HINT = "--attention-backend reference takes everything"


class CpuBackend:
    """`AttentionBackend` by our kernels. Needs them to be there."""

    def __init__(self) -> None:
        self._caches: WeakKeyDictionary[KVCache, CacheTensors] = WeakKeyDictionary()

    def check(self, layers: Sequence[LayerKV]) -> None:
        """Raise `ConfigError` for layers whose KV the kernels do not take."""
        for layer in layers:
            if layer.dtype not in _KV_DTYPES:
                given = str(layer.dtype).removeprefix("torch.")
                raise ConfigError(
                    f"--attention-backend cpu must have KV of float32, bfloat16 or int8, but the model's is {given}",
                    hint=f"--dtype float32 or bfloat16; {_HINT}",
                )
            for dim in (layer.key_dim, layer.value_dim):
                if not MIN_DIM <= dim <= MAX_DIM or dim % DIM_STEP:
                    raise ConfigError(
                        f"--attention-backend cpu must have heads of a multiple of {DIM_STEP} from {MIN_DIM} to {MAX_DIM}"
                        f" dimensions, but the model's have {dim}",
                        hint=_HINT,
                    )

    def begin(self, layout: BatchLayout, kv: KVCache) -> CpuStep:
        """Hand the layout's tensors to the kernels. Tasks are made at the first layer of each shape and window."""
        cache = self._caches.get(kv)
        if cache is None:
            cache = self._caches[kv] = CacheTensors([LayerTensors(*kv.layer(index)) for index in range(kv.num_layers)])
        return CpuStep(layout, kv, cache)


def build() -> CpuBackend:
    """The backend, for the registry. Raises `ConfigError` where the kernels cannot run."""
    if kernels() is None:
        raise ConfigError(
            "--attention-backend cpu must have a CPU with AVX-512 VNNI and BF16 and a C++ compiler, but the kernels are off here",
            hint=f"the log says what is missing; {_HINT}",
        )
    return CpuBackend()


class CpuStep:
    """`AttentionStep` by our kernels.

    Attributes:
        layout, kv: as in `AttentionStep`.
        batch, cache: the same as the kernels take them.
    """

    def __init__(self, layout: BatchLayout, kv: KVCache, cache: CacheTensors) -> None:
        self.layout = layout
        self.kv = kv
        self.cache = cache
        self._longest = max(layout.max_key_lens)
        self.batch = AttentionBatch(
            layout.query_lens,
            layout.num_chunks,
            layout.index,
            layout.base_lens,
            layout.write_slots,
            layout.read_slots,
            layout.ancestors,
        )

    def __call__(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """See `AttentionStep.__call__`. Raises `InvariantBroken` for a query that is neither float32 nor bfloat16."""
        if query.dtype not in _DTYPES:
            raise InvariantBroken(f"queries must be float32 or bfloat16, but got {query.dtype}", hint=_HINT)
        if window is not None and window >= self._longest:
            window = None
        query, key, value = _dense(query), _dense(key.to(query.dtype)), _dense(value.to(query.dtype))
        return self.batch.attend(self.cache.layers[layer], query, key, value, scale, window, softcap)


def _dense(x: Tensor) -> Tensor:
    """x, each head of it dense and in a place of its own."""
    token, head, number = x.stride()
    return x if number == 1 and min(token, head) >= x.shape[2] else x.contiguous()
