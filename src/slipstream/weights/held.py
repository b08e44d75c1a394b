"""What a checkpoint's tensors will be held in once loaded, told from names, types and shapes. Imports no torch: `show` asks.

`models.parameters.Parameters.take_matrix` does it; a test holds the two together.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from slipstream.kernels.choice import why_not_kernels
from slipstream.weights.loaded import Numbers

# GGUF's name of a quantised type that is kept -> ours.
KEPT = {"Q8_0": "q8", "Q5_0": "q5", "Q4_0": "q4", "Q4_1": "q4", "Q4_K": "q4k", "Q6_K": "q6k"}
_TABLES = ("token_embd.weight", "output.weight", "model.embed_tokens.weight", "lm_head.weight")
_GROUP = 32  # of q8 and q4
# Of one element, scales and minimums included.
_BYTES = {
    "q8": 1 + 2 / 32,
    "q4": 1 / 2 + 4 / 32,
    "q4k": 1 / 2 + 8 / 32,
    "q5": 5 / 8 + 2 / 32,
    "q6k": 6 / 8 + 4 / 16,
    "float32": 4.0,
    "bfloat16": 2.0,
    "float16": 2.0,
    "float64": 8.0,
}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor of a checkpoint, by the file's own name and name of its type."""

    name: str
    stored: str
    shape: tuple[int, ...]

    @property
    def num_elements(self) -> int:
        """Numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True, slots=True)
class Held:
    """How a model will run.

    Attributes:
        dtype: what --dtype comes to.
        formats: how many parameters are held in what, the most common first.
        weight_bytes: what that takes.
        why_torch: why torch multiplies, and not our kernels; None: the kernels do.
    """

    dtype: str
    formats: dict[str, int]
    weight_bytes: int
    why_torch: str | None


def dtype_name(requested: str, stored: str | None, device: str) -> str:
    """What --dtype comes to: `requested`, or for `auto` what suits the kind of device and the checkpoint's own dtype."""
    if requested != "auto":
        return requested
    if device == "cpu":
        return "float32"
    # Weights made in bfloat16 overflow float16's range, so float16 is only picked where they are float16 themselves.
    return "float16" if stored == "float16" else "bfloat16"


def held(tensors: Iterable[StoredTensor], numbers: Numbers, dtype: str, device: str, *, is_ours: bool, build: bool) -> Held:
    """How a checkpoint of these tensors will run.

    Args:
        tensors: of the checkpoint.
        numbers: the user's settings.
        dtype, device: what --dtype comes to, and the kind of device.
        is_ours: the model is one of our decoders, and not one of transformers'.
        build: see `why_not_kernels`.
    """
    why = why_not_kernels(numbers.cpu_kernels, dtype, device, build=build)
    if not is_ours:
        why = why or "the model runs through transformers"
    wanted = numbers.quantization if is_ours and numbers.quantization in ("q8", "q4") else None
    keeps = why is None and numbers.quantization == "auto"
    formats: Counter[str] = Counter()
    for tensor in tensors:
        plain = dtype if why is not None or len(tensor.shape) == 2 else "float32"
        formats[_format(tensor, keeps, wanted, plain)] += tensor.num_elements
    num_bytes = sum(count * _BYTES[form] for form, count in formats.items())
    return Held(dtype, dict(formats.most_common()), round(num_bytes), why)


def _format(tensor: StoredTensor, keeps: bool, wanted: str | None, plain: str) -> str:
    if len(tensor.shape) != 2:
        return plain
    stored = KEPT.get(tensor.stored)
    if wanted == "q4" and tensor.name in _TABLES:
        wanted = "q8"
    if stored is not None and (keeps or stored == wanted or (wanted == "q4" and stored == "q4k")):
        return stored
    return wanted if wanted is not None and not tensor.shape[1] % _GROUP else plain
