"""Whether our kernels multiply here: the one place that looks for the CPU's, so that nothing else imports what may not be there."""

from __future__ import annotations

import torch

# Of weights: in these the CPU's kernels compute. Hidden states are float32 with them.
KERNEL_DTYPES = (torch.float32, torch.bfloat16)


def why_not_kernels(setting: str, dtype: torch.dtype, device: torch.device) -> str | None:
    """Why torch multiplies and not our kernels; None: the kernels do.

    Builds the kernels if nothing else stands against them, which takes seconds where it has not been done before.

    Args:
        setting: of --cpu-kernels: auto, exact or off.
        dtype: what --dtype comes to.
        device: where the model is.
    """
    if setting == "off":
        return "--cpu-kernels is off"
    if device.type != "cpu":
        return f"the model is on {device.type}"
    if dtype not in KERNEL_DTYPES:
        return f"they do not compute in {str(dtype).removeprefix('torch.')}"
    return "this build has none"
