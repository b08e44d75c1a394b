"""`--quantization q8` and `q4`: errors within bounds, better than the plain rule, and nothing lost in silence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slipstream.errors import InvariantBroken, ModelError
from slipstream.kernels.formats import Format
from slipstream.weights.quantize import quantize


def weights(kind: str, shape: tuple[int, int] = (300, 1024)) -> Tensor:
    made = torch.Generator().manual_seed(3)
    plain = torch.randn(shape, generator=made) * 0.03
    if kind == "outliers":
        plain[torch.rand(shape, generator=made) < 0.01] *= 20
    elif kind == "one-sided":
        plain = plain.abs() + 0.5
    elif kind == "tiny":  # below float16's normal numbers
        plain *= 1e-5
    elif kind == "large":
        plain *= 1e5
    return plain


KINDS = ("normal", "outliers", "one-sided", "tiny", "large")


@pytest.mark.parametrize("kind", KINDS)
def test_q8_is_off_by_half_a_scale_at_most(kind: str) -> None:
    plain = weights(kind)
    made = quantize(plain, Format.Q8)
    scales = made.scales.to(torch.float32).repeat_interleave(32, 1)
    assert ((made.dequantize() - plain).abs() <= scales / 2 * (1 + 1e-5)).all()
    # A scale is no larger than it must be: one step of float16 above the smallest that reaches.
    most = plain.view(300, -1, 32).abs().amax(2)
    assert (made.scales.to(torch.float32) <= most / 127 * (1 + 2**-9) + 2.0**-24).all()


def from_least_to_most(plain: Tensor) -> Tensor:
    """The plain rule in float32: sixteen steps from the smallest to the largest of each group."""
    groups = plain.view(-1, 32)
    least, most = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    scale = ((most - least) / 15).clamp_min(1e-30)
    return (((groups - least) / scale).round() * scale + least).view_as(plain)


@pytest.mark.parametrize("kind", ["normal", "outliers", "one-sided", "large"])
def test_q4_beats_the_plain_rule_in_each_group(kind: str) -> None:
    plain = weights(kind)
    ours = (quantize(plain, Format.Q4).dequantize() - plain).view(-1, 32).square().sum(1)
    theirs = (from_least_to_most(plain) - plain).view(-1, 32).square().sum(1)
    # Ours pays for scale and minimum in float16, 2^-11 of values up to the group's largest.
    rounding = 32 * (plain.view(-1, 32).abs().amax(1) * 2.0**-10) ** 2
    assert (ours <= theirs + rounding).all()
    assert ours.sum() < 0.93 * theirs.sum() or kind == "one-sided"


@pytest.mark.parametrize("form", [Format.Q8, Format.Q4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_values_on_the_grid_stay(form: Format, dtype: torch.dtype) -> None:
    """What a quantised matrix holds is found again."""
    made = torch.Generator().manual_seed(0)
    low, high = (-127, 128) if form is Format.Q8 else (0, 16)
    codes = torch.randint(low, high, (64, 96), generator=made)
    codes.view(-1, 32)[:, 0], codes.view(-1, 32)[:, 1] = low, high - 1
    values = (codes * 2.0**-9 - (0 if form is Format.Q8 else 2.0**-6)).to(dtype)
    assert torch.equal(quantize(values, form).dequantize(dtype), values)


@pytest.mark.parametrize("form", [Format.Q8, Format.Q4])
def test_rows_do_not_know_each_other(form: Format) -> None:
    """A row's codes are the same alone and among more rows than are made at once."""
    plain = weights("normal", (700, 1024))
    whole = quantize(plain, form)
    for row in (0, 255, 256, 699):
        assert quantize(plain[row : row + 1], form).equals(whole.narrow(0, row, 1))


@pytest.mark.parametrize("form", [Format.Q8, Format.Q4])
def test_constant_groups(form: Format) -> None:
    plain = torch.tensor([[0.0] * 32 + [1.5] * 32 + [-0.25] * 32])
    made = quantize(plain, form).dequantize()
    assert torch.equal(made[:, :32], plain[:, :32])
    torch.testing.assert_close(made, plain, rtol=2**-9, atol=0)


@pytest.mark.parametrize("form", [Format.Q8, Format.Q4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_seen(form: Format, bad: float) -> None:
    plain = weights("normal", (2, 96))
    plain[1, 40] = bad
    made = quantize(plain, form).dequantize()
    assert made[1, 32:64].isnan().all()
    assert made[0].isfinite().all() and made[1, :32].isfinite().all() and made[1, 64:].isfinite().all()


@pytest.mark.parametrize(("form", "value"), [(Format.Q8, 1e8), (Format.Q4, 1e6)])
def test_weights_beyond_the_scales_are_refused(form: Format, value: float) -> None:
    plain = weights("normal", (1, 32))
    plain[0, 3] = -value
    with pytest.raises(ModelError, match="small enough for scales in float16"):
        quantize(plain, form)


def test_formats_of_files_are_not_made() -> None:
    with pytest.raises(InvariantBroken, match="q8 or q4"):
        quantize(weights("normal"), Format.Q6K)
