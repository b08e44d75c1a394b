"""What settle does to a row, without an engine: runs of tokens, cut by the one cut, as engine outputs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slipstream.engine.cut import cut
from slipstream.text.detokenize import StopScanner
from slipstream.text.tokenizer import Tokenizer
from slipstream.types import EngineOutput, EngineRequest, TokenLogprobs


def settled(
    request: EngineRequest,
    tokens: Sequence[int],
    run_lens: Sequence[int],
    tokenizer: Tokenizer,
    eos_token_ids: Sequence[int],
    context_len: int = 512,
) -> Iterator[EngineOutput]:
    """Outputs of a request whose model goes on with `tokens`, committed in runs of `run_lens` (and one by one behind them)."""
    params, at, step = request.params, 0, 0
    scanner = StopScanner(tokenizer, params)
    room = context_len - len(request.prompt_token_ids)
    while at < len(tokens):
        run = list(tokens[at : at + (run_lens[step] if step < len(run_lens) else 1)])
        step += 1
        ended = cut(
            run,
            num_before=at,
            max_output=room if params.max_tokens is None else min(params.max_tokens, room),
            eos_token_ids=eos_token_ids,
            stop_token_ids=params.stop_token_ids,
            stop_hits=[(index, stop) for index, token in enumerate(run) if (stop := scanner.push(token)) is not None],
            min_tokens=params.min_tokens,
            ignore_eos=params.ignore_eos,
        )
        kept = tuple(run[: ended.num_tokens])
        logprobs = None if params.logprobs is None else tuple(TokenLogprobs(token, -1.0) for token in kept)
        of_prompt = None
        if at == 0 and params.prompt_logprobs is not None:
            of_prompt = tuple(TokenLogprobs(token, -1.0) for token in request.prompt_token_ids[1:])
        yield EngineOutput(
            request.request_id, kept, logprobs, ended.finish_reason, ended.stop_reason, prompt_logprobs=of_prompt
        )
        if ended.finish_reason is not None:
            return
        at += len(run)
