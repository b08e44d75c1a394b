"""An engine without a model, for the real engine process: what it answers is written in the prompt.

say(TEXT)     the answer is TEXT and EOS; by default "hello world"
[run=3]       three tokens a step
[delay=0.05]  seconds a step takes, at the least
[random]      letters drawn from the request's seed, without EOS; greedy: always the same
[abort=2]     the engine aborts the answer by itself after two steps
[nan=2]       the answer fails after two steps
[boom=2]      the engine fails after two steps
[hang]        the answer never begins
[freeze=9]    the whole step takes nine seconds
[refuse]      refused by the engine before it starts
[cached=5]    five prompt tokens came from the cache, unless it was reset
[tell]        the answer is the request's priority, cache salt and parent
"""

from __future__ import annotations

import json
import os
import random
import re
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from slipstream.config import EngineConfig
from slipstream.engine.stats import EngineStats
from slipstream.errors import ModelError
from slipstream.frontend.model_info import ModelInfo
from slipstream.testing.byte_tokenizer import EOS_ID, ByteTokenizer
from slipstream.types import EngineOutput, EngineRequest, FinishReason, TokenLogprobs
from tests.frontend.engine_double import settled

TOKENIZER = ByteTokenizer()
VOCAB_SIZE = 264  # a few ids more than the tokenizer knows, as models have
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


class FakeEngine:
    """Runs up to `width` answers at once, first come first served."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._queue: deque[EngineRequest] = deque()
        self._running: dict[str, Iterator[EngineOutput]] = {}
        self._prompts: dict[str, str] = {}
        self._steps_of: dict[str, int] = {}
        self._news: list[EngineOutput] = []
        self._was_reset = False
        self._stats = EngineStats(num_pages=width)

    @property
    def has_work(self) -> bool:
        return bool(self._queue or self._running or self._news)

    def add(self, request: EngineRequest) -> None:
        text = TOKENIZER.decode(request.prompt_token_ids, skip_special_tokens=True)
        if "[refuse]" in text:
            error = ("NeverFits", "a request must fit the KV pool, but got a fake one\nhint: lower max_tokens")
            self._news.append(EngineOutput(request.request_id, finish_reason=FinishReason.ERROR, error=error))
            return
        self._prompts[request.request_id] = text
        self._queue.append(request)

    def abort(self, request_id: str) -> None:
        if self._prompts.pop(request_id, None) is not None:
            self._queue = deque(request for request in self._queue if request.request_id != request_id)
            self._running.pop(request_id, None)
            self._news.append(EngineOutput(request_id, finish_reason=FinishReason.ABORT))

    def step(self) -> list[EngineOutput]:
        while self._queue and len(self._running) < self._width:
            request = self._queue.popleft()
            self._running[request.request_id] = _answer(request, self._prompts[request.request_id])
        news, self._news = self._news, []
        delay = 0.0
        for request_id in list(self._running):
            text = self._prompts[request_id]
            if "[hang]" in text:
                continue
            self._steps_of[request_id] = step = self._steps_of.get(request_id, 0) + 1
            delay = max(delay, float(_option(text, "delay") or 0))
            if freeze := _option(text, "freeze"):
                delay = float(freeze)
            if _option(text, "boom") == str(step):
                raise ValueError("boom")
            if _option(text, "abort") == str(step):
                self.abort(request_id)
            elif _option(text, "nan") == str(step):
                error = ("NonFiniteLogits", "the model's logits must be finite, but got NaN")
                news.append(EngineOutput(request_id, finish_reason=FinishReason.ERROR, error=error))
            else:
                cached = 0 if self._was_reset else int(_option(text, "cached") or 0)
                news.append(replace(next(self._running[request_id]), num_cached_tokens=cached))
            if news and news[-1].request_id == request_id and news[-1].finish_reason is not None:
                del self._running[request_id], self._prompts[request_id]
        time.sleep(delay)
        self._stats.num_steps += bool(news)
        self._stats.num_output_tokens += sum(len(output.token_ids) for output in news)
        return news

    def reset_prefix_cache(self) -> None:
        self._was_reset = True

    def stats(self) -> EngineStats:
        stats = self._stats
        stats.num_running, stats.num_waiting = len(self._running), len(self._queue)
        stats.num_free_pages = self._width - stats.num_running
        return stats

    def close(self) -> None:
        """Nothing to give back."""


@dataclass(frozen=True)
class FakeLoaded:
    """What the engine process tells of the model."""

    architecture: str = "fake"
    dtype: str = "float32"
    num_parameters: int = 1_000_000
    context_len: int = 512


def build(config: EngineConfig, on_progress: Callable[[str, float], None] | None) -> tuple[FakeEngine, FakeLoaded]:
    """The factory that the engine process imports. The model's name says what happens while it loads."""
    assert on_progress is not None
    how, _, argument = config.model.partition(":")
    if how == "fake-gate":  # loads until the file is there
        on_progress("weights", 0.25)
        _wait_for(Path(argument))
    elif how == "fake-damaged":
        raise ModelError("model.safetensors must be whole, but got 3 bytes", hint="fetch it again")
    elif how == "fake-crash":
        os._exit(7)
    return FakeEngine(config.max_num_seqs), FakeLoaded()


def load_info(config: EngineConfig) -> ModelInfo:
    """The text half of the fake model."""
    if config.model == "fake-no-tokenizer":
        raise ModelError("the folder must hold tokenizer.json, but it does not")
    return ModelInfo(
        name=config.served_model_name or "fake",
        tokenizer=TOKENIZER,
        chat_template=None if "base" in config.model else TEMPLATE,
        vocab_size=VOCAB_SIZE,
        context_len=config.max_model_len or 512,
        eos_token_ids=(EOS_ID,),
        generation_defaults={"temperature": 0.0} if "greedy" in config.model else {},
    )


def main() -> int:
    """Run a whole server; the argument is its configuration as JSON."""
    from slipstream.errors import SlipstreamError
    from slipstream.server.lifecycle import run
    from slipstream.server.serving import Backend

    backend = Backend(lambda config, on_progress: None, load_info, "tests.server.fake_engine:build")
    try:
        return run(EngineConfig(**json.loads(sys.argv[1])), backend)
    except SlipstreamError as error:
        print(f"error: {type(error).__name__}: {error}", file=sys.stderr)
        return 1
    finally:
        print("torch" if "torch" in sys.modules else "no torch", file=sys.stderr)


def _answer(request: EngineRequest, text: str) -> Iterator[EngineOutput]:
    said = re.search(r"say\((.*?)\)", text, re.DOTALL)
    if "[random]" in text:
        draw = random.Random(0 if request.params.temperature == 0 else request.seed)
        tokens = [ord(draw.choice("abcdefghijklmnopqrstuvwxyz ")) for _ in range(4096)]
    elif "[tell]" in text:
        parent = request.parent_id and request.parent_id.rpartition("#")[2]
        tokens = [*TOKENIZER.encode(f"{request.priority} {request.cache_salt!r} {parent}"), EOS_ID]
    else:
        tokens = [*TOKENIZER.encode(said.group(1) if said else "hello world"), *[EOS_ID] * 64]
    run = int(_option(text, "run") or 1)
    for output in settled(request, tokens, [run] * 4096, TOKENIZER, (EOS_ID,)):
        yield replace(
            output,
            logprobs=_with_top(output.logprobs, request.params.logprobs),
            prompt_logprobs=_with_top(output.prompt_logprobs, request.params.prompt_logprobs),
        )


def _with_top(entries: tuple[TokenLogprobs, ...] | None, num_top: int | None) -> tuple[TokenLogprobs, ...] | None:
    """Beside each token, the ids above it, a little less likely each."""
    if entries is None or num_top is None:
        return None
    return tuple(
        TokenLogprobs(
            token,
            -0.5,
            tuple((token + step) % VOCAB_SIZE for step in range(num_top)),
            tuple(-0.5 - step if step < 19 else float("-inf") for step in range(num_top)),
            rank=1,
        )
        for token in (one.token_id for one in entries)
    )


def _option(text: str, name: str) -> str | None:
    found = re.search(rf"\[{name}=([\d.]+)\]", text)
    return found.group(1) if found else None


def _wait_for(path: Path) -> None:
    for _ in range(600):
        if path.exists():
            return
        time.sleep(0.05)
    raise ModelError(f"{path.name} must appear within 30 s, but did not")


if __name__ == "__main__":
    sys.exit(main())
