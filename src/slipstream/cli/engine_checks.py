"""What `doctor` says of the engine: device, dtype, attention, threads, weights, sameness and the model. It asks those who decide
when a model is served. Imports torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from slipstream.cli.checks import Check
from slipstream.cli.table import size_text
from slipstream.config import EngineConfig, env_name, flag_name
from slipstream.errors import SlipstreamError

if TYPE_CHECKING:
    from slipstream.weights.held import Held
    from slipstream.weights.text_side import Checkpoint


def engine_checks(config: EngineConfig) -> list[Check]:
    """All of them, in the order they are shown."""
    try:
        import torch

        from slipstream.attention.kv import LayerKV
        from slipstream.attention.registry import backend_for
        from slipstream.engine.build import pick_device
        from slipstream.engine.compat import check_startup
        from slipstream.models.config import ModelConfig
        from slipstream.weights.loading import pick_dtype
    except ImportError as error:
        return [Check("engine", "fail", f"the engine must be importable, but got: {error}", "pip install . puts torch in")]
    checks: list[Check] = []
    try:
        check_startup(config)
    except SlipstreamError as error:
        checks.append(Check("engine", "fail", error.message, error.hint))
    model, checkpoint = check_model(config)
    device = pick_device(config.device)
    facts = {"device": str(device)}
    if device.type == "cuda" and not torch.cuda.is_available():
        checks.append(Check("device", "fail", "cuda: torch finds none", "--device cpu, or a CUDA build of torch", facts))
        return [*checks, model]
    has_cuda = (
        "torch finds CUDA, which is taken only where it is asked for" if torch.cuda.is_available() else "torch finds no CUDA"
    )
    checks.append(Check("device", "ok", f"{device}: {_why(config, 'device', has_cuda)}", facts=facts))

    stored = checkpoint.config.dtype if checkpoint else None
    dtype = str(pick_dtype(config.dtype, stored, device)).removeprefix("torch.")
    why = _why(config, "dtype", "what the device runs well" + (f"; the weights come in {stored}" if stored else ""))
    checks.append(Check("dtype", "ok", f"{dtype}: {why}", facts={"dtype": dtype}))
    kv_dtype = getattr(torch, dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype)
    layers: tuple[LayerKV, ...] = ()
    if checkpoint is not None and isinstance(checkpoint.config, ModelConfig):
        heads, dim = checkpoint.config.num_kv_heads, checkpoint.config.head_dim
        layers = (LayerKV(heads, dim, dim, kv_dtype),)
    backend = None
    try:
        found = backend_for(config.attention_backend, layers, device.type, config.cpu_kernels)
        backend = type(found).__module__.rpartition(".")[2]
        why = _why(config, "attention_backend", "what auto means here")
        checks.append(Check("attention", "ok", f"{backend}: {why}", facts={"attention_backend": backend}))
    except SlipstreamError as error:
        checks.append(Check("attention", "fail", error.message, error.hint))
    threads = config.num_threads or torch.get_num_threads()
    why = _why(config, "num_threads", "one a core, as torch counts them")
    checks.append(Check("threads", "ok", f"{threads}: {why}", facts={"num_threads": threads}))
    weights, runs = check_weights(config, checkpoint, dtype, device.type)
    checks += [weights, same_tokens(dtype, is_bitwise=weights.facts.get("cpu_kernels", False) and backend == "cpu"), model]
    if checkpoint is not None and runs is not None:
        checks.append(check_needs(checkpoint, runs, kv_dtype.itemsize))
    return checks


def check_weights(config: EngineConfig, checkpoint: Checkpoint | None, dtype: str, device: str) -> tuple[Check, Held | None]:
    """What matrices are held in, and what multiplies them. Builds the CPU kernels where they may run."""
    from slipstream.cli.show import how_it_runs, shares
    from slipstream.kernels.choice import why_not_kernels

    try:
        runs = None if checkpoint is None else how_it_runs(checkpoint, config, build=True)
    except SlipstreamError as error:
        return Check("weights", "fail", error.message, error.hint), None
    why = why_not_kernels(config.cpu_kernels, dtype, device) if runs is None else runs.why_torch
    form = "as their file holds them" if config.quantization == "auto" and why is None else config.quantization
    held = form if runs is None else shares(runs.formats)
    if why is not None:
        text = f"{dtype if runs is None else held}, multiplied by torch: {why}"
    elif config.cpu_kernels == "exact":
        text = f"{held}, multiplied by our CPU kernels in float32"
    else:
        text = f"{held}, multiplied by our CPU kernels"
    facts = {"held_as": {} if runs is None else runs.formats, "cpu_kernels": why is None, "why_torch": why}
    return Check("weights", "ok", text, facts=facts), runs


def same_tokens(dtype: str, *, is_bitwise: bool = False) -> Check:
    """How far the promise of the same tokens reaches in this dtype, or where products and attention are our kernels'."""
    promise = "the same seed gives the same tokens at any batch size, lag and chunk size, with any drafter"
    if dtype == "float64":
        return Check("same tokens", "ok", f"{promise}, as the tests compare them", facts={"same_tokens": "always"})
    if is_bitwise:
        text = f"{promise}: our kernels give a row the same bits whatever shares its step"
        return Check("same tokens", "ok", text, facts={"same_tokens": "always"})
    text = (
        f"{promise}, but for near ties: in {dtype} torch's matrix products round differently for different numbers of rows, so a "
        "token may differ where the two best scores nearly tie"
    )
    return Check(
        "same tokens", "info", text, "--dtype float64 has no such ties, and is slow", {"same_tokens": "but for near ties"}
    )


def check_model(config: EngineConfig) -> tuple[Check, Checkpoint | None]:
    """Whether the model is here and can be understood; its weights are not touched."""
    from slipstream.weights.source import locate
    from slipstream.weights.text_side import open_checkpoint

    name = config.model
    try:
        source = locate(name)
        if source is None:
            hint = f"slipstream pull {name}; otherwise the first start fetches it"
            return Check("model", "info", f"{name} has not been fetched yet", hint, {"model": name, "is_here": False}), None
        checkpoint = open_checkpoint(source, config.max_model_len)
    except SlipstreamError as error:
        return Check("model", "fail", error.message, error.hint, {"model": name}), None
    text = f"{name}: {checkpoint.text.architecture}, context {checkpoint.text.context_len}, at {source.path}"
    return Check("model", "ok", text, facts={"model": name, "is_here": True, "path": str(source.path)}), checkpoint


def check_needs(checkpoint: Checkpoint, runs: Held, kv_itemsize: int) -> Check:
    """Whether weights and one full context fit the memory that is free."""
    import psutil

    from slipstream.cli.show import describe, shares

    weights = runs.weight_bytes
    # describe() has float32's bytes: four a number.
    context = describe(checkpoint)["memory_bytes"]["float32"].get("kv_full_context", 0) * kv_itemsize // 4
    free = psutil.virtual_memory().available
    need = f"{size_text(weights)} of weights in {shares(runs.formats)} and {size_text(context)} of KV cache for a full context"
    text = f"{need}; {size_text(free)} free"
    needs = {"weight_bytes": weights, "kv_full_context_bytes": context}
    if weights > free:
        return Check("model memory", "fail", text, "a smaller model, --dtype bfloat16 or --quantization q8", needs)
    if weights + context > free:
        return Check("model memory", "warn", text, "--max-model-len makes the context shorter", needs)
    return Check("model memory", "ok", text, facts=needs)


def _why(config: EngineConfig, name: str, otherwise: str) -> str:
    if getattr(config, name) == EngineConfig.model_fields[name].default:
        return otherwise
    return f"as {flag_name(name)} or {env_name(name)} says, or the config file"
