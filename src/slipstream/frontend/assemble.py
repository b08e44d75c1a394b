"""From engine outputs to answers: text, ids, logprobs and finish reasons, all following the engine's one cut.

    engine    tokens ...  finish_reason, stop_reason
    here      text, held back where a stop string or a UTF-8 sequence may still be growing
    client    deltas; put together they are the final text, however the tokens were dealt out
"""

from __future__ import annotations

from dataclasses import dataclass

from slipstream.errors import InvariantBroken, error_from
from slipstream.frontend.model_info import ModelInfo
from slipstream.frontend.prepare import Prepared
from slipstream.text.detokenize import StopScanner
from slipstream.types import CompletionOutput, EngineOutput, FinishReason, RequestOutput, SamplingParams, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Delta:
    """What one engine output adds to one answer. Tokens come at once, text as soon as it is certain.

    `token_ids` (and `logprobs`, one each, where asked for) include the token that ended the answer; `text` may be empty.
    """

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None
    finish_reason: str | None
    stop_reason: str | int | None


class Assembler:
    """Puts the answers of one prompt together.

    Args:
        prepared: the prompt and its engine requests.
        info: the model.

    Attributes:
        outputs: the answers so far, in order of index.
        num_prompt_tokens: counted once, however many answers there are.
        num_cached_tokens: prompt tokens that needed no computation for the first answer; the others share what it computes.
        prepared: the prompt and its engine requests.
        prompt_logprobs: an entry for each prompt token, the first one None; None until they are here, and where nobody asked.
    """

    def __init__(self, prepared: Prepared, info: ModelInfo) -> None:
        self.outputs: list[CompletionOutput] = []
        self.num_prompt_tokens = len(prepared.prompt_token_ids)
        self.num_cached_tokens = 0
        self.prepared = prepared
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        self._answers: dict[str, _Answer] = {}
        for index, request in enumerate(prepared.requests):
            logprobs: list[TokenLogprobs] | None = None if request.params.logprobs is None else []
            output = CompletionOutput(index, logprobs=logprobs)
            self.outputs.append(output)
            self._answers[request.request_id] = _Answer(output, request.params, info)

    def push(self, output: EngineOutput) -> Delta:
        """Take the news of one answer. Raises the error it carries, as the class it had in the engine."""
        if output.request_id == self.prepared.requests[0].request_id:
            self.num_cached_tokens = output.num_cached_tokens
        if output.prompt_logprobs is not None:
            self.prompt_logprobs = [None, *output.prompt_logprobs]
        return self._answers[output.request_id].push(output)

    @property
    def awaits_prompt_logprobs(self) -> bool:
        """The prompt's logprobs were asked for and are not here yet."""
        return self.prepared.params.prompt_logprobs is not None and self.prompt_logprobs is None

    @property
    def is_finished(self) -> bool:
        """All answers have ended, or failed."""
        return all(answer.is_finished for answer in self._answers.values())

    @property
    def num_output_tokens(self) -> int:
        """Tokens of all answers: what usage calls completion_tokens."""
        return sum(len(output.token_ids) for output in self.outputs)

    def request_output(self) -> RequestOutput:
        """The prompt with its answers."""
        prepared = self.prepared
        return RequestOutput(
            prepared.request_id,
            prepared.prompt,
            list(prepared.prompt_token_ids),
            self.outputs,
            self.num_cached_tokens,
            self.prompt_logprobs,
        )


class _Answer:
    """One growing answer: `output.text` is what has been sent, `_pending` what is certain but held back."""

    def __init__(self, output: CompletionOutput, params: SamplingParams, info: ModelInfo) -> None:
        self.output = output
        self.is_finished = False
        self._params = params
        self._eos_token_ids = info.eos_token_ids
        self._scanner = StopScanner(info.tokenizer, params)
        self._pending = ""

    def push(self, news: EngineOutput) -> Delta:
        if self.is_finished:
            raise InvariantBroken(f"an answer must end once, but {news.request_id} got more")
        self.is_finished = news.finish_reason is not None
        if news.error is not None:
            raise error_from(*news.error)
        by_string = news.finish_reason is FinishReason.STOP and isinstance(news.stop_reason, str)
        for token in news.token_ids[:-1] if self._only_ended(news) else news.token_ids:
            if self._scanner.match is not None:
                raise InvariantBroken(f"an answer must end at its first stop string, but {news.request_id} went on (rule 5.6)")
            self._scanner.push(token)
            self._pending += self._scanner.text
        text = self._cut_at_stop(news) if by_string else self._certain()
        output = self.output
        output.text += text
        output.token_ids.extend(news.token_ids)
        if output.logprobs is not None:
            output.logprobs.extend(news.logprobs or ())
        if self.is_finished:
            output.finish_reason = news.finish_reason.value if news.finish_reason else None
            output.stop_reason = news.stop_reason
            output.drafting = news.drafting
        logprobs = None if output.logprobs is None else news.logprobs or ()
        return Delta(output.index, text, news.token_ids, logprobs, output.finish_reason, output.stop_reason)

    def _only_ended(self, news: EngineOutput) -> bool:
        """Whether the last token is an EOS or stop id whose text is to be left out."""
        if news.finish_reason is not FinishReason.STOP or self._params.include_stop_str_in_output or not news.token_ids:
            return False
        if news.stop_reason is None:  # EOS, or a closed grammar
            return news.token_ids[-1] in self._eos_token_ids
        return isinstance(news.stop_reason, int)

    def _cut_at_stop(self, news: EngineOutput) -> str:
        match = self._scanner.match
        if match is None or match.stop != news.stop_reason:
            raise InvariantBroken(
                f"engine and front must find the same stop string, but got {news.stop_reason!r} and {match} (rule 5.6)"
            )
        end = match.end if self._params.include_stop_str_in_output else match.start
        return self._pending[: end - len(self.output.text)]

    def _certain(self) -> str:
        """All pending text once the answer is over; before, all that no stop string can be made of any more."""
        if self.is_finished:
            return self._pending + self._scanner.finish()
        held = 0 if self._params.include_stop_str_in_output else self._scanner.held
        sendable = len(self._pending) - held
        text, self._pending = self._pending[:sendable], self._pending[sendable:]
        return text
