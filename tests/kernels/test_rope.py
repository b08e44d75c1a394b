"""Heads that turn on their way to attention, against the layers' own rotary embedding and norms."""

from __future__ import annotations

import pytest
import torch

from slipstream.attention.kv import from_rows
from slipstream.kernels.cpu.attention import AttentionBatch, LayerTensors, Turn
from slipstream.layers.norm import HeadNorm
from slipstream.layers.rope import RopeSpec
from slipstream.layers.rotary import Rotary
from tests.cpu_kernels import needed
from tests.kernels.attention_world import Shape, Stream, World
from tests.kernels.paged_world import Part

CPU = torch.device("cpu")
SPECS = {
    "whole": RopeSpec(),
    "half": RopeSpec(rotary_share=0.5),
    "longer": RopeSpec(kind="yarn", factor=4.0, original_context_len=16, attention_factor=1.2),
}


@pytest.mark.parametrize("dim", [16, 64, 80, 96])
@pytest.mark.parametrize("kind", SPECS)
@pytest.mark.parametrize("norms", [False, True])
def test_turned_as_the_layers_turn(dim: int, kind: str, norms: bool) -> None:
    needed()
    shape = Shape(4, 2, dim, stored=torch.float32)
    stream = Stream.draw(shape, 50, dim)
    world = World(shape, 1, 50)
    layout = world.layout([Part(0, 0, stream, chunk=True)])
    turns = Rotary(SPECS[kind], dim, CPU).at(layout.positions, torch.float32)
    half = turns.cos.shape[-1] // 2
    cos, sin = turns.cos[:, 0, :half].contiguous(), turns.sin[:, 0, half:].contiguous()
    qk = torch.cat((stream.query, stream.key), 1)
    turn = Turn(cos, sin)
    if norms:
        gen = torch.Generator().manual_seed(1)
        query_norm, key_norm = torch.rand(2, dim, generator=gen) + 0.5
        qk = HeadNorm(query_norm, key_norm, 4, 2, 1e-6)(qk)
        turn = Turn(cos, sin, query_norm, key_norm, 1e-6)
    qk = turns(qk)
    wanted = world.feed(Part(0, 0, Stream(qk[:, :4], qk[:, 4:], stream.value), chunk=True))[0]

    other = World(shape, 1, 50)
    batch = AttentionBatch(
        layout.query_lens, 1, layout.index, layout.base_lens, layout.write_slots, layout.read_slots, layout.ancestors
    )
    query = stream.query.clone()
    out = batch.attend(LayerTensors(*other.kv.layer(0)), query, stream.key, stream.value, shape.scale, turn=turn)
    close = {"rtol": 1e-5, "atol": 1e-5}  # a few roundings of numbers of about 1
    torch.testing.assert_close(query, qk[:, :4].contiguous(), **close)
    slots = layout.write_slots
    stored = [from_rows(tensor[slots], torch.float32) for tensor in other.kv.layer(0)]
    torch.testing.assert_close(stored[0], qk[:, 4:].contiguous(), **close)
    assert torch.equal(stored[1], stream.value)
    torch.testing.assert_close(out, wanted, rtol=0, atol=5e-5)
