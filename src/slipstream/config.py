"""Every setting, once. Flags, SLIPSTREAM_* variables, the config file's keys and docs/configuration.md all come from here.

    flags  >  SLIPSTREAM_* variables  >  config file  >  defaults          (joined in config_sources.py)

`EngineConfig(...)` itself reads neither environment nor file. A leaf: no torch, and not the settings library, so that
`slipstream serve --help` stays quick.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from slipstream.errors import ConfigError, shown

DEFAULT_MODEL = "smollm2-135m"
COMES_WITH: Mapping[str, tuple[str, ...]] = {DEFAULT_MODEL: ("ngram",)}  # drafters, by model, where --speculate names none
GROUPS = ("Model", "Scheduling", "Memory", "Decoding", "Server", "Logging")


def _no_bool(noun: str) -> BeforeValidator:
    def check(value: Any) -> Any:
        if isinstance(value, bool):  # pydantic takes True for 1; `page_size = true` in a file is a mistake
            raise ValueError(f"be {noun}")
        return value

    return BeforeValidator(check)


def _words(value: Any) -> Any:
    return tuple(value.split()) if isinstance(value, str) else value


Int = Annotated[int, _no_bool("an integer"), Field(le=2**63 - 1)]
Number = Annotated[float, _no_bool("a number")]
Words = Annotated[tuple[str, ...], BeforeValidator(_words)]


def _setting(group: str, default: Any, description: str, **constraints: Any) -> Any:
    return Field(default=default, description=description, json_schema_extra={"group": group}, **constraints)


class EngineConfig(BaseModel):
    """How an engine and its server are set up. Frozen; a wrong value raises `ConfigError` naming the setting.

    Fields are described where they are declared; `docs/configuration.md` lists them all.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    model: str = _setting("Model", DEFAULT_MODEL, "Alias, hub id, folder of safetensors, or .gguf file.", min_length=1)
    served_model_name: str | None = _setting(
        "Model", None, "Name that clients use for the model; by default the name it was asked for by.", min_length=1
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16", "float64"] = _setting(
        "Model", "auto", "Type of weights and activations; auto takes what the weights come in, where the device runs it well."
    )
    quantization: Literal["auto", "none", "q8", "q4"] = _setting(
        "Model",
        "auto",
        "What matrices are held in: as their file holds them where the CPU kernels run, else in --dtype (auto); in --dtype "
        "(none); in 8 or 4 bits, made on loading (q8, q4). See quantization.md.",
    )
    device: Literal["auto", "cpu", "cuda"] = _setting("Model", "auto", "Where the model runs.")
    max_model_len: Int | None = _setting(
        "Model", None, "Most tokens of a request, prompt and output; by default the model's context.", ge=1
    )
    generation_config: Literal["auto", "none"] = _setting(
        "Model", "auto", "Whether sampling defaults that come with the model are used (auto) or not (none)."
    )
    allow_untested: bool = _setting("Model", False, "Run combinations that nobody has run yet instead of refusing them.")

    lag: Int = _setting(
        "Scheduling",
        1,
        "Steps the scheduler runs ahead of the results it has seen: 0 is synchronous, 1 overlaps host and device.",
        ge=0,
        le=1,
    )
    max_num_seqs: Int = _setting("Scheduling", 32, "Most requests that run at once.", ge=1, le=65536)
    max_num_batched_tokens: Int = _setting(
        "Scheduling", 512, "Most tokens of one step; longer prompts are computed in chunks, mixed with decoding.", ge=1
    )
    max_queue: Int = _setting("Scheduling", 1024, "Most requests that wait; more are answered with 503.", ge=1)
    scheduling_policy: Literal["fcfs", "cache-aware"] = _setting(
        "Scheduling",
        "fcfs",
        "Order of requests of one priority: as they come, or those first that find most of their prompt in the prefix cache "
        "(none is overtaken for ever).",
    )
    admission_headroom_tokens: Int = _setting(
        "Scheduling",
        64,
        "Tokens every running request must have room to grow by when another one is admitted: more means fewer retractions, "
        "less means more requests at once.",
        ge=0,
    )
    num_threads: Int | None = _setting(
        "Scheduling",
        None,
        "Threads of the CPU's forward pass: our kernels' where they run (torch's operators get one beside them), else torch's; "
        "by default one a core.",
        ge=1,
        le=4096,
    )

    page_size: Int = _setting("Memory", 16, "Tokens of one KV page.", ge=1, le=4096)
    num_pages: Int | None = _setting("Memory", None, "KV pages requests may hold; by default what memory allows.", ge=1)
    kv_cache_memory_bytes: Int | None = _setting("Memory", None, "Memory for the KV pages, instead of --num-pages.", ge=1)

    kv_cache_dtype: Literal["auto", "bfloat16", "float32", "int8"] = _setting(
        "Memory", "auto", "Type of keys and values in the KV pages; auto is --dtype."
    )
    enable_prefix_caching: bool = _setting(
        "Memory", True, "Keep the pages of finished and retracted work, and share them between requests that start alike."
    )
    kv_offload_memory_bytes: Int = _setting(
        "Memory",
        0,
        "Host memory in which pages that the prefix cache must give up are kept, to be brought back when they match.",
        ge=0,
    )

    speculate: Words = _setting(
        "Decoding",
        (),
        "A drafter, as `name` or `name:key=value,key=value`; may be given several times, see drafting.md. By default what the "
        "model comes with: the default model with ngram, others with none. `off` decodes plainly.",
    )
    adaptive_speculation: bool = _setting(
        "Decoding", True, "Draft as many tokens as pay, by what steps take and drafts bring; off drafts as many as may be."
    )
    accept: Literal["coupled", "rejection"] = _setting(
        "Decoding",
        "coupled",
        "Which drafted tokens are accepted: coupled takes what the target says too, and gives the tokens of plain decoding; "
        "rejection samples by rejection, and gives its distribution, with tokens that depend on the drafter.",
    )
    cpu_kernels: Literal["auto", "exact", "off"] = _setting(
        "Decoding",
        "auto",
        "Whether our own kernels multiply on the CPU: where they can, with activations rounded to 8 bits for quantised weights "
        "and to bfloat16 for bfloat16 (auto), in float32 throughout (exact), or never (off).",
    )
    attention_backend: str = _setting(
        "Decoding",
        "auto",
        "Attention implementation; auto takes our CPU kernels where they run, else the reference.",
        min_length=1,
    )
    logprobs_mode: Literal["raw", "processed"] = _setting(
        "Decoding", "raw", "Logprobs of the model's own logits, or of what penalties, masks and temperature made of them."
    )
    debug: bool = _setting("Decoding", False, "Poison buffers, check every hand-over and fail on hidden synchronisation. Slow.")

    host: str = _setting("Server", "127.0.0.1", "Address the server listens on.", min_length=1)
    port: Int = _setting("Server", 8000, "Port the server listens on; 0 takes a free one.", ge=0, le=65535)
    api_key: str | None = _setting(
        "Server", None, "Key that clients must send as a bearer token; by default none is asked for.", min_length=1, repr=False
    )
    max_body_bytes: Int = _setting("Server", 16 * 2**20, "Largest request body.", ge=1)
    drain_timeout_s: Number = _setting(
        "Server", 30.0, "Seconds that running requests get to finish once the server is told to stop.", ge=0
    )
    stall_timeout_s: Number = _setting(
        "Server", 60.0, "Seconds without progress of an engine that has work after which /health answers 503.", gt=0
    )

    log_level: Literal["debug", "info", "warning", "error"] = _setting("Logging", "info", "Least severe message that is logged.")
    log_interval_s: Number = _setting(
        "Logging", 10.0, "Seconds between two lines on throughput while there is work; 0: no such lines.", ge=0
    )
    log_json: bool = _setting("Logging", False, "Log one JSON object a line.")

    @property
    def drafters(self) -> tuple[str, ...]:
        """What `speculate` names, else what the model comes with."""
        return self.speculate or COMES_WITH.get(self.model, ())

    @property
    def can_draft(self) -> bool:
        """Whether there is a drafter, `off` not counted."""
        return any(spec.partition(":")[0].strip() != "off" for spec in self.drafters)

    @model_validator(mode="wrap")
    @classmethod
    def _speak_our_grammar(cls, data: Any, handler: ModelWrapValidatorHandler[Self], info: ValidationInfo) -> Self:
        try:
            config = handler(data)
        except ValidationError as error:
            raise _in_our_grammar(error, (info.context or {}).get("labels", {})) from None
        if config.num_pages is not None and config.kv_cache_memory_bytes is not None:
            raise ConfigError(
                f"num_pages must not be given together with kv_cache_memory_bytes, but got {config.num_pages} and "
                f"{config.kv_cache_memory_bytes}",
                hint="both size the same KV pool; give one",
            )
        return config


def flag_name(field: str) -> str:
    """`max_model_len` -> `--max-model-len`."""
    return f"--{field.replace('_', '-')}"


def said_by_flag(field: str, value: object) -> str:
    """The flag that gives a field this value: `--no-debug` for False."""
    return flag_name(f"no_{field}" if value is False else field)


def env_name(field: str) -> str:
    """`max_model_len` -> `SLIPSTREAM_MAX_MODEL_LEN`."""
    return f"SLIPSTREAM_{field.upper()}"


def field_group(field: str) -> str:
    """Heading a setting stands under in help and docs; one of GROUPS."""
    extra = EngineConfig.model_fields[field].json_schema_extra
    assert isinstance(extra, dict)
    return str(extra["group"])


# What must hold, by the type of pydantic's finding; `ctx` holds its bounds.
_MUST: dict[str, Callable[[dict[str, Any]], str]] = {
    "greater_than_equal": lambda ctx: f"be at least {ctx['ge']}",
    "greater_than": lambda ctx: f"be above {ctx['gt']:g}",
    "less_than_equal": lambda ctx: f"be at most {ctx['le']}",
    "literal_error": lambda ctx: f"be {ctx['expected']}",
    "string_too_short": lambda ctx: "not be empty",
    "string_type": lambda ctx: "be a string",
    "int_type": lambda ctx: "be an integer",
    "int_parsing": lambda ctx: "be an integer",
    "int_parsing_size": lambda ctx: "be an integer of ordinary size",
    "int_from_float": lambda ctx: "be an integer",
    "float_type": lambda ctx: "be a number",
    "float_parsing": lambda ctx: "be a number",
    "finite_number": lambda ctx: "be a finite number",
    "bool_type": lambda ctx: "be true or false",
    "bool_parsing": lambda ctx: "be true or false",
    "tuple_type": lambda ctx: "be a list of strings",
    "value_error": lambda ctx: str(ctx["error"]),
}


def _in_our_grammar(error: ValidationError, labels: Mapping[str, str]) -> ConfigError:
    """Say pydantic's findings in our grammar, one a line. `labels` says how the user spelled a field, by its name."""
    lines, hint = [], None
    for finding in error.errors(include_url=False):
        field = str(finding["loc"][0])
        label = labels.get(field, field)
        if finding["type"] == "extra_forbidden":
            near = difflib.get_close_matches(field, EngineConfig.model_fields, n=1)
            hint = hint or (f"did you mean {near[0]}?" if near else None)
            lines.append(f"a setting must be a known one, but got {label}")
            continue
        say = _MUST.get(finding["type"])
        must = say(finding.get("ctx", {})) if say else finding["msg"]
        given = "one of another kind" if field == "api_key" and finding["input"] else shown(finding["input"])
        lines.append(f"{label} must {must}, but got {given}")
    return ConfigError("\n".join(lines), hint=hint)
