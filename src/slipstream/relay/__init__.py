"""The relay: state that travels from one step to the next before the host has seen it. A leaf: torch and nothing of ours."""

from slipstream.relay.future_map import PADDING_SLOT, FutureMap, RelayError, Rows
from slipstream.relay.payload import EXTRAS, DraftInput, FieldSpec, RelayPayload, RelaySpec

__all__ = [
    "EXTRAS", "PADDING_SLOT", "DraftInput", "FieldSpec", "FutureMap", "RelayError", "RelayPayload", "RelaySpec", "Rows",
]
