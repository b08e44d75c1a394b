"""The target's answers: what the head is to foretell. They come from the engine, many at once, and are kept as they finish.

Loops. An answer that ran to its limit and ends in the same up to 64 tokens, said at least three times in a row and at least 32
tokens long, is cut behind their second time: a head would learn little else from them.

    a b c d e f d e f d e f d e f ... d e      limit reached
    a b c d e f d e f                          kept
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from slipstream.engine.loop import Engine
from slipstream.errors import ConfigError, error_from
from slipstream.text.tokenizer import Tokenizer
from slipstream.train.progress import Reporter
from slipstream.types import EngineRequest, FinishReason

LONGEST_LOOP = 64
LEAST_REPEATED = 32


@dataclass(frozen=True, slots=True)
class Answer:
    """A prompt and what the target said to it.

    Attributes:
        key: of the prompt.
        prompt_token_ids: what the target read.
        token_ids: what it said, the id that ended it included; cut where it was a loop.
        finish_reason: stop, length or loop.
    """

    key: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    finish_reason: str


def answer_all(
    engine: Engine, requests: Iterable[EngineRequest], max_waiting: int, stop: threading.Event
) -> Iterator[tuple[EngineRequest, tuple[int, ...], FinishReason]]:
    """Run requests; yields (request, tokens, finish reason) as they finish. Closes the engine in the end.

    Raises `KeyboardInterrupt` at the next step once `stop` is set, and the first error that a request ends with.
    """
    waiting = deque(requests)
    running: dict[str, tuple[EngineRequest, list[int]]] = {}
    with closing(engine):
        while waiting or running:
            while waiting and engine.num_waiting < max_waiting:
                request = waiting.popleft()
                running[request.request_id] = request, []
                engine.add(request)
            for output in engine.step():
                request, tokens = running[output.request_id]
                tokens.extend(output.token_ids)
                if output.error is not None:
                    raise error_from(*output.error)
                if output.finish_reason is not None:
                    del running[output.request_id]
                    yield request, tuple(tokens), output.finish_reason
            if stop.is_set():
                raise KeyboardInterrupt


def cut_loop(tokens: Sequence[int]) -> int | None:
    """How much to keep of an answer that ends in a loop (see the module), or None where it does not."""
    for period in range(1, LONGEST_LOOP + 1):
        same = 0
        while same < len(tokens) - period and tokens[-1 - same] == tokens[-1 - same - period]:
            same += 1
        looped = same + period
        if looped >= max(3 * period, LEAST_REPEATED):
            return len(tokens) - looped + 2 * period
    return None


class AnswerFile:
    """answers.jsonl. Opened for appending; a last line that was cut in the middle of writing is taken off.

    Args:
        path: the file.
        prompts: token ids of all prompts that are to be answered, by key.

    Raises `ConfigError` for lines that are no answers to these prompts.
    """

    def __init__(self, path: Path, prompts: Mapping[str, tuple[int, ...]]) -> None:
        self._path = path
        self._prompts = prompts
        self.answers: dict[str, Answer] = {}
        path.touch()
        self._file = path.open("r+b")
        try:
            whole = sum(self._read(number, line) for number, line in enumerate(self._file, 1))
            self._file.truncate(whole)
            self._file.seek(whole)
        except BaseException:
            self._file.close()
            raise

    @property
    def missing(self) -> list[str]:
        """Keys without an answer."""
        return [key for key in self._prompts if key not in self.answers]

    def add(self, answer: Answer, prompt: str, text: str) -> None:
        """Write an answer; it is with the system when this returns. The two texts are for readers."""
        line = {
            "key": answer.key,
            "prompt": prompt,
            "answer": text,
            "finish_reason": answer.finish_reason,
            "prompt_token_ids": answer.prompt_token_ids,
            "token_ids": answer.token_ids,
        }
        self._file.write(json.dumps(line).encode() + b"\n")
        self._file.flush()
        self.answers[answer.key] = answer

    def in_order(self) -> list[Answer]:
        """All answers, in the order of the prompts: the same however often the work was stopped."""
        return [self.answers[key] for key in self._prompts]

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _read(self, number: int, line: bytes) -> int:
        """Bytes to keep of a line."""
        if not line.endswith(b"\n"):
            return 0
        try:
            read = json.loads(line)
            prompt, tokens = tuple(read["prompt_token_ids"]), tuple(read["token_ids"])
            answer = Answer(read["key"], prompt, tokens, read["finish_reason"])
        except (ValueError, TypeError, LookupError):
            raise ConfigError(f"{self._path} line {number} must be an answer, but is none", hint="remove the line") from None
        if self._prompts.get(answer.key) != answer.prompt_token_ids:
            raise ConfigError(
                f"{self._path} line {number} must answer one of the prompts as the model reads it, but does not",
                hint="the chat template may have changed: name a new folder",
            )
        self.answers[answer.key] = answer
        return len(line)


def collect(
    file: AnswerFile,
    engine: Engine,
    requests: Mapping[str, EngineRequest],
    tokenizer: Tokenizer,
    max_waiting: int,
    reporter: Reporter,
    stop: threading.Event,
) -> None:
    """Answer what `file` has no answer for; `requests` by key, all of them. Closes the engine."""
    keys = {requests[key].request_id: key for key in file.missing}
    started, num_tokens = time.perf_counter(), 0
    reporter.begin("answers", len(file.answers), len(requests))
    for request, tokens, reason in answer_all(engine, [requests[key] for key in file.missing], max_waiting, stop):
        end = cut_loop(tokens) if reason is FinishReason.LENGTH else None
        answer = Answer(keys[request.request_id], request.prompt_token_ids, tokens[:end], "loop" if end else reason.value)
        texts = (tokenizer.decode(ids, False) for ids in (answer.prompt_token_ids, answer.token_ids))
        file.add(answer, *texts)
        num_tokens += len(tokens)
        reporter.at(len(file.answers), f"{num_tokens / (time.perf_counter() - started):.1f} tok/s")
    reporter.end()
