"""Loads a model: opens the checkpoint, builds the model type's decoder and fills every parameter."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import MappingProxyType

import torch

from slipstream.errors import ConfigError, ModelError, shown
from slipstream.kernels.torch_threads import torch_threads
from slipstream.layers.linear import Arithmetic
from slipstream.models.config import ModelConfig
from slipstream.models.parameters import Holding, Parameters, TensorSource
from slipstream.models.registry import find_type
from slipstream.weights.gguf_tensors import GgufTensors
from slipstream.weights.held import dtype_name
from slipstream.weights.holding import DTYPES, choose_holding
from slipstream.weights.loaded import LoadedModel, Numbers
from slipstream.weights.safetensors_files import SafetensorsFolder
from slipstream.weights.source import resolve
from slipstream.weights.text_side import open_checkpoint


def pick_dtype(requested: str, stored: str | None, device: torch.device) -> torch.dtype:
    """The dtype to compute in: `requested`, or for `auto` what suits the device.

    Args:
        requested: auto or one of `DTYPES`.
        stored: the checkpoint's own dtype name, if it says.
        device: where the model runs.
    """
    if requested not in ("auto", *DTYPES):
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}, but got {shown(requested)}")
    return DTYPES[dtype_name(requested, stored, device.type)]


@torch.inference_mode()
def load(
    source: str,
    *,
    dtype: str = "auto",
    quantization: str = "auto",
    cpu_kernels: str = "off",
    kv_cache_dtype: str = "auto",
    device: str | torch.device = "cpu",
    max_context: int | None = None,
    on_progress: Callable[[str, float], None] | None = None,
) -> LoadedModel:
    """Load `source`: an alias, a hub id, a folder of safetensors or a .gguf file.

    Args:
        source: see `source.resolve`.
        dtype, quantization, cpu_kernels, kv_cache_dtype: see `holding.Numbers`.
        device: where the weights go.
        max_context: most positions to serve; None takes the model's own limit.
        on_progress: called with (phase, 0 to 1); phases are "fetching" and "reading weights".

    Raises:
        ModelError: naming the file, tensor or setting that is missing, damaged, left over or not supported.
    """
    where = torch.device(device)
    checkpoint = open_checkpoint(resolve(source, on_progress), max_context)
    config = checkpoint.config
    chosen = pick_dtype(dtype, config.dtype, where)
    holding = choose_holding(Numbers(dtype, quantization, cpu_kernels, kv_cache_dtype), chosen, where)
    report = None if on_progress is None else lambda share: on_progress("reading weights", share)
    if isinstance(config, ModelConfig):
        model_type = find_type(config.model_type, checkpoint.source.path.name)
        tensors: TensorSource = (
            SafetensorsFolder(checkpoint.source.path)
            if checkpoint.gguf is None
            else GgufTensors(checkpoint.gguf, config, model_type)
        )
        parameters = Parameters(tensors, holding, where, report)
        # Packing is thousands of short operators; beside another busy process two threads took ten times as long.
        with torch_threads(1) if holding.arithmetic is not Arithmetic.TORCH else nullcontext():
            model = model_type.build(config, parameters)
    else:
        from slipstream.models import transformers_fallback

        if holding.quantized is not None:
            raise ModelError(
                f"--quantization must be auto or none for a model that runs through transformers, but got {quantization}",
                hint="the library multiplies plain matrices",
            )
        if kv_cache_dtype != "auto":
            raise ModelError(
                f"--kv-cache-dtype must be auto for a model that runs through transformers, but got {kv_cache_dtype}",
                hint="keys and values are kept as the library makes them",
            )
        holding = Holding.plain(chosen)
        parameters = Parameters(SafetensorsFolder(checkpoint.source.path), holding, where, report)
        model = transformers_fallback.build(config, parameters)
    parameters.finish()
    return LoadedModel(
        model=model,
        text=checkpoint.text,
        num_parameters=parameters.num_parameters,
        dtype=chosen,
        weight_bytes=parameters.num_bytes,
        formats=MappingProxyType(dict(parameters.formats.most_common())),
        arithmetic=holding.arithmetic,
    )
