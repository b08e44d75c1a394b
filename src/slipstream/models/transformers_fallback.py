"""Runs a dense decoder that has no file of its own here through `transformers`, over our pages.

    step's tokens [T] ─► embedding ─► layer: norm, projections, rope ─► attention ─► ... ─► norm ─► hidden [T, hidden]
                                       └──────── transformers ────────┘     │
                                                               AttentionStep: pages, tree mask, window, softcap

`transformers` lets a model's attention be any registered function; ours hands queries, keys and values to the pass's
`AttentionStep`. Everything else of the library's model sees one sequence of exactly the step's tokens, each with its own position
id, no mask and no cache. Nothing here knows an architecture. What one is like is found by running it once on two tokens and
looking at the calls, and a model whose logits differ from those of its own attention is refused. Imports `transformers` only
where a model is built.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.attention.base import AttentionStep
from slipstream.attention.kv import NUM_RESERVED_PAGES, KVCache, LayerKV
from slipstream.attention.layout import build_layout
from slipstream.attention.reference import ReferenceBackend
from slipstream.errors import ModelError, shown
from slipstream.models.config import LAYER_TYPES, CheckpointConfig
from slipstream.models.known import known_types
from slipstream.models.parameters import Parameters
from slipstream.observe import log
from slipstream.types import nothing

_logger = logging.getLogger(__name__)
_NAME = "slipstream"  # of our function among the library's attention implementations
# What attention functions are told that changes nothing here.
_HARMLESS = frozenset({"position_ids", "position_embeddings", "use_cache", "cache_position", "return_dict"})
_SINKS = frozenset({"s_aux", "sinks"})
# Largest difference to the model's own attention, as a share of the largest logit. Its softmax is float32's even in float64.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_HALF_TOLERANCE = 0.1


@dataclass(frozen=True, slots=True)
class _Call:
    """One layer's call of the attention function, as the first pass saw it."""

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    window: int | None


_step: ContextVar[AttentionStep] = ContextVar("step")
_calls: ContextVar[list[_Call] | None] = ContextVar("calls", default=None)


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    dropout: float = 0.0,
    **others: Any,
) -> tuple[Tensor, None]:
    """The attention function: [1, heads, T, dim] each -> [1, T, heads, value_dim], as the library wants it."""
    calls = _calls.get()
    if calls is not None:
        _refuse_others(attention_mask, is_causal, dropout, others)
        calls.append(_Call(module, query, key, value, sliding_window))
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3])), None
    scale = query.shape[3] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))
    return _step.get()(layer, query, key, value, scale, sliding_window, softcap)[None], None


def _refuse_others(attention_mask: Tensor | None, is_causal: bool | None, dropout: float, others: dict[str, Any]) -> None:
    if attention_mask is not None:
        raise ModelError("attention must be causal without a mask of the model's own, but the model made one")
    if is_causal is False:
        raise ModelError("attention must be causal, but the model asks for both directions")
    if dropout:
        raise ModelError(f"attention must drop nothing out, but got {dropout:g}")
    for name, value in others.items():
        if name in _SINKS and value is not None:
            raise ModelError(
                f"attention must have no learned sinks, but got {name}", hint="attention sinks are not supported yet"
            )
        if name not in _HARMLESS and value is not None and value is not False:
            raise ModelError(f"attention must need no more than queries, keys and values, but got {name} = {shown(value)}")


class _Given(nn.Module):
    """Stands where the decoder was: so the rest of the library's model makes logits of hidden states that are there already."""

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> Any:
        """[1, N, hidden] as it came."""
        from transformers.modeling_outputs import BaseModelOutputWithPastAndCrossAttentions

        return BaseModelOutputWithPastAndCrossAttentions(last_hidden_state=inputs_embeds)


class TransformersModel:
    """A model of the library's; satisfies `models.base.CausalLM`. `whole` is the model with its head."""

    def __init__(self, whole: Any, config: CheckpointConfig, dtype: torch.dtype) -> None:
        self._whole = whole
        self._decoder = whole.get_decoder()
        self.dtype = dtype
        self.context_len = config.context_len
        with _library_errors(config):
            calls, hidden, logits = self._first_pass()
        self.num_layers = len(calls)
        self.hidden_size: int = hidden.shape[-1]
        self.vocab_size: int = logits.shape[-1]
        self.kv_layers = tuple(
            LayerKV(call.key.shape[1], call.key.shape[3], call.value.shape[3], call.key.dtype) for call in calls
        )
        _check_layers(whole.config, config, calls)
        if self.vocab_size != config.vocab_size:
            raise ModelError(f"the head must have vocab_size ({config.vocab_size}) rows, but got {self.vocab_size}")
        self._tapped: dict[int, Tensor] = {}
        self._watch(calls)
        with _library_errors(config):
            wanted = self._own_logits()
        for name, module in list(whole.named_modules()):
            if module is self._decoder:
                whole.set_submodule(name, _Given())
        self._compare(wanted, config)

    def forward(
        self, tokens: Tensor, attention: AttentionStep, taps: tuple[int, ...] = (), computes: Callable[[], None] = nothing
    ) -> tuple[Tensor, Tensor | None]:
        """See `models.base.CausalLM.forward`."""
        computes()
        reset = _step.set(attention)
        try:
            positions = attention.layout.positions[None]
            hidden: Tensor = self._decoder(input_ids=tokens[None], position_ids=positions, use_cache=False).last_hidden_state
            states = torch.cat([self._tapped[layer][0] for layer in taps], -1) if taps else None
        finally:
            _step.reset(reset)
            self._tapped.clear()
        return hidden[0], states

    def logits(self, hidden: Tensor) -> Tensor:
        """[N, hidden] -> [N, vocab_size], whatever else the model does to them included."""
        logits: Tensor = self._whole(inputs_embeds=hidden[None], use_cache=False).logits
        return logits[0]

    def _first_pass(self) -> tuple[list[_Call], Tensor, Tensor]:
        calls: list[_Call] = []
        reset = _calls.set(calls)
        try:
            ids = torch.zeros((1, 2), dtype=torch.int64, device=self._whole.device)
            positions = torch.arange(2, device=ids.device)[None]
            hidden = self._decoder(input_ids=ids, position_ids=positions, use_cache=False).last_hidden_state
            logits = self._whole(input_ids=ids, position_ids=positions, use_cache=False).logits
        finally:
            _calls.reset(reset)
        return calls[: len(calls) // 2], hidden, logits

    def _watch(self, calls: list[_Call]) -> None:
        """Keep the residual entering each layer, and what leaves the last, for the taps of the pass."""
        layers = _layers_of(self._decoder, calls)

        def entering(layer: int) -> Any:
            def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                self._tapped[layer] = args[0] if args else kwargs["hidden_states"]

            return hook

        def leaving(_: nn.Module, args: tuple[Any, ...], output: Any) -> None:
            self._tapped[len(layers)] = output[0] if isinstance(output, tuple) else output

        for number, layer in enumerate(layers):
            layer.register_forward_pre_hook(entering(number), with_kwargs=True)
        layers[-1].register_forward_hook(leaving)

    def _probe_ids(self) -> Tensor:
        return torch.arange(1, 7, device=self._whole.device) * 7919 % self.vocab_size

    def _own_logits(self) -> Tensor:
        """Logits of a few tokens by the library's own attention."""
        self._whole.set_attn_implementation("eager")
        ids = self._probe_ids()[None]
        logits: Tensor = self._whole(input_ids=ids, use_cache=False).logits[0]
        self._whole.set_attn_implementation(_NAME)
        return logits

    def _compare(self, wanted: Tensor, config: CheckpointConfig) -> None:
        """The same tokens through pages: four as a prompt, two as a verify row. Raises `ModelError` where the logits differ."""
        ids, device = self._probe_ids(), self._whole.device
        kv = KVCache(self.kv_layers, len(ids) + NUM_RESERVED_PAGES, 1, device)
        got = []
        for base, count, num_chunks in ((0, 4, 1), (4, 2, 0)):
            layout = build_layout(
                page_tables=torch.arange(NUM_RESERVED_PAGES, len(ids) + NUM_RESERVED_PAGES, device=device)[None],
                page_size=1,
                base_lens=torch.tensor([base], device=device),
                limits=torch.tensor([len(ids)], device=device),
                query_lens=(count,),
                max_key_lens=(base + count,),
                num_chunks=num_chunks,
            )
            hidden, _ = self.forward(ids[base : base + count], ReferenceBackend().begin(layout, kv))
            got.append(self.logits(hidden))
        share = float((torch.cat(got) - wanted).abs().max() / wanted.abs().max().clamp(min=1e-6))
        if share > _TOLERANCE.get(self.dtype, _HALF_TOLERANCE):  # weights that overflow give NaN in both; the engine refuses that
            raise ModelError(
                f"{config.model_type} over pages must give the logits of its own attention, but they differ by {share:.2g}",
                hint="the architecture does something in its attention that transformers' attention interface does not say",
            )


def build(config: CheckpointConfig, parameters: Parameters) -> TransformersModel:
    """The model of `config`, filled. Raises `ModelError` for what the library does not have or this way cannot run."""
    whole = _empty_model(config, parameters.dtype)
    _fill(whole, parameters)
    whole.to(parameters.device)
    model = TransformersModel(whole.eval(), config, parameters.dtype)
    log.event(_logger, logging.INFO, "the model runs through transformers", architecture=config.model_type)
    return model


def _empty_model(config: CheckpointConfig, dtype: torch.dtype) -> Any:
    own = ", ".join(known_types())
    try:
        from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
        from transformers.initialization import no_init_weights
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise ModelError(
            f"model_type must be one of {own}, but got {shown(config.model_type)}",
            hint=f"pip install 'slipstream[transformers]' runs other dense decoders too ({error})",
        ) from None
    if config.model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"model_type must be one of {own}, or a decoder that transformers knows, but got {shown(config.model_type)}",
        )
    AttentionInterface.register(_NAME, _attend)
    with _library_errors(config), no_init_weights(), torch.inference_mode(False):
        settings = AutoConfig.for_model(**config.raw)
        whole = AutoModelForCausalLM.from_config(settings, attn_implementation="eager", dtype=dtype)
    if not whole._supports_attention_backend:
        raise ModelError(
            f"{config.model_type} must run its attention through transformers' attention interface, but it does not",
            hint="that leaves no place to read pages; such types are not supported yet",
        )
    whole.config.pad_token_id = None  # with one, some types look for padding among the values of every step
    whole.tie_weights()
    whole.set_attn_implementation(_NAME)
    return whole


@contextlib.contextmanager
def _library_errors(config: CheckpointConfig) -> Iterator[None]:
    try:
        yield
    except ModelError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever the library raises about a configuration
        said = str(error).partition("\n")[0][:200]
        raise ModelError(f"transformers must be able to run config.json as {config.model_type}, but got: {said}") from None


def _fill(whole: Any, parameters: Parameters) -> None:
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightRenaming, apply_renamings

    renamings = [one for one in get_model_conversion_mapping(whole) if isinstance(one, WeightRenaming)]
    stored = {apply_renamings(name, renamings): name for name in parameters.left}
    prefix = f"{whole.base_model_prefix}."

    def file_name(name: str) -> str:
        bare = name.removeprefix(prefix)  # some checkpoints are of the model without its head
        return stored.get(name) or stored.get(bare) or name

    first = {id(parameter): name for name, parameter in whole.named_parameters()}
    for name, parameter in list(whole.named_parameters(remove_duplicate=False)):
        shape, shared = tuple(parameter.shape), first[id(parameter)]
        if shared == name:
            parameter.data = parameters.take(file_name(name), shape)
            parameter.requires_grad_(False)
        elif file_name(name) in parameters and not torch.equal(parameters.take(file_name(name), shape), parameter):
            raise ModelError(f"{name} must equal {shared}, which it is tied to, but it differs")
    for name, buffer in whole.named_buffers():
        if file_name(name) in parameters:
            buffer.copy_(parameters.take(file_name(name), tuple(buffer.shape)))
    for pattern in whole._keys_to_ignore_on_load_unexpected or ():
        parameters.skip(re.compile(pattern))


def _check_layers(settings: Any, config: CheckpointConfig, calls: list[_Call]) -> None:
    count = settings.num_hidden_layers
    places: list[Any] = [call.module.layer_idx for call in calls]
    if places != list(range(count)):
        raise ModelError(
            f"each of {config.model_type}'s {count} layers must attend once, in order, but got {shown(places)}",
            hint="recurrent layers, linear attention and layers that share their keys are not supported yet",
        )
    for call in calls:
        if call.query.shape[1] % call.key.shape[1] or call.query.shape[2] != call.key.shape[2]:
            raise ModelError(f"queries must group over keys of the same tokens, but got {shown(tuple(call.key.shape))}")
    kinds = getattr(settings, "layer_types", None) or [None] * count
    window = getattr(settings, "sliding_window", None)
    for number, (call, kind) in enumerate(zip(calls, kinds, strict=True)):
        if kind not in (*LAYER_TYPES, None):
            raise ModelError(
                f"layers of {config.model_type} must be {' or '.join(LAYER_TYPES)}, but layer {number} is {shown(kind)}",
                hint="other layers are not supported yet",
            )
        windowed = window is not None if kind is None else kind == "sliding_attention"
        if windowed != (call.window is not None) and (window is None or window < config.context_len):
            raise ModelError(
                f"layer {number} of {config.model_type} must tell its attention the window it has, but it does not",
                hint=f"--max-model-len {window} makes the window irrelevant",
            )


def _layers_of(decoder: nn.Module, calls: list[_Call]) -> nn.ModuleList:
    for module in decoder.modules():
        if isinstance(module, nn.ModuleList) and len(module) == len(calls):
            inside = (set(map(id, layer.modules())) for layer in module)
            if all(id(call.module) in ids for call, ids in zip(calls, inside, strict=True)):
                return module
    raise ModelError("the decoder must keep its layers in one list, but there is none")
