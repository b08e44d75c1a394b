"""Products of packed matrices: against float64 products of the very operands, and each row by itself, bit for bit."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from slipstream.errors import InvariantBroken
from slipstream.kernels.cpu.library import Kernels
from slipstream.kernels.cpu.matrix import Gate, Mode, PackedMatrix
from slipstream.kernels.formats import Format
from tests.kernels.emulate import Matrix, operand, product, random_matrix, values

pytestmark = pytest.mark.usefixtures("library")

FORMATS = list(Format)
# Outputs that fill panels and that do not; inputs of few groups and many, and for the plain formats of any number.
SHAPES = [(1, 32), (16, 64), (33, 96), (64, 576), (95, 1536), (960, 64)]
PLAIN_SHAPES = [(1, 1), (5, 3), (31, 7), (33, 17), (70, 100), (64, 577)]
# Relative to the product of the magnitudes: float32 sums of so many terms are not off by more.
TOLERANCE = 1e-6


def shapes(form: Format) -> list[tuple[int, int]]:
    own = PLAIN_SHAPES if not form.is_quantized else [(40, 16), (3, 48), (32, 272)] if form is Format.Q6K else []
    return SHAPES + own


def modes(form: Format) -> list[Mode]:
    own = {Format.F32: Mode.EXACT, Format.BF16: Mode.BFLOAT16}.get(form, Mode.QUANTIZED)
    return sorted({own, Mode.EXACT})


CASES = [(form, mode) for form in FORMATS for mode in modes(form)]
each_case = pytest.mark.parametrize(("form", "mode"), CASES, ids=[f"{form}-{mode.name.lower()}" for form, mode in CASES])


def rows(count: int, inputs: int, seed: int = 1) -> Tensor:
    """Rows of very different sizes, with zeros."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(count, inputs, generator=g) * torch.logspace(-3, 3, count).unsqueeze(1)
    x[:, ::11] = 0
    return x


def assert_close(got: Tensor, expected: Tensor, size: Tensor) -> None:
    error = ((got.double() - expected).abs() / size).max()
    assert error < TOLERANCE, f"off by {error:.2e} of the terms' sizes"


@each_case
def test_against_float64(form: Format, mode: Mode) -> None:
    for (out, inputs), count in itertools.product(shapes(form), (1, 2, 5, 6, 7, 13, 25)):
        matrix, x = random_matrix(form, out, inputs), rows(count, inputs)
        got = PackedMatrix.pack([matrix], mode=mode)(x)
        assert got.shape == (count, out)
        assert_close(got, *product(x, matrix, mode))


@each_case
def test_a_row_does_not_depend_on_the_others(form: Format, mode: Mode, library: Kernels) -> None:
    packed = PackedMatrix.pack([random_matrix(form, 100, 320)], mode=mode)
    x = rows(130, 320)
    library.set_threads(1)
    alone = torch.cat([packed(x[row : row + 1]) for row in range(len(x))])
    for threads in (1, 2, 3):
        library.set_threads(threads)
        for count in (1, 2, 3, 4, 5, 6, 7, 8, 11, 12, 13, 24, 25, 31, 64, 97, 130):
            for first in {0, 1, min(5, 130 - count), 130 - count}:
                if first + count <= 130:
                    assert torch.equal(packed(x[first : first + count]), alone[first : first + count]), (threads, count, first)


@pytest.mark.parametrize("form", FORMATS)
def test_many_rows_are_cut_into_slabs(form: Format, library: Kernels) -> None:
    """Enough rows that the operand does not stay in a cache as a whole: a chunk is one slab of them."""
    packed = PackedMatrix.pack([random_matrix(form, 70, 1536)])
    x = rows(400, 1536)
    library.set_threads(2)
    whole = packed(x)
    library.set_threads(1)
    for first in (0, 57, 399):
        assert torch.equal(packed(x[first : first + 1]), whole[first : first + 1])


@pytest.fixture
def busy_process() -> Iterator[None]:
    """Another process that never rests."""
    busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        busy.kill()
        busy.wait()


@pytest.mark.usefixtures("busy_process")
@pytest.mark.parametrize("form", FORMATS)
def test_a_row_does_not_depend_on_the_load(form: Format, library: Kernels) -> None:
    packed = PackedMatrix.pack([random_matrix(form, 960, 576)])
    x = rows(13, 576)
    library.set_threads(1)
    alone = packed(x)
    library.set_threads(2)
    for _ in range(40):
        assert torch.equal(packed(x), alone)


@each_case
def test_several_parts_and_a_bias(form: Format, mode: Mode) -> None:
    parts = [random_matrix(form, out, 64, seed) for seed, out in enumerate((48, 7, 30))]
    bias = torch.randn(85, generator=torch.Generator().manual_seed(3))
    x = rows(9, 64)
    got = PackedMatrix.pack(parts, bias, mode=mode)(x)
    whole = torch.cat([values(part) for part in parts])
    left = operand(x, mode)
    expected = left @ whole.T + bias.double()
    assert_close(got, expected, left.abs() @ whole.abs().T + bias.double().abs())


@pytest.mark.parametrize("gate", Gate)
@each_case
def test_paired(form: Format, mode: Mode, gate: Gate) -> None:
    for out in (1, 16, 40, 96):
        parts = [random_matrix(form, out, 96, seed) for seed in (0, 1)]
        bias = torch.randn(2 * out, generator=torch.Generator().manual_seed(3))
        x = rows(8, 96) * 0.1
        got = PackedMatrix.pack(parts, bias, paired=True, gate=gate, mode=mode)(x)
        both = [product(x, part, mode)[0] + half for part, half in zip(parts, bias.double().split(out), strict=True)]
        expected = activated(both[0], gate) * both[1]
        assert got.shape == (8, out)
        # The gate's own rounding error is multiplied by what it gates.
        assert torch.allclose(got.double(), expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def activated(x: Tensor, gate: Gate) -> Tensor:
    if gate is Gate.SILU:
        return functional.silu(x)
    return functional.gelu(x, approximate="tanh") if gate is Gate.GELU_TANH else x


@each_case
def test_adding_to_a_sum(form: Format, mode: Mode) -> None:
    packed = PackedMatrix.pack([random_matrix(form, 45, 64)], mode=mode)
    x, before = rows(7, 64), torch.randn(7, 45)
    total = before.clone()
    packed.add_to(total, x)
    assert torch.equal(total, before + packed(x))


@each_case
def test_with_a_norm(form: Format, mode: Mode) -> None:
    """The fused norm is the one that is written out, bit for bit."""
    from slipstream.kernels.cpu.rows import RowKernels

    packed = PackedMatrix.pack([random_matrix(form, 45, 96)], mode=mode)
    x, weight = rows(11, 96), torch.randn(96)
    for adds_one in (False, True):
        normed = RowKernels().rmsnorm(x, weight, 1e-5, adds_one=adds_one)
        assert torch.equal(packed.of_norm(x, weight, 1e-5, adds_one=adds_one), packed(normed))


@each_case
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_stays_in_its_row(form: Format, mode: Mode, bad: float) -> None:
    packed = PackedMatrix.pack([random_matrix(form, 50, 96)], mode=mode)
    x = rows(9, 96)
    good = packed(x)
    x[4, 37] = bad
    got = packed(x)
    assert not got[4].isfinite().any()
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(got[others], good[others])
    assert good.isfinite().all()


@each_case
def test_denormals_and_extremes(form: Format, mode: Mode) -> None:
    """Tiny groups count as zero, and the largest values do not overflow on the way."""
    matrix = random_matrix(form, 40, 64)
    packed = PackedMatrix.pack([matrix], mode=mode)
    tiny = torch.full((3, 64), 1e-40)
    tiny[1] = 1e-37
    assert (packed(tiny).abs() < 1e-34).all()
    large = torch.zeros(2, 64)
    large[:, 3] = torch.tensor([3e38, -1e30])
    left, right = operand(large, mode), values(matrix)
    expected = left @ right.T
    got = packed(large)
    fits = expected.abs() < 3e38
    assert_close(got[fits], expected[fits], (left.abs() @ right.abs().T + 1e-30)[fits])  # a code may be 0


def test_the_callers_floating_point_state_is_kept() -> None:
    packed = PackedMatrix.pack([random_matrix(Format.Q8, 64, 64)])
    packed(rows(20, 64))
    assert sys.float_info.min / 2 > 0, "denormals are flushed in the caller's own arithmetic"
    assert float(torch.tensor(1e-40) * 0.5) > 0


def test_no_rows_and_strides() -> None:
    packed = PackedMatrix.pack([random_matrix(Format.Q8, 33, 64)])
    assert packed(torch.empty(0, 64)).shape == (0, 33)
    wide = rows(5, 96)
    assert torch.equal(packed(wide[:, 16:80]), packed(wide[:, 16:80].contiguous()))
    columns = rows(64, 5).T
    assert torch.equal(packed(columns), packed(columns.contiguous()))


@pytest.mark.parametrize("form", FORMATS)
def test_sources_are_not_kept_nor_changed(form: Format) -> None:
    matrix = random_matrix(form, 33, 64)
    before = values(matrix)
    packed = PackedMatrix.pack([matrix])
    x = rows(3, 64)
    first = packed(x)
    assert torch.equal(values(matrix), before)
    for part in [matrix] if isinstance(matrix, Tensor) else [matrix.codes, matrix.scales]:
        part.zero_()
    assert torch.equal(packed(x), first)


@each_case
def test_rows_of_the_weight(form: Format, mode: Mode) -> None:
    """Each value as it is dequantised, bit for bit, in any order and more than once."""
    for outputs, inputs in shapes(form):
        matrix = random_matrix(form, outputs, inputs)
        which = torch.randint(outputs, (70,), generator=torch.Generator().manual_seed(3))
        wanted = matrix.to(torch.float32) if isinstance(matrix, Tensor) else matrix.dequantize()
        packed = PackedMatrix.pack([matrix], mode=mode)
        assert torch.equal(packed.weight_rows(which), wanted[which])
        assert packed.weight_rows(which[:0]).shape == (0, inputs)
        for bad in (torch.tensor([0, outputs]), torch.tensor([-1]), which.to(torch.int32), which[::2], which.view(7, 10)):
            with pytest.raises(InvariantBroken, match=r"dense int64|sizes must be positive"):
                packed.weight_rows(bad)
    gate = random_matrix(Format.F32, 32, 64)
    with pytest.raises(InvariantBroken, match="sizes must be positive"):
        PackedMatrix.pack([gate, gate], paired=True, gate=Gate.SILU).weight_rows(torch.tensor([0]))


def test_what_does_not_fit_is_refused() -> None:
    q8, f32 = random_matrix(Format.Q8, 32, 64), random_matrix(Format.F32, 32, 64)
    bad: list[tuple[str, list[Matrix], dict[str, Any]]] = [
        ("one format", [q8, f32], {}),
        ("one format", [f32, random_matrix(Format.F32, 32, 65)], {}),
        ("one format", [torch.zeros(4, 4, dtype=torch.float64)], {}),
        ("one format", [], {}),
        ("not be empty", [torch.zeros(0, 4)], {}),
        ("paired", [f32], {"paired": True}),
        ("paired", [f32, random_matrix(Format.F32, 33, 64)], {"paired": True}),
        ("no activation", [f32], {"gate": Gate.SILU}),
        ("bias", [f32], {"bias": torch.zeros(31)}),
        ("QUANTIZED or EXACT", [q8], {"mode": Mode.BFLOAT16}),
    ]
    for message, parts, options in bad:
        with pytest.raises(InvariantBroken, match=message):
            PackedMatrix.pack(parts, **options)
    packed = PackedMatrix.pack([q8])
    for x in (torch.zeros(2, 63), torch.zeros(64), torch.zeros(2, 64, dtype=torch.bfloat16), torch.zeros(2, 64, device="meta")):
        with pytest.raises(InvariantBroken, match="rows must be float32"):
            packed(x)
    with pytest.raises(InvariantBroken, match="the sum must be"):
        packed.add_to(torch.zeros(2, 31), torch.zeros(2, 64))
    with pytest.raises(InvariantBroken, match="norm's weight"):
        packed.of_norm(torch.zeros(2, 64), torch.zeros(63), 1e-5)


def test_the_library_checks_what_it_is_given(library: Kernels) -> None:
    packed = PackedMatrix.pack([random_matrix(Format.Q8, 32, 64)])
    pointer, number, size = ctypes.c_void_p, ctypes.c_int32, ctypes.c_int64
    call = library.bind("slip_matmul", pointer, number, pointer, size, size, pointer, size, number)
    x, out = torch.zeros(2, 64), torch.zeros(2, 32)
    good = [packed.address, int(packed.mode), x.data_ptr(), 64, 2, out.data_ptr(), 32, 0]
    call(*good)
    for place, value, text in (
        (0, None, "null"),
        (1, int(Mode.BFLOAT16), "mode"),
        (2, None, "null"),
        (3, 63, "strides"),
        (4, -1, "sizes"),
        (5, None, "null"),
        (6, 31, "strides"),
    ):
        with pytest.raises(InvariantBroken, match=text):
            call(*good[:place], value, *good[place + 1 :])
    struct = packed._struct
    for field, value, text in (
        ("format", len(Format), "format"),
        ("format", -1, "format"),
        ("outputs", 0, "sizes"),
        ("inputs", 0, "sizes"),
        ("activation", 3, "mode"),
        ("panels", struct.panels + 32, "aligned"),
        ("panels", None, "null"),
    ):
        before = getattr(struct, field)
        setattr(struct, field, value)
        with pytest.raises(InvariantBroken, match=text):
            call(*good)
        setattr(struct, field, before)
    call(*good)


def test_panel_bytes_are_the_librarys(library: Kernels) -> None:
    from slipstream.kernels.cpu.matrix import _CODES, _panel_bytes

    function = ctypes.CDLL(str(library.path)).slip_panel_bytes
    function.argtypes, function.restype = [ctypes.c_int32, ctypes.c_int64], ctypes.c_int64
    for form in Format:
        for inputs in (1, 7, 8, 16, 32, 48, 576):
            assert function(_CODES[form], inputs) == _panel_bytes(form, inputs)
    assert function(99, 32) == 0
