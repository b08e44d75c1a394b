"""A quantised matrix: its values, its rows, and that parts which do not fit together are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.errors import InvariantBroken
from slipstream.kernels.formats import Format, QuantizedTensor, same_values

QUANTIZED = [form for form in Format if form.is_quantized]


def random_matrix(form: Format, shape: tuple[int, int], seed: int = 0) -> QuantizedTensor:
    made = torch.Generator().manual_seed(seed)
    out, inputs = shape
    groups = (out, inputs // form.group)
    scales = (torch.rand(groups, generator=made) * 0.1 + 0.001).to(form.scale_dtype)
    if form.has_mins:
        codes = torch.randint(0, 256, (out, inputs // 2), generator=made, dtype=torch.uint8)
        return QuantizedTensor(form, shape, codes, scales, torch.randn(groups, generator=made).to(form.scale_dtype))
    reach = {Format.Q5: 16, Format.Q6K: 32}.get(form, 128)
    codes = torch.randint(-reach, reach, shape, generator=made).to(torch.int8)
    return QuantizedTensor(form, shape, codes, scales)


def by_hand(matrix: QuantizedTensor) -> np.ndarray:
    """The values, one by one, in float32."""
    out, inputs = matrix.shape
    codes, values = matrix.codes.numpy(), np.empty((out, inputs), np.float32)
    for row in range(out):
        for column in range(inputs):
            group = column // matrix.format.group
            if matrix.mins is None:
                code, least = int(codes[row, column]), np.float32(0)
            else:
                byte = int(codes[row, column // 2])
                code, least = byte >> 4 if column % 2 else byte & 15, np.float32(matrix.mins[row, group])
            values[row, column] = np.float32(matrix.scales[row, group]) * np.float32(code) + least
    return values


@pytest.mark.parametrize("form", QUANTIZED)
def test_values(form: Format) -> None:
    matrix = random_matrix(form, (5, 96))
    expected = torch.from_numpy(by_hand(matrix))
    assert torch.equal(matrix.dequantize(), expected)
    assert torch.equal(matrix.dequantize(torch.bfloat16), expected.to(torch.bfloat16))
    assert torch.equal(matrix.dequantize(torch.float64), expected.to(torch.float64))


@pytest.mark.parametrize("form", QUANTIZED)
def test_a_matrix_of_many_blocks_equals_its_rows(form: Format) -> None:
    """Larger than what is dequantised at once."""
    matrix = random_matrix(form, (700, 3200))
    whole = matrix.dequantize()
    assert torch.equal(whole[690:], random_matrix(form, (700, 3200)).narrow(0, 690, 10).dequantize())
    which = torch.tensor([699, 0, 327, 0])
    assert torch.equal(matrix.rows(which).dequantize(), whole[which])
    assert matrix.rows(which[:0]).dequantize().shape == (0, 3200)


@pytest.mark.parametrize("form", QUANTIZED)
def test_bytes(form: Format) -> None:
    matrix = random_matrix(form, (4, 64))
    bits = {Format.Q8: 8, Format.Q5: 5, Format.Q6K: 6}.get(form, 4)
    numbers = [matrix.scales, *([] if matrix.mins is None else [matrix.mins])]
    assert form.bytes_of((4, 64)) == 256 * bits // 8 + sum(part.nbytes for part in numbers)
    assert matrix.num_elements == 256


def part(shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


@pytest.mark.parametrize(
    ("form", "shape", "codes", "scales", "mins"),
    [
        (Format.F32, (2, 32), part((2, 32), torch.int8), part((2, 1), torch.float16), None),
        (Format.Q8, (2, 33), part((2, 33), torch.int8), part((2, 1), torch.float16), None),
        (Format.Q8, (2, 32), part((2, 32), torch.uint8), part((2, 1), torch.float16), None),
        (Format.Q8, (2, 32), part((2, 32), torch.int8), part((2, 1), torch.float32), None),
        (Format.Q8, (2, 32), part((2, 32), torch.int8), part((2, 2), torch.float16), None),
        (Format.Q8, (2, 32), part((2, 32), torch.int8), part((2, 1), torch.float16), part((2, 1), torch.float16)),
        (Format.Q4, (2, 32), part((2, 16), torch.uint8), part((2, 1), torch.float16), None),
        (Format.Q4, (2, 32), part((2, 32), torch.uint8), part((2, 1), torch.float16), part((2, 1), torch.float16)),
        (Format.Q4K, (2, 32), part((2, 16), torch.uint8), part((2, 1), torch.float16), part((2, 1), torch.float16)),
        (Format.Q6K, (2, 24), part((2, 24), torch.int8), part((2, 1), torch.float32), None),
    ],
)
def test_parts_that_do_not_fit(form: Format, shape: tuple[int, int], codes: Tensor, scales: Tensor, mins: Tensor | None) -> None:
    with pytest.raises(InvariantBroken, match="must"):
        QuantizedTensor(form, shape, codes, scales, mins)


def test_same_values() -> None:
    one = random_matrix(Format.Q8, (4, 64))
    assert same_values(one, random_matrix(Format.Q8, (4, 64)))
    assert not same_values(one, random_matrix(Format.Q8, (4, 64), seed=1))
    assert same_values(one, one.dequantize()) and same_values(one.dequantize(), one)
    assert not same_values(one, one.dequantize() + 1)
    # The same numbers in another format.
    wide = QuantizedTensor(Format.Q6K, one.shape, one.codes, one.scales.to(torch.float32).repeat_interleave(2, 1))
    assert same_values(one, wide)


def test_columns_cannot_be_cut() -> None:
    with pytest.raises(InvariantBroken, match="along its rows"):
        random_matrix(Format.Q8, (4, 64)).narrow(1, 0, 32)
