"""In what a model's matrices are held, and what multiplies them: by what the user says, what the file holds and what runs here.

                         CPU kernels                                torch: no kernels here, `off`, float16, float64, cuda
    --quantization auto  quantised matrices of a file as they are,  everything dequantised to --dtype
                         others in --dtype
                   none  everything in --dtype                      everything in --dtype
                 q8, q4  matrices in 8 or 4 bits                    the same values, dequantised to --dtype: for comparing
"""

from __future__ import annotations

import logging

import torch

from slipstream.kernels.choice import why_not_kernels
from slipstream.kernels.formats import Format
from slipstream.layers.linear import Arithmetic
from slipstream.models.parameters import Holding
from slipstream.observe import log
from slipstream.weights.loaded import Numbers
from slipstream.weights.quantize import quantize

logger = logging.getLogger("slipstream.weights")

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
_KV_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "int8": torch.int8}
_WITH_KERNELS = {"auto": Arithmetic.KERNELS, "exact": Arithmetic.EXACT}
_QUANTIZED = {"q8": Format.Q8, "q4": Format.Q4}


def choose_holding(numbers: Numbers, dtype: torch.dtype, device: torch.device) -> Holding:
    """The holding of a model that computes in `dtype` (what --dtype comes to) on `device`."""
    why = why_not_kernels(numbers.cpu_kernels, str(dtype).removeprefix("torch."), device.type)
    uses_kernels = why is None
    quantized = _QUANTIZED.get(numbers.quantization)
    if not uses_kernels and quantized is not None:
        log.event(logger, logging.WARNING, "quantised weights are dequantised, and take no less memory", reason=why)
    elif not uses_kernels and numbers.cpu_kernels != "off":
        level = logging.WARNING if numbers.cpu_kernels == "exact" else logging.INFO
        log.event(logger, level, "torch multiplies, not the CPU kernels", reason=why)
    return Holding(
        dtype=torch.float32 if uses_kernels else dtype,
        matrix_dtype=dtype,
        kv_dtype=_KV_DTYPES.get(numbers.kv_cache_dtype, dtype),
        arithmetic=_WITH_KERNELS[numbers.cpu_kernels] if uses_kernels else Arithmetic.TORCH,
        keeps_stored=uses_kernels and numbers.quantization == "auto",
        quantized=quantized,
        quantize=quantize,
    )
