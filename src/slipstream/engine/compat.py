"""What runs with what: the one table of refusals. A parameter, or a pair of features, that does not run is refused at the door.

Each row looks at one thing and says why it refuses; tests enumerate the rows. Nothing is silently ignored, approximated or
switched off. What nobody has run is refused unless `--allow-untested` is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from slipstream.attention.registry import backend_names
from slipstream.config import EngineConfig
from slipstream.errors import ConfigError, InvalidParameter, SlipstreamError, Unsupported
from slipstream.sampling.grammar import grammar_kinds
from slipstream.speculate.choice import OFF
from slipstream.speculate.registry import check_spec, parse_spec
from slipstream.types import EngineRequest


@dataclass(frozen=True, slots=True)
class RequestRow:
    """A refusal of a request: returns the error where the row applies, given the request and the vocabulary size."""

    name: str
    refuse: Callable[[EngineRequest, int], SlipstreamError | None]


@dataclass(frozen=True, slots=True)
class StartupRow:
    """A refusal at start-up: returns the error where the row applies."""

    name: str
    refuse: Callable[[EngineConfig], SlipstreamError | None]


def _ids_in_vocabulary(field: str, ids: Callable[[EngineRequest], Iterable[int]]) -> RequestRow:
    def refuse(request: EngineRequest, vocab_size: int) -> SlipstreamError | None:
        for token in ids(request):
            if not 0 <= token < vocab_size:
                return InvalidParameter(field, f"hold token ids from 0 to {vocab_size - 1}", token)
        return None

    return RequestRow(f"{field} outside the vocabulary", refuse)


def _known_grammar(request: EngineRequest, vocab_size: int) -> SlipstreamError | None:
    if request.grammar is None or request.grammar[0] in grammar_kinds():
        return None
    kinds = list(grammar_kinds())
    return Unsupported(f"a grammar's kind must be one of {kinds}, but got {request.grammar[0]!r}", param="grammar")


REQUEST_ROWS: tuple[RequestRow, ...] = (
    _ids_in_vocabulary("prompt", lambda request: request.prompt_token_ids),
    _ids_in_vocabulary("logit_bias", lambda request: request.params.logit_bias),
    _ids_in_vocabulary("stop_token_ids", lambda request: request.params.stop_token_ids),
    _ids_in_vocabulary("allowed_token_ids", lambda request: request.params.allowed_token_ids or ()),
    _ids_in_vocabulary("bad_words", lambda request: (token for word in request.bad_word_ids for token in word)),
    RequestRow("unknown grammar kind", _known_grammar),
)


def _cuda_is_untested(config: EngineConfig) -> SlipstreamError | None:
    if config.device != "cuda" or config.allow_untested:
        return None
    return ConfigError(
        "--device must be cpu or auto, but got 'cuda', which nobody has run yet", hint="--allow-untested runs it all the same"
    )


def _each_drafter_once(config: EngineConfig) -> SlipstreamError | None:
    names = [parse_spec(spec)[0] for spec in config.speculate]
    if len(set(names)) == len(names):
        return None
    return ConfigError(f"--speculate must name each drafter once, but got {list(config.speculate)}", hint="leave one out")


def _off_stands_alone(config: EngineConfig) -> SlipstreamError | None:
    if len(config.speculate) <= 1 or OFF not in (parse_spec(spec)[0] for spec in config.speculate):
        return None
    given = list(config.speculate)
    return ConfigError(f"--speculate off must stand alone, but got {given}", hint="leave it out, or all the others")


def _several_drafters_are_chosen_from(config: EngineConfig) -> SlipstreamError | None:
    if len(config.speculate) <= 1 or config.adaptive_speculation:
        return None
    return ConfigError(
        f"--speculate must name one drafter where --no-adaptive-speculation is given, but got {list(config.speculate)}",
        hint="which of them drafts is chosen by what each brings and costs",
    )


def _known_drafters(config: EngineConfig) -> SlipstreamError | None:
    try:
        for spec in config.speculate:
            check_spec(spec)
    except ConfigError as error:
        return error
    return None


def _known_backend(config: EngineConfig) -> SlipstreamError | None:
    names = ("auto", *backend_names())
    if config.attention_backend in names:
        return None
    return ConfigError(
        f"--attention-backend must be one of {', '.join(names)}, but got {config.attention_backend!r}",
        hint="auto takes what suits the device",
    )


def _a_prompt_token_a_step(config: EngineConfig) -> SlipstreamError | None:
    if config.max_num_batched_tokens >= 2:
        return None
    return ConfigError(
        f"--max-num-batched-tokens must be at least 2, but got {config.max_num_batched_tokens}",
        hint="prompts and decoding share a step; each needs at least one token of it",
    )


def _quantised_on_the_cpu_alone(config: EngineConfig) -> SlipstreamError | None:
    if config.device != "cuda" or config.quantization not in ("q8", "q4"):
        return None
    return ConfigError(
        f"--quantization must be auto or none on cuda, but got {config.quantization!r}",
        hint="kernels for quantised weights are there for the CPU alone",
    )


def _exact_kernels_in_their_dtypes(config: EngineConfig) -> SlipstreamError | None:
    if config.cpu_kernels != "exact" or (config.device != "cuda" and config.dtype in ("auto", "float32", "bfloat16")):
        return None
    return ConfigError(
        "--cpu-kernels exact must have the CPU, and weights in float32 or bfloat16, but got "
        f"--device {config.device} and --dtype {config.dtype}",
        hint="--cpu-kernels off lets torch multiply, in any type",
    )


STARTUP_ROWS: tuple[StartupRow, ...] = (
    StartupRow("cuda is untested", _cuda_is_untested),
    StartupRow("unknown drafter or option", _known_drafters),
    StartupRow("a drafter given twice", _each_drafter_once),
    StartupRow("off beside other drafters", _off_stands_alone),
    StartupRow("several drafters without the cost model", _several_drafters_are_chosen_from),
    StartupRow("unknown attention backend", _known_backend),
    StartupRow("too few tokens a step", _a_prompt_token_a_step),
    StartupRow("quantised weights on cuda", _quantised_on_the_cpu_alone),
    StartupRow("exact kernels where none compute", _exact_kernels_in_their_dtypes),
)


def check_request(request: EngineRequest, vocab_size: int) -> None:
    """Raise the first refusal that applies to a request."""
    for row in REQUEST_ROWS:
        if error := row.refuse(request, vocab_size):
            raise error


def check_startup(config: EngineConfig) -> None:
    """Raise the first refusal that applies to a configuration."""
    for row in STARTUP_ROWS:
        if error := row.refuse(config):
            raise error
