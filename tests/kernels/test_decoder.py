"""Decoders whose layers are one call: the bits of the same kernels called one by one, whatever a pass holds."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from slipstream.attention.kv import KVCache
from slipstream.attention.reference import ReferenceBackend
from slipstream.errors import InvariantBroken
from slipstream.kernels.cpu.attention import CacheTensors, LayerTensors
from slipstream.kernels.cpu.decoder import DecoderKernel
from slipstream.kernels.cpu.library import Kernels
from slipstream.kernels.formats import Format
from slipstream.layers.decoder import Decoder
from slipstream.layers.fused import FusedDecoder, fused
from slipstream.layers.linear import Arithmetic
from tests.kernels.decoder_world import (
    HOLDINGS,
    MODELS,
    DecoderWorld,
    Part,
    everything,
    kernel_by_kernel,
    model,
    tokens,
    whole,
)

pytestmark = pytest.mark.usefixtures("library")

KVS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "int8": torch.int8}
TAPS = (2, 0, 3, 2)
# Of the states' size, fused against layer by layer: both are right, but where one rounds up another rounds down. Coarser
# activations make more of that: one step of an int8 code is 1 / 127.
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.05, "q8": 0.05, "q4": 0.05}


def assert_kernel_by_kernel(decoder: Decoder) -> None:
    """Prompts, a long one behind keys of its own among them, a verify chain and a tree; the KV that they leave too."""
    assert type(decoder) is FusedDecoder
    one, other = DecoderWorld(decoder, 3), DecoderWorld(decoder, 3)
    passes = [
        [Part(0, 0, tokens(90, 1), chunk=True), Part(1, 0, tokens(7, 2), chunk=True)],
        [Part(2, 0, tokens(13, 3), chunk=True), Part(0, 90, tokens(1, 4)), Part(1, 7, tokens(5, 5))],
        [Part(0, 91, tokens(6, 6), parents=(0, 0, 1, 1, 4)), Part(2, 13, tokens(1, 7))],
        [Part(1, 12, tokens(1, 8))],
    ]
    for parts in passes:
        got, states = one.feed(*parts, taps=TAPS)
        expected, tapped = kernel_by_kernel(decoder, torch.cat([part.tokens for part in parts]), other.begin(*parts), TAPS)
        assert expected.isfinite().all()
        assert torch.equal(torch.cat(got), expected)
        assert states is not None
        assert torch.equal(torch.cat(states), tapped)
    for layer in range(one.kv.num_layers):
        for got_kv, expected_kv in zip(one.kv.layer(layer), other.kv.layer(layer), strict=True):
            assert torch.equal(got_kv.view(torch.uint8), expected_kv.view(torch.uint8))


@pytest.mark.parametrize("cpu_kernels", ["auto", "exact"])
@pytest.mark.parametrize("holding", HOLDINGS)
@pytest.mark.parametrize("name", MODELS)
def test_kernel_by_kernel(name: str, holding: str, cpu_kernels: str) -> None:
    assert_kernel_by_kernel(model(name, holding, cpu_kernels))


@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("name", ["llama", "gemma3_text"])
def test_each_kv_kernel_by_kernel(name: str, kv: str) -> None:
    assert_kernel_by_kernel(model(name, "q8", kv=kv))


@pytest.mark.parametrize("arithmetic", [Arithmetic.KERNELS, Arithmetic.EXACT])
@pytest.mark.parametrize("kv", KVS)
@pytest.mark.parametrize("form", Format)
def test_everything_kernel_by_kernel(form: Format, kv: str, arithmetic: Arithmetic) -> None:
    other = Format.Q8 if form is not Format.Q8 else Format.BF16
    assert_kernel_by_kernel(fused(everything(form, other, KVS[kv], arithmetic)))


@pytest.mark.parametrize("holding", HOLDINGS)
@pytest.mark.parametrize("name", MODELS)
def test_close_to_layer_by_layer(name: str, holding: str) -> None:
    decoder, ids = model(name, holding, kv="float32"), tokens(60)
    got, expected = whole(decoder, ids), whole(decoder, ids, fused=False)
    assert (got - expected).abs().max() < TOLERANCE[holding] * expected.abs().max()


def ways(ids: Tensor, path: Tensor, parents: tuple[int, ...], nodes: Tensor) -> dict[str, Callable[[Decoder], Tensor]]:
    """Ways to compute the states of `ids` and, behind them, `path`, which is the path to the last of `nodes`."""
    count, line = len(ids), torch.cat((ids, path))

    def pieces(decoder: Decoder, *ends: int, busy: bool = False) -> Tensor:
        """Prompt chunks up to each of the ends, then a token at a time; `busy`: with other sequences around."""
        world, out = DecoderWorld(decoder, 3, 320), []
        others = tokens(300, 8)
        borders = (0, *ends, *range(ends[-1] + 1, len(line) + 1))
        for number, (start, end) in enumerate(itertools.pairwise(borders)):
            part = Part(1, start, line[start:end], chunk=number < len(ends))
            if not busy:
                out.append(world.feed(part)[0][0])
                continue
            before = Part(0, 3 * number, others[3 * number : 3 * number + 3], chunk=True)
            out.append(world.feed(before, part, Part(2, number, others[number, None]))[0][1])
        return torch.cat(out)

    def verified(decoder: Decoder) -> Tensor:
        world = DecoderWorld(decoder)
        first = world.feed(Part(0, 0, ids, chunk=True))[0][0]
        return torch.cat((first, world.feed(Part(0, count, path))[0][0]))

    def tree(decoder: Decoder) -> Tensor:
        world, on_path = DecoderWorld(decoder, 2), [len(nodes) - 1]
        while on_path[0]:
            on_path.insert(0, parents[on_path[0] - 1])
        first = world.feed(Part(0, 0, ids, chunk=True), Part(1, 0, tokens(9, 3), chunk=True))[0][0]
        got = world.feed(Part(1, 9, tokens(3, 4), parents=(0, 0)), Part(0, count, nodes, parents=parents))[0][1]
        return torch.cat((first, got[on_path]))

    return {
        "alone": lambda decoder: pieces(decoder, 1),
        "in chunks": lambda decoder: pieces(decoder, 3, 50, 67),
        "batched": lambda decoder: pieces(decoder, 20, 64, busy=True),
        "verified": verified,
        "in a tree": tree,
    }


WAYS = ways(tokens(70, 1), torch.tensor([9, 4, 7]), (0, 0, 1, 2, 2), torch.tensor([9, 3, 4, 5, 6, 7]))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["qwen2", "gemma3_text", "phi3", "everything"])
@pytest.mark.parametrize("holding", ["float32", "q8"])
def test_a_row_does_not_depend_on_the_pass(name: str, holding: str, way: str, threads: int, library: Kernels) -> None:
    form = {"float32": Format.F32, "q8": Format.Q8}[holding]
    decoder = fused(everything(form, Format.Q4K)) if name == "everything" else model(name, holding)
    library.set_threads(1)
    expected = whole(decoder, torch.cat((tokens(70, 1), torch.tensor([9, 4, 7]))))
    library.set_threads(threads)
    got = WAYS[way](decoder)
    assert torch.equal(got, expected)


def test_what_is_not_finite_stays_in_its_row() -> None:
    """A prompt's row and a draft node, beside other sequences; and the node's ancestors."""
    decoder = fused(everything(Format.Q8))
    ids = tokens(20, 5).clamp(min=8)
    good = whole(decoder, ids)
    decoder.embedding.weight[7, 3] = float("nan")
    sick, behind = torch.tensor([7]), ids[:10]
    world = DecoderWorld(decoder, 3)
    first = world.feed(Part(0, 0, ids[:19], chunk=True), Part(1, 0, torch.cat((behind, sick)), chunk=True))[0]
    assert torch.equal(first[0], good[:19])
    assert first[1][10].isnan().all()
    second = world.feed(Part(2, 0, behind, chunk=True), Part(0, 19, torch.cat((ids[19:], sick))))[0]
    assert torch.equal(second[0], good[:10])
    assert torch.equal(second[1][0], good[19])
    assert second[1][1].isnan().all()


def test_two_threads_with_one_decoder() -> None:
    """As two engines around one model: each pass has the decoder's work buffers for itself."""
    decoder = fused(everything(Format.Q8))
    prompts = [tokens(40, 1), tokens(23, 2)]
    expected = [whole(decoder, ids) for ids in prompts]
    with ThreadPoolExecutor(2) as threads:
        for _ in range(40):
            for got, right in zip(threads.map(lambda ids: whole(decoder, ids), prompts), expected, strict=True):
                assert torch.equal(got, right)


def test_what_is_not_fused() -> None:
    """What the kernels do not know stays layer by layer, and so does a pass of another attention backend."""
    assert type(model("llama", cpu_kernels="off")) is Decoder
    assert type(fused(everything(Format.Q8, activation="gelu"))) is Decoder
    assert type(fused(everything(Format.Q8, arithmetic=Arithmetic.TORCH))) is Decoder
    assert type(fused(everything(Format.Q8, activation="gelu_pytorch_tanh"))) is FusedDecoder

    decoder, ids = model("llama"), tokens(30)
    world = DecoderWorld(decoder)
    step = ReferenceBackend().begin(world.layout([Part(0, 0, ids, chunk=True)]), world.kv)
    with torch.inference_mode():
        got, states = decoder.forward(ids, step, (1,))
        expected, tapped = Decoder.forward(decoder, ids, step, (1,))
    assert torch.equal(got, expected)
    assert states is not None and tapped is not None
    assert torch.equal(states, tapped)


def kernel_of(decoder: Decoder) -> DecoderKernel:
    assert isinstance(decoder, FusedDecoder)
    return decoder.kernel


def test_what_does_not_fit_is_refused() -> None:
    decoder = model("llama")
    kernel, world = kernel_of(decoder), DecoderWorld(decoder)
    step = world.begin(Part(0, 0, tokens(4), chunk=True))
    turn = decoder.rotaries[0].first_tables(4)
    x, positions = torch.zeros(4, kernel.hidden_size), step.layout.positions
    good = (x, step.batch, step.cache, positions, [turn], (0, 3))
    kernel.forward(*good)

    def refuses(match: str, at: int, value: object) -> None:
        with pytest.raises(InvariantBroken, match=match):
            kernel.forward(*good[:at], value, *good[at + 1 :])

    refuses(r"residual must be dense float32 \[4, 96\]", 0, torch.zeros(3, 96))
    refuses("residual must be dense float32", 0, x.double())
    refuses("residual must be dense float32", 0, torch.zeros(96, 4).T)
    refuses("must have 3 layers, but has 2", 2, CacheTensors(step.cache.layers[:2]))
    refuses(r"positions must be dense int64 \[4\]", 3, positions[:3])
    refuses("positions must be dense int64", 3, positions.to(torch.int32))
    refuses("sizes must be positive", 3, positions + len(turn[0]))
    refuses("sizes must be positive", 3, positions - 1)
    refuses("must bring 1 turns, but got 2", 4, [turn, turn])
    refuses("cosines must be dense float32", 4, [(turn[0].T, turn[1].T)])
    refuses("sines must be dense float32", 4, [(turn[0], turn[1][:, :2])])
    refuses("sizes must be positive", 4, [(turn[0][:3], turn[1][:3])])
    refuses("sizes must be positive", 4, [(torch.ones(4, 9), torch.ones(4, 9))])
    refuses("sizes must be positive", 5, (4,))
    refuses("sizes must be positive", 5, (-1,))
    few = KVCache(decoder.kv_layers, 3, 1, torch.device("cpu"))
    refuses("KV slots must be those of the cache", 2, CacheTensors([LayerTensors(*few.layer(layer)) for layer in range(3)]))
    wide = KVCache(model("llama of one head a KV head").kv_layers, 12, 16, torch.device("cpu"))
    refuses("sizes must be positive", 2, CacheTensors([LayerTensors(*wide.layer(layer)) for layer in range(3)]))


def test_layers_that_do_not_fit_are_refused() -> None:
    plain = everything(Format.Q8)
    plain.blocks[1].attention.out = plain.blocks[1].attention.qkv
    with pytest.raises(InvariantBroken, match="sizes must be positive and fit each other"):
        fused(plain)
    plain = everything(Format.Q8)
    plain.blocks[0].attention.rotary = 2
    with pytest.raises(InvariantBroken, match="sizes must be positive and fit each other"):
        fused(plain)
