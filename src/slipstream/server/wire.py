"""What travels between the front and the engine process: msgpack of these types, one ZeroMQ message each.

    front                               engine process
      Add, Abort, GetStats,       ───►
      ResetPrefixCache, Stop      ◄───    Progress ... Ready, then Outputs and Stats; Fatal is the last

No pickle, and nothing that is not declared here decodes.
"""

from __future__ import annotations

import msgspec

from slipstream.engine.stats import EngineStats
from slipstream.types import EngineOutput, EngineRequest


class Add(msgspec.Struct, tag="add", frozen=True):
    """Compute these answers."""

    requests: tuple[EngineRequest, ...]


class Abort(msgspec.Struct, tag="abort", frozen=True):
    """End these; ids that are unknown, or have ended, are ignored."""

    request_ids: tuple[str, ...]


class GetStats(msgspec.Struct, tag="get_stats", frozen=True):
    """Answer with `Stats` of the same number. The loop itself answers, so it also shows that the loop turns."""

    number: int


class ResetPrefixCache(msgspec.Struct, tag="reset_prefix_cache", frozen=True):
    """Forget all cached prompts. No answer: messages are read in order, so the `Stats` of a later `GetStats` says it is done."""


class Stop(msgspec.Struct, tag="stop", frozen=True):
    """Exit. With `drain` what was added is finished first."""

    drain: bool = False


class Progress(msgspec.Struct, tag="progress", frozen=True):
    """How far loading is: a phase's name, and the share of it that is done, 0 to 1."""

    phase: str
    fraction: float


class Ready(msgspec.Struct, tag="ready", frozen=True):
    """Loaded. What the front tells about the model; `dtype` is named as --dtype names it."""

    architecture: str
    dtype: str
    num_parameters: int
    context_len: int
    num_pages: int


class Outputs(msgspec.Struct, tag="outputs", frozen=True):
    """News of one step."""

    outputs: tuple[EngineOutput, ...]


class Stats(msgspec.Struct, tag="stats", frozen=True):
    """Counters of now. `stalled_s`: seconds since the last progress while there was work; 0 when idle."""

    number: int
    stats: EngineStats
    stalled_s: float


class Fatal(msgspec.Struct, tag="fatal", frozen=True):
    """The engine process ends, for this reason: class name in slipstream.errors, message."""

    name: str
    message: str


ToEngine = Add | Abort | GetStats | ResetPrefixCache | Stop
ToFront = Progress | Ready | Outputs | Stats | Fatal

_encoder = msgspec.msgpack.Encoder()
_to_engine: msgspec.msgpack.Decoder[ToEngine] = msgspec.msgpack.Decoder(ToEngine)
_to_front: msgspec.msgpack.Decoder[ToFront] = msgspec.msgpack.Decoder(ToFront)


def encode(message: ToEngine | ToFront) -> bytes:
    """A message as msgpack."""
    return _encoder.encode(message)


def decode_to_engine(data: bytes) -> ToEngine:
    """A message of the front. Raises `msgspec.ValidationError` for anything else."""
    return _to_engine.decode(data)


def decode_to_front(data: bytes) -> ToFront:
    """A message of the engine process. Raises `msgspec.ValidationError` for anything else."""
    return _to_front.decode(data)
