"""Makes quantised matrices of plain ones, on loading: `--quantization q8` and `q4`.

    q8   scale = largest magnitude of the group / 127                       no value is off by more than half a scale
    q4   scale and minimum of each group by least squares:

            codes = round((w - m) / s), 0 to 15  ─►  s, m = the line through (codes, w) that fits best  ─►  codes again ...

         begun from several cuts of the group's range, as the outermost weights are few and a finer step serves the others;
         the best of all, by the sum of squares with scale and minimum as they are stored, is kept
"""

from __future__ import annotations

import torch
from torch import Tensor

from slipstream.errors import InvariantBroken, ModelError
from slipstream.kernels.formats import Format, QuantizedTensor

_CHUNK = 1 << 18  # elements at once: the passes of a fit stay in the cache
_Q4_CUTS = (1.0, 0.85)  # shares of a group's range that the fits begin with
_Q4_ROUNDS = 2


def quantize(values: Tensor, form: Format) -> QuantizedTensor:
    """A matrix in `form`, q8 or q4.

    A group with a value that is not finite becomes NaN as a whole: it is seen, as in the plain matrix.

    Args:
        values: [out, in], of any float type, on the CPU; `in` must be whole groups.
        form: Q8 or Q4.

    Raises `ModelError` for weights beyond what float16 scales can reach.
    """
    if form not in (Format.Q8, Format.Q4):
        raise InvariantBroken(f"a matrix must be made q8 or q4, but got {form}")
    out, inputs = values.shape
    groups = inputs // form.group
    codes = torch.empty((out, inputs // 2 if form.has_mins else inputs), dtype=torch.uint8 if form.has_mins else torch.int8)
    scales = torch.empty((out, groups), dtype=torch.float16)
    mins = torch.empty((out, groups), dtype=torch.float16) if form.has_mins else None
    step = max(1, _CHUNK // max(1, inputs))
    for start in range(0, out, step):
        rows = slice(start, start + step)
        part = values[rows].to(torch.float32).reshape(-1, form.group)
        if mins is None:
            found, scale = _q8(part)
        else:
            found, scale, least = _q4(part)
            mins[rows] = least.view(-1, groups)
        codes[rows] = found.view(-1, codes.shape[1])
        scales[rows] = scale.view(-1, groups)
    return QuantizedTensor(form, (out, inputs), codes, scales, mins)


def _q8(groups: Tensor) -> tuple[Tensor, Tensor]:
    """float32 [n, 32] -> codes int8 [n, 32], scales float16 [n, 1]."""
    most = groups.abs().amax(1, keepdim=True)
    scales = _stored(most / 127)
    # Rounded down, and a scale near nothing by much, it would not reach the largest weight: then the next one does.
    short = scales.to(torch.float32) * 127.5 < most
    scales = torch.where(short, _next(scales), scales)
    return _rounded(groups / scales.to(torch.float32), -127, 127).to(torch.int8), scales


def _q4(groups: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """float32 [n, 32] -> codes uint8 [n, 16], scales and minimums float16 [n, 1]."""
    least, most = groups.amin(1, keepdim=True), groups.amax(1, keepdim=True)
    best_scale = best_min = best_error = None
    for cut in _Q4_CUTS:
        scale, low = (most - least) * (cut / 15), least + (most - least) * ((1 - cut) / 2)
        for _ in range(1 + _Q4_ROUNDS):
            scale, low = _stored(scale).to(torch.float32), _stored(low).to(torch.float32)
            codes = _rounded((groups - low) / scale, 0, 15)
            error = (codes * scale + low - groups).square_().sum(1, keepdim=True)
            if best_scale is None or best_min is None or best_error is None:
                best_scale, best_min, best_error = scale, low, error
            else:
                better = error < best_error
                best_scale, best_min = torch.where(better, scale, best_scale), torch.where(better, low, best_min)
                best_error = torch.where(better, error, best_error)
            scale, low = _line(codes, groups, scale, low)
    assert best_scale is not None and best_min is not None
    codes = _rounded((groups - best_min) / best_scale, 0, 15).to(torch.uint8)
    return codes[:, 0::2] | (codes[:, 1::2] << 4), best_scale.to(torch.float16), best_min.to(torch.float16)


def _line(codes: Tensor, groups: Tensor, scale: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
    """Slope and intercept of the least squares of each group; those given where all its codes are the same."""
    mean, middle = codes.mean(1, keepdim=True), groups.mean(1, keepdim=True)
    off = codes - mean
    spread = off.square().sum(1, keepdim=True)
    slope = (off * groups).sum(1, keepdim=True) / spread
    fits = spread > 0
    return torch.where(fits, slope, scale), torch.where(fits, middle - slope * mean, low)


def _rounded(codes: Tensor, low: int, high: int) -> Tensor:
    """Nearest integers within bounds, float32; 0 for NaN, which a scale of zero or of NaN leaves."""
    return codes.round_().nan_to_num_(0.0, high, low).clamp_(low, high)


def _stored(values: Tensor) -> Tensor:
    """float32 -> float16. Raises `ModelError` for what overflows."""
    stored = values.to(torch.float16)
    if bool((stored.isinf() & values.isfinite()).any()):
        raise ModelError(
            f"weights must be small enough for scales in float16 to be quantised, but got scales up to {values.abs().max():.3g}",
            hint="--quantization none leaves them as they are",
        )
    return stored


def _next(values: Tensor) -> Tensor:
    """The float16 above each positive or zero one."""
    return (values.view(torch.int16) + 1).view(torch.float16)
