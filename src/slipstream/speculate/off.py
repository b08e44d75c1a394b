"""Plain decoding: the drafter that proposes nothing. Depth 0, an empty relay, a bonus-only payload."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from slipstream.attention.kv import KVCache, LayerKV
from slipstream.errors import ConfigError
from slipstream.relay import DraftInput, RelayPayload, RelaySpec
from slipstream.speculate.base import Draft, StepContext, Verdict
from slipstream.speculate.registry import Target


class Off:
    """Proposes no node, so that every step verifies just the root and commits one token."""

    depth = 0
    num_nodes = 0
    max_writes = 1
    relay = RelaySpec()
    taps: tuple[int, ...] = ()
    shifted_kv = False
    kv_layers: tuple[LayerKV, ...] = ()
    kv: KVCache | None = None
    kv_behind = 0
    catches_up = False
    num_parameters = 0
    weight_bytes = 0

    def propose(self, ctx: StepContext, payload: RelayPayload, width: int) -> Draft:
        """An empty draft."""
        rows = payload.bonus_tokens.shape[0]
        return Draft(payload.bonus_tokens.new_empty((rows, 0)), payload.bonus_tokens.new_zeros(rows))

    def observe(self, ctx: StepContext, verdict: Verdict, taps: Tensor | None) -> DraftInput | None:
        """Nothing to learn, nothing to relay."""
        return None


def parse(options: Mapping[str, str]) -> None:
    """`--speculate off`; takes no options."""
    if options:
        raise ConfigError(f"--speculate off must have no options, but got {sorted(options)}")


def build(options: Mapping[str, str], target: Target) -> Off:
    """See `parse`."""
    parse(options)
    return Off()
