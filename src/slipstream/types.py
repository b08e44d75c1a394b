"""What goes in and what comes out: sampling parameters, requests, outputs. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from slipstream.errors import InvalidParameter, Unsupported, shown

MAX_N = 128
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 4096
MAX_COUNT = 2**31 - 1
MAX_IDS = 2**20
MAX_SEED = 2**63 - 1
# Below these, dividing logits (whose float32 end at 3e38) could overflow; nobody could tell the answers apart from greedy ones.
MIN_TEMPERATURE = 1e-5
MIN_REPETITION_PENALTY = 0.01


class FinishReason(str, Enum):
    """Why an answer ended; `error` never reaches an OpenAI client as a finish_reason."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How one answer is sampled. Every field is checked on construction; `InvalidParameter` names the wrong one.

    Order of application at each position: allowed_token_ids, bad_words and min_tokens (masks), logit_bias, repetition,
    presence and frequency penalties, temperature, top_k, top_p, min_p, then the noise of (seed, position, token).

    Attributes:
        n: answers per prompt, 1 to 128.
        temperature: 0 is greedy; else from 1e-5 to 100.
        top_k: keep the k best tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of best tokens whose probability reaches top_p, in (0, 1].
        min_p: drop tokens less likely than min_p times the best one, in [0, 1].
        repetition_penalty: over prompt and output, 0.01 to 100; 1 is off.
        presence_penalty, frequency_penalty: over the output only, -2 to 2.
        seed: 64-bit; None draws one per request.
        max_tokens: most tokens to generate; None means up to the context. 0 only scores the prompt, with prompt_logprobs.
        min_tokens: EOS, stop ids and stop strings cannot end the answer within the first min_tokens tokens.
        stop: stop strings, matched against the text as the client sees it; the text ends before the one that is complete first
            (behind it with include_stop_str_in_output); of several complete at the same character the longest counts.
        stop_token_ids: token ids that end the answer; their text is left out unless include_stop_str_in_output.
        ignore_eos: the model's EOS ids do not end the answer.
        logprobs: number of most likely tokens to list at each position besides the chosen one, 0 to 20; None is off.
        prompt_logprobs: the same for each prompt token but the first, 0 to 20; always of the model's own logits. None is off.
        logit_bias: token id -> additive bias, -100 to 100.
        bad_words: words that may not be generated: neither their own token sequence nor that behind a space.
        allowed_token_ids: only these may be generated.
        truncate_prompt_tokens: keep only the last k prompt tokens.
        speculate: most tokens drafted for it in a step; False or 0 is plain decoding, None or True as many as the server drafts.
            The answer is the same.
    """

    n: int = 1
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    truncate_prompt_tokens: int | None = None
    speculate: int | None = None

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)  # frozen: the one place that normalises

        _integer("n", self.n, 1, MAX_N)
        for name, low, high in _RANGES:
            put(name, _number(name, getattr(self, name), low, high))
        if 0 < self.temperature < MIN_TEMPERATURE:
            raise InvalidParameter("temperature", f"be 0 (greedy) or at least {MIN_TEMPERATURE:g}", self.temperature)
        if self.top_p == 0:
            raise InvalidParameter("top_p", "be above 0", self.top_p)
        _integer("top_k", self.top_k, -1, MAX_COUNT)
        if self.seed is not None:
            _integer("seed", self.seed, -MAX_SEED - 1, MAX_SEED)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MAX_LOGPROBS)
        _max_tokens("max_tokens", self.max_tokens, self.prompt_logprobs)
        _integer("min_tokens", self.min_tokens, 0, MAX_COUNT)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidParameter("min_tokens", f"be at most max_tokens ({self.max_tokens})", self.min_tokens)
        put("stop", _strings("stop", self.stop))
        put("bad_words", _strings("bad_words", self.bad_words))
        put("stop_token_ids", _ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            ids = _ids("allowed_token_ids", self.allowed_token_ids)
            if not ids:
                raise InvalidParameter("allowed_token_ids", "name at least one token id", [])
            put("allowed_token_ids", ids)
        put("logit_bias", _bias(self.logit_bias))
        if self.truncate_prompt_tokens is not None:
            _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, MAX_COUNT)
        if isinstance(self.speculate, bool):
            put("speculate", None if self.speculate else 0)
        elif self.speculate is not None and (not isinstance(self.speculate, int) or not 0 <= self.speculate <= MAX_COUNT):
            raise InvalidParameter("speculate", f"be true, false or an integer from 0 to {MAX_COUNT}", self.speculate)
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise InvalidParameter(name, "be true or false", getattr(self, name))

    @classmethod
    def field_names(cls) -> tuple[str, ...]:
        """Names of all parameters, in order."""
        return tuple(f.name for f in fields(cls))

    @classmethod
    def from_json_fields(cls, given: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> SamplingParams:
        """Parameters from the fields of a JSON object, by our names.

        A field that is absent or null takes its value from `defaults`, then our own default. max_completion_tokens is another
        name of max_tokens. Names we know but do not run raise `Unsupported` unless their value changes nothing; all other names
        are ignored. Raises `InvalidParameter` naming the field.
        """
        for name, neutral in UNSUPPORTED_PARAMS.items():
            value = given.get(name)
            if value is not None and (isinstance(value, bool), value) not in [(isinstance(one, bool), one) for one in neutral]:
                raise Unsupported(f"{name} must be left out, it is not supported here, but got {shown(value)}", param=name)
        values = dict(defaults or {})
        values.update({name: given[name] for name in cls.field_names() if given.get(name) is not None})
        if (newer := given.get("max_completion_tokens")) is not None:
            older = given.get("max_tokens")
            if older is not None and older != newer:
                raise InvalidParameter("max_completion_tokens", f"agree with max_tokens ({shown(older)})", newer)
            _max_tokens("max_completion_tokens", newer, values.get("prompt_logprobs"))
            values["max_tokens"] = newer
        return cls(**values)

    @property
    def has_penalties(self) -> bool:
        """Whether sampling needs the token counts of the request."""
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("temperature", 0.0, 100.0),
    ("top_p", 0.0, 1.0),
    ("min_p", 0.0, 1.0),
    ("repetition_penalty", MIN_REPETITION_PENALTY, 100.0),
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
)

# Sampling parameters of other servers that do not run here -> values that change nothing and are accepted (null always is).
UNSUPPORTED_PARAMS: Mapping[str, tuple[object, ...]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1,),
    "early_stopping": (False,),
    "no_repeat_ngram_size": (0,),
    "typical_p": (1,),
    "top_a": (0,),
    "tfs": (1,),
    "epsilon_cutoff": (0,),
    "eta_cutoff": (0,),
    "mirostat": (0,),
    "mirostat_mode": (0,),
    "dynatemp_range": (0,),
    "xtc_probability": (0,),
    "dry_multiplier": (0,),
    "logits_processors": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
}


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One answer to compute: what the front hands the engine. Crosses the process border as msgpack.

    The front has already expanded `n`, drawn the seed, turned `bad_words` into ids and checked ids against the vocabulary;
    the engine checks again and answers a bad one with an error output.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    seed: int
    bad_word_ids: tuple[tuple[int, ...], ...] = ()
    grammar: tuple[str, str] | None = None  # (kind, source), looked up in sampling/grammar
    priority: int = 0  # lower runs earlier
    cache_salt: str = ""  # only requests with the same salt share cached pages
    parent_id: str | None = None  # sample 0 of the same prompt, whose pages this sample shares


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Logprob of one token and of the most likely ones at its position, best first.

    `rank` is its own place among all tokens, 1 for the most likely, of equals the lower id first; 0 where nobody counted.
    """

    token_id: int
    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()
    rank: int = 0


@dataclass(slots=True)
class DraftCounts:
    """What the drafts of one drafter came to.

    Attributes:
        num_drafts: steps of a request that verified a draft of it.
        num_drafted: tokens (nodes of a tree) in these drafts.
        num_accepted: tokens of them that were accepted and kept: they stand in the answer.
        accepted_at: entry i: drafts of which i + 1 tokens or more were.
    """

    num_drafts: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def add(self, num_drafted: int, num_accepted: int) -> None:
        """A draft of `num_drafted` nodes was verified."""
        self.merge(DraftCounts(1, num_drafted, num_accepted, [1] * num_accepted))

    def merge(self, other: DraftCounts) -> None:
        """Count what `other` counted, too."""
        self.num_drafts += other.num_drafts
        self.num_drafted += other.num_drafted
        self.num_accepted += other.num_accepted
        self.accepted_at.extend([0] * (len(other.accepted_at) - len(self.accepted_at)))
        for position, count in enumerate(other.accepted_at):
            self.accepted_at[position] += count


@dataclass(frozen=True, slots=True)
class EngineOutput:
    """News of one request: the tokens of one settled step, already cut. The last one carries `finish_reason`.

    `stop_reason` is the stop string or stop token id that ended it (None for EOS and length). A token that only ended
    the answer (EOS, stop id) is among `token_ids` and counts in usage; its text is the front's to leave out.
    `error` is (class name in slipstream.errors, message) with finish_reason ERROR.
    `prompt_logprobs` comes once, with the first output behind the prompt: one entry for each prompt token but the first.
    `queue_s`: seconds from its arrival to its first admission; `num_retractions`: how often it lost its slot under pressure.
    `drafting`, by drafter, comes with the last output alone.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    error: tuple[str, str] | None = None
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    queue_s: float = 0.0
    num_retractions: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] | None = None
    drafting: Mapping[str, DraftCounts] = field(default_factory=dict)


@dataclass(slots=True)
class CompletionOutput:
    """One finished (or growing) answer. `drafting`: what drafts came to, by drafter, once it has finished."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    drafting: Mapping[str, DraftCounts] = field(default_factory=dict)


@dataclass(slots=True)
class RequestOutput:
    """One prompt with its answers, as `LLM.generate` returns it.

    `prompt_logprobs`, where asked for, has an entry for each prompt token; the first is None: nothing comes before it.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[TokenLogprobs | None] | None = None


def valid_text(name: str, value: Any) -> str:
    """`value` as it is, if it is text that UTF-8 can carry. Raises `InvalidParameter`: JSON can spell half a surrogate pair."""
    if not isinstance(value, str):
        raise InvalidParameter(name, "be text", value)
    try:
        value.encode()
    except UnicodeEncodeError:
        raise InvalidParameter(name, "be valid Unicode, without lone surrogates", value) from None
    return value


def _integer(name: str, value: Any, low: int, high: int) -> None:
    # bool is an int in Python; `true` in JSON is not a count.
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        raise InvalidParameter(name, f"be an integer from {low} to {high}", value)


def _max_tokens(name: str, value: Any, prompt_logprobs: Any) -> None:
    if value is None:
        return
    _integer(name, value, 0, MAX_COUNT)
    if value == 0 and prompt_logprobs is None:
        raise InvalidParameter(name, "be at least 1", value, hint="0 only scores the prompt: with prompt_logprobs, or echo")


def _number(name: str, value: Any, low: float, high: float) -> float:
    # `not low <= x <= high` is true for NaN: NaN cannot pass. Comparing a huge int is exact, converting it comes after.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
        raise InvalidParameter(name, f"be a number from {low:g} to {high:g}", value)
    return float(value)


def _strings(name: str, value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        value = (value,)
    if not _is_list(value) or len(value) > MAX_STOP_STRINGS:
        raise InvalidParameter(name, f"be a string or a list of at most {MAX_STOP_STRINGS} strings", value)
    for one in value:
        if not isinstance(one, str) or not 1 <= len(one) <= MAX_STOP_CHARS:
            raise InvalidParameter(name, f"hold strings of 1 to {MAX_STOP_CHARS} characters", one)
        valid_text(name, one)
    return tuple(value)


def _ids(name: str, value: Any) -> tuple[int, ...]:
    if value is None:
        return ()
    if not _is_list(value) or len(value) > MAX_IDS:
        raise InvalidParameter(name, f"be a list of at most {MAX_IDS} token ids", value)
    for one in value:
        _integer(name, one, 0, MAX_COUNT)
    return tuple(value)


def _bias(value: Any) -> dict[int, float]:
    if value is None:
        return {}
    if not isinstance(value, Mapping) or len(value) > MAX_IDS:
        raise InvalidParameter("logit_bias", f"map at most {MAX_IDS} token ids to numbers", value)
    out: dict[int, float] = {}
    for key, bias in value.items():
        digits = isinstance(key, str) and key.isascii() and key.isdigit() and len(key) <= 10  # a JSON key is a string
        token = int(key) if digits else key
        if isinstance(token, bool) or not isinstance(token, int) or not 0 <= token <= MAX_COUNT:
            raise InvalidParameter("logit_bias", "have token ids as keys", key)
        if token in out:
            raise InvalidParameter("logit_bias", "name each token id once", key)
        out[token] = _number("logit_bias", bias, -100.0, 100.0)
    return out


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, (str, bytes, bytearray))


def nothing() -> None:
    """A callback for those whom nobody waits for."""
