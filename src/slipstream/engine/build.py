"""Puts an engine together: from a configuration, or, for tests and tools, from a model that is already there."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

import torch

from slipstream.attention.base import AttentionBackend
from slipstream.attention.kv import NUM_RESERVED_PAGES, KVCache, LayerKV
from slipstream.attention.registry import backend_for
from slipstream.cache.ledger import Ledger
from slipstream.cache.pages import pages_for
from slipstream.cache.pool import ReuseOrder
from slipstream.config import EngineConfig
from slipstream.engine.compat import check_startup
from slipstream.engine.executor import Device, Executor, ThreadExecutor
from slipstream.engine.loop import Engine
from slipstream.engine.memory import memory_of, plan_memory
from slipstream.engine.policy import Policy
from slipstream.engine.runner import Runner
from slipstream.engine.scheduler import Scheduler
from slipstream.engine.settle import StopTextFactory
from slipstream.errors import ConfigError
from slipstream.kernels.cpu.library import kernels
from slipstream.models.base import CausalLM
from slipstream.observe import log
from slipstream.speculate.accept import RULES
from slipstream.speculate.base import Drafter
from slipstream.speculate.choice import OFF, Chooser, Shape, Widest
from slipstream.speculate.off import Off
from slipstream.speculate.registry import Target, build_drafters
from slipstream.speculate.width import WidthModel
from slipstream.text.detokenize import StopScanner
from slipstream.text.tokenizer import Tokenizer
from slipstream.weights import load
from slipstream.weights.loaded import LoadedModel, Numbers

# Of the memory that is free once the weights are there, this share may become KV; the rest is activations and everybody else's.
KV_MEMORY_SHARE = 0.4
MAX_KERNEL_THREADS = 64

logger = logging.getLogger("slipstream.engine")


def shape_of(drafter: Drafter) -> Shape:
    """What the host must know of a drafter."""
    return Shape(
        depth=drafter.depth,
        num_nodes=drafter.num_nodes,
        max_writes=drafter.max_writes,
        kv_behind=drafter.kv_behind,
        has_kv=bool(drafter.kv_layers),
        relays=bool(drafter.relay.fields),
        catches_up=drafter.catches_up,
    )


def default_chooser(shapes: Mapping[str, Shape], config: EngineConfig) -> Chooser:
    """The cost model, or, without one, the first drafter as far as it may."""
    can_draft = any(shape.num_nodes for shape in shapes.values())
    return WidthModel(shapes) if config.adaptive_speculation and can_draft else Widest(shapes, next(iter(shapes)))


def build_engine(config: EngineConfig, on_progress: Callable[[str, float], None] | None = None) -> tuple[Engine, LoadedModel]:
    """Load the configured model and build an engine around it; `on_progress(phase, fraction)` is told how far it is."""
    check_startup(config)
    loaded = load_configured(config, on_progress)
    if on_progress is not None:
        on_progress("building engine", 0.0)
    return engine_around(loaded, config), loaded


def load_configured(config: EngineConfig, on_progress: Callable[[str, float], None] | None = None) -> LoadedModel:
    """Load the configured model to the configured device, and share the cores out."""
    device = pick_device(config.device)
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    loaded = load(
        config.model,
        dtype=config.dtype,
        quantization=config.quantization,
        cpu_kernels=config.cpu_kernels,
        kv_cache_dtype=config.kv_cache_dtype,
        device=device,
        max_context=config.max_model_len,
        on_progress=on_progress,
    )
    if loaded.arithmetic != "torch" and (library := kernels()) is not None:
        torch.set_num_threads(1)  # see kernels/torch_threads.py: with more, a step of one row takes a fifth longer
        if config.num_threads is not None:
            library.set_threads(min(config.num_threads, MAX_KERNEL_THREADS))
    return loaded


def forward_threads(loaded: LoadedModel) -> int:
    """Threads that a forward pass of the model shares its work between."""
    library = kernels() if loaded.arithmetic != "torch" else None
    return torch.get_num_threads() if library is None else library.threads


def engine_around(loaded: LoadedModel, config: EngineConfig) -> Engine:
    """The configured engine around a model that `load_configured` loaded; several may follow each other around one."""
    return assemble_engine(
        loaded.model,
        config.model_copy(update={"speculate": config.drafters}),
        eos_token_ids=loaded.eos_token_ids,
        stop_text=lambda request: StopScanner(loaded.tokenizer, request.params),
        context_len=loaded.context_len,
        device=pick_device(config.device),
        num_parameters=loaded.num_parameters,
        weight_bytes=loaded.weight_bytes,
        formats=loaded.formats,
        tokenizer=loaded.tokenizer,
    )


def assemble_engine(
    model: CausalLM,
    config: EngineConfig,
    *,
    eos_token_ids: tuple[int, ...],
    stop_text: StopTextFactory,
    context_len: int | None = None,
    device: torch.device | None = None,
    attention: AttentionBackend | None = None,
    drafters: Mapping[str, Callable[[Target], Drafter]] | None = None,
    executor: Callable[[Device], Executor] = ThreadExecutor,
    order: ReuseOrder = "newest",
    num_parameters: int = 0,
    weight_bytes: int | None = None,
    formats: Iterable[str] = (),
    tokenizer: Tokenizer | None = None,
    chooser: Callable[[Mapping[str, Shape], EngineConfig], Chooser] = default_chooser,
) -> Engine:
    """Build an engine around a model.

    Args:
        model: the target.
        config: everything the engine reads of it; `model` and the server's fields are not looked at, and what it says of numbers
            is for models that drafters load.
        eos_token_ids: ids that end an answer.
        stop_text: makes the stop string finder of a request.
        context_len: most tokens of a request; None: the model's, cut to --max-model-len.
        device: where the model is; None is the CPU.
        attention: a backend; None: the configured one.
        drafters: drafters built by the caller. None: the configured ones.
        executor: where steps run.
        order: which free slot or page is reused first.
        num_parameters, weight_bytes, formats: of the model, for the memory table.
        tokenizer: of the model, for drafters; None: not known.
        chooser: makes what chooses drafters and widths.

    Raises `ConfigError` where what is allocated here, or a full step, cannot fit; logs the memory table otherwise.
    """
    device = device or torch.device("cpu")
    context_len = context_len or min(model.context_len, config.max_model_len or model.context_len)
    attention = attention or backend_for(config.attention_backend, model.kv_layers, device.type, config.cpu_kernels)
    accept = RULES[config.accept]()
    # A draft model is held as the target is; `auto` must not come to another dtype for it.
    dtype = str(model.dtype).removeprefix("torch.") if config.dtype == "auto" else config.dtype
    numbers = Numbers(dtype, config.quantization, config.cpu_kernels, config.kv_cache_dtype)
    target = Target(model, config.page_size, device, attention, tokenizer, accept, numbers)
    if drafters is None:
        built = build_drafters(config.speculate, target)
    else:
        built = {name: make(target) for name, make in drafters.items()}
    built.setdefault(OFF, Off())
    for drafter in built.values():
        attention.check(drafter.kv_layers)
    num_pages = pick_num_pages(model, config, context_len, built.values())
    all_pages = num_pages + NUM_RESERVED_PAGES
    num_host_pages = pick_num_host_pages(model, config, built.values())
    memory = plan_memory(
        model,
        config,
        context_len=context_len,
        num_pages=num_pages,
        num_host_pages=num_host_pages,
        num_parameters=num_parameters,
        weight_bytes=weight_bytes,
        formats=formats,
        drafters=built.values(),
        memory=memory_of(device),
    )
    memory.check()
    log.table(logger, logging.INFO, "memory", memory.text, memory.fields)
    kv = KVCache(model.kv_layers, all_pages, config.page_size, device, poison=config.debug)
    for drafter in built.values():
        if drafter.kv_layers:
            drafter.kv = KVCache(drafter.kv_layers, all_pages, config.page_size, device, poison=config.debug)

    def on_host(layers: tuple[LayerKV, ...]) -> KVCache | None:
        return KVCache(layers, num_host_pages, config.page_size, torch.device("cpu")) if num_host_pages else None

    runner = Runner(
        model=model,
        attention=attention,
        drafters=built,
        kv=kv,
        paged=[(kv, on_host(model.kv_layers)), *((d.kv, on_host(d.kv_layers)) for d in built.values() if d.kv is not None)],
        num_slots=config.max_num_seqs,
        context_len=context_len,
        num_known_ids=target.num_known_ids,
        eos_token_ids=eos_token_ids,
        device=device,
        logprobs_mode=config.logprobs_mode,
        accept=accept,
        debug=config.debug,
    )
    shapes = {name: shape_of(drafter) for name, drafter in built.items()}
    scheduler = Scheduler(
        Ledger(
            config.max_num_seqs,
            num_pages,
            config.page_size,
            NUM_RESERVED_PAGES,
            order,
            caching=config.enable_prefix_caching,
            num_host_pages=num_host_pages,
            shifted_kv=any(drafter.shifted_kv for drafter in built.values()),
        ),
        shapes,
        chooser(shapes, config),
        config.max_num_batched_tokens,
        Policy(config.scheduling_policy, config.admission_headroom_tokens),
    )
    return Engine(
        scheduler=scheduler,
        executor=executor(runner),
        lag=config.lag,
        context_len=context_len,
        vocab_size=model.vocab_size,
        eos_token_ids=eos_token_ids,
        stop_text=stop_text,
        debug=config.debug,
    )


def pick_device(name: str) -> torch.device:
    """`auto` is the CPU for now."""
    return torch.device("cpu" if name == "auto" else name)


def pick_num_pages(model: CausalLM, config: EngineConfig, context_len: int, drafters: Iterable[Drafter] = ()) -> int:
    """Pages requests may hold: as configured, else what --max-num-seqs full contexts need, as far as memory goes.

    A page counts with what the drafters' own KV stores in it.
    """
    page_bytes = _page_bytes(model, config, drafters)
    if config.num_pages is not None:
        pages = config.num_pages
    elif config.kv_cache_memory_bytes is not None:
        pages = config.kv_cache_memory_bytes // page_bytes
    else:
        wanted = config.max_num_seqs * pages_for(context_len, config.page_size)
        pages = min(wanted, int(available_memory_bytes() * KV_MEMORY_SHARE) // page_bytes)
    if pages < 1:
        raise ConfigError(
            f"the KV pool must hold at least one page of {page_bytes} bytes, but got {pages} pages",
            hint="raise --kv-cache-memory-bytes or --num-pages",
        )
    return pages


def pick_num_host_pages(model: CausalLM, config: EngineConfig, drafters: Iterable[Drafter] = ()) -> int:
    """Pages of host memory that the prefix cache may use besides. Raises `ConfigError` where there is not so much."""
    wanted, free = config.kv_offload_memory_bytes, available_memory_bytes()
    if wanted > free:
        raise ConfigError(
            f"--kv-offload-memory-bytes must be at most the {free} bytes that are free, but got {wanted}", hint="give it less"
        )
    return wanted // _page_bytes(model, config, drafters)


def _page_bytes(model: CausalLM, config: EngineConfig, drafters: Iterable[Drafter]) -> int:
    layers = [*model.kv_layers, *(layer for drafter in drafters for layer in drafter.kv_layers)]
    return config.page_size * sum(layer.bytes_per_token for layer in layers)


def available_memory_bytes() -> int:
    """Memory the system would give us now."""
    return memory_of(torch.device("cpu")).free_bytes
