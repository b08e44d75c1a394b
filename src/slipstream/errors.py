"""Every error a user can meet, as one tree.

    SlipstreamError (500)
    ├── InvalidRequest (400)            the request is wrong; nothing was started
    │   ├── InvalidParameter (400)      one field is wrong; `.param` names it
    │   ├── ContextLengthExceeded (400) prompt and answer do not fit the context
    │   ├── NeverFits (400)             the KV pool is too small for this request, ever
    │   ├── Unsupported (400)           a known parameter, or a pair of features, that does not run here
    │   ├── Unauthorized (401)
    │   ├── UnknownModel (404)
    │   └── BodyTooLarge (413)
    ├── ConfigError (500)               start-up: a setting is wrong
    │   └── ModelError (500)            start-up: weights, tokenizer or architecture
    └── EngineError (500)               while running
        ├── NonFiniteLogits (500)       the model produced NaN or infinity for this request
        ├── EngineBusy (503)            draining, loading or over its queue limit
        ├── EngineDead (503)            the engine process has gone
        └── InvariantBroken (500)       a bug of ours; the message says which rule

One grammar for all messages: what must hold, what was given, a hint.
"""

from __future__ import annotations

import reprlib


class SlipstreamError(Exception):
    """Base of all our errors.

    `status` is the HTTP status it maps to, `kind` OpenAI's `error.type`, `code` OpenAI's `error.code`.
    """

    status: int = 500
    kind: str = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, hint: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.param = param

    def __str__(self) -> str:
        return f"{self.message}\nhint: {self.hint}" if self.hint else self.message


class InvalidRequest(SlipstreamError):
    """The request is wrong as a whole."""

    status = 400
    kind = "invalid_request_error"


class InvalidParameter(InvalidRequest):
    """One field is wrong: `param` must satisfy `must`, and `given` does not."""

    code = "invalid_value"

    def __init__(self, param: str, must: str, given: object, *, hint: str | None = None) -> None:
        super().__init__(f"{param} must {must}, but got {shown(given)}", hint=hint, param=param)


class ContextLengthExceeded(InvalidRequest):
    """Prompt plus answer is longer than the model's context."""

    code = "context_length_exceeded"


class NeverFits(InvalidRequest):
    """The request needs more KV pages than the whole pool has."""

    code = "kv_pool_too_small"


class Unsupported(InvalidRequest):
    """A parameter we know but do not run, or a pair of features that do not run together."""

    code = "unsupported"


class Unauthorized(InvalidRequest):
    """The API key is missing or wrong."""

    status = 401
    kind = "authentication_error"
    code = "invalid_api_key"


class UnknownModel(InvalidRequest):
    """The request names a model that is not served here."""

    status = 404
    code = "model_not_found"


class BodyTooLarge(InvalidRequest):
    """The HTTP body is larger than the server accepts."""

    status = 413
    code = "body_too_large"


class ConfigError(SlipstreamError):
    """A setting is wrong; raised before anything is loaded."""

    kind = "config_error"


class ModelError(ConfigError):
    """Weights, tokenizer or architecture cannot be used; the message names the file or tensor."""

    kind = "model_error"


class EngineError(SlipstreamError):
    """Something failed while the request was running."""


class NonFiniteLogits(EngineError):
    """The model produced NaN or infinity; the answer would be arbitrary."""

    code = "non_finite_logits"


class EngineBusy(EngineError):
    """The engine takes no new work right now."""

    status = 503
    code = "engine_busy"


class EngineDead(EngineError):
    """The engine process has gone."""

    status = 503
    code = "engine_dead"


class InvariantBroken(EngineError):
    """One of the engine's own rules was broken: a bug of ours, never of the request."""

    code = "invariant_broken"


def error_from(name: str, message: str) -> SlipstreamError:
    """The error that crossed a process as (class name, `str` of the error); an unknown name gives an `EngineError`."""
    known = globals().get(name)
    kind = known if isinstance(known, type) and issubclass(known, SlipstreamError) else EngineError
    text, _, hint = message.partition("\nhint: ")
    error = kind.__new__(kind)  # constructors differ; what crossed is a finished message
    SlipstreamError.__init__(error, text, hint=hint or None)
    return error


_repr = reprlib.Repr()
_repr.maxlevel, _repr.maxstring, _repr.maxother = 3, 80, 80


def shown(value: object, limit: int = 80) -> str:
    """`repr` of a value, short enough for a message whatever a client sent."""
    if isinstance(value, (str, bytes)) and len(value) > limit:
        return f"{value[:limit]!r}... ({len(value)} long)"
    if isinstance(value, int) and value.bit_length() > 128:  # repr of a huge int is slow, and may raise
        return f"an integer of {value.bit_length()} bits"
    if isinstance(value, (list, tuple, set, frozenset, dict)) and len(value) > 8:
        return f"{type(value).__name__} of {len(value)} items"
    try:
        text = _repr.repr(value)  # bounded in depth and width
    except Exception:  # noqa: BLE001 - a huge int inside, or whatever a foreign __repr__ does
        return f"a {type(value).__name__} that cannot be shown"
    return text if len(text) <= limit else f"{text[:limit]}..."
