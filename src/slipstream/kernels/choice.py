"""Whether our kernels multiply here: the one place that asks, for who loads a model and for who describes one."""

from __future__ import annotations

import os

from slipstream.kernels.cpu.build import NEEDED_CPU_FLAGS, cpu_flags, find_compiler
from slipstream.kernels.cpu.library import ISA_VARIABLE, kernels

# Weights that are not quantised are in one of these; hidden states are float32 whichever it is.
KERNEL_DTYPES = ("float32", "bfloat16")


def why_not_kernels(setting: str, dtype: str, device: str, *, build: bool = True) -> str | None:
    """Why torch multiplies and not our kernels; None: the kernels do.

    Args:
        setting: of --cpu-kernels: auto, exact or off.
        dtype: what --dtype comes to.
        device: kind of the device that the model is on.
        build: build them where nothing else stands against them, which takes seconds where it has not been done before. Without,
            it is only looked whether that should be possible.
    """
    if setting == "off":
        return "--cpu-kernels is off"
    if device != "cpu":
        return f"the model is on {device}"
    if dtype not in KERNEL_DTYPES:
        return f"they do not compute in {dtype}"
    if os.environ.get(ISA_VARIABLE) == "none":
        return f"{ISA_VARIABLE} is none"
    if missing := NEEDED_CPU_FLAGS - cpu_flags():
        return f"the CPU has no {', '.join(sorted(missing))}"
    if find_compiler() is None:
        return "there is no C++ compiler"
    return "they could not be built" if build and kernels() is None else None
