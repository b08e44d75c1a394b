"""LLM.generate and LLM.chat around an engine double that echoes prompts."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest

from slipstream.errors import ConfigError, ContextLengthExceeded, EngineDead, InvalidParameter, InvalidRequest, NonFiniteLogits
from slipstream.frontend.model_info import ModelInfo
from slipstream.llm import LLM
from slipstream.testing.tiny import tiny_checkpoint
from slipstream.types import EngineOutput, EngineRequest, FinishReason, SamplingParams
from tests.frontend.engine_double import settled
from tests.text.vocabularies import END, EOS, FakeTokenizer

TOKENIZER = FakeTokenizer()
TEMPLATE = "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% if add_generation_prompt %}>{% endif %}"
BAD = 3 + ord("!")  # a prompt with this token fails while it runs


class EchoEngine:
    """Answers each prompt with its own tokens and EOS, one token a step and request; `width` requests at once."""

    def __init__(self, width: int = 2) -> None:
        self.width = width
        self.queue: deque[EngineRequest] = deque()
        self.running: dict[str, Any] = {}
        self.news: list[EngineOutput] = []
        self.seen: list[EngineRequest] = []
        self.most_waiting = 0
        self.closed = 0
        self.resets = 0
        self.before_step: Callable[[], None] = lambda: None

    @property
    def num_waiting(self) -> int:
        return len(self.queue)

    @property
    def has_work(self) -> bool:
        return bool(self.queue or self.running or self.news)

    def add(self, request: EngineRequest) -> None:
        self.queue.append(request)
        self.seen.append(request)
        self.most_waiting = max(self.most_waiting, len(self.queue))

    def reset_prefix_cache(self) -> None:
        self.resets += 1

    def abort(self, request_id: str) -> None:
        self.queue = deque(request for request in self.queue if request.request_id != request_id)
        self.running.pop(request_id, None)
        self.news.append(EngineOutput(request_id, finish_reason=FinishReason.ABORT))

    def step(self) -> list[EngineOutput]:
        self.before_step()
        while self.queue and len(self.running) < self.width:
            request = self.queue.popleft()
            tokens = [*request.prompt_token_ids, EOS]
            self.running[request.request_id] = settled(request, tokens, (), TOKENIZER, (EOS,))
        news, self.news = self.news, []
        for name, outputs in list(self.running.items()):
            output = next(outputs)
            if output.token_ids[:1] == (BAD,):
                output = EngineOutput(name, finish_reason=FinishReason.ERROR, error=("NonFiniteLogits", "not finite"))
            if output.finish_reason is not None:
                del self.running[name]
            news.append(output)
        return news

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def engine() -> EchoEngine:
    return EchoEngine()


@pytest.fixture
def llm(engine: EchoEngine) -> LLM:
    info = ModelInfo("tiny", TOKENIZER, TEMPLATE, TOKENIZER.vocab_size, 64, (EOS, END), {"temperature": 0.25})
    return LLM.around(engine, info, max_num_seqs=2)


def texts(outputs: list[Any]) -> list[str]:
    return [output.outputs[0].text for output in outputs]


def test_prompts_of_every_kind(llm: LLM) -> None:
    ids = TOKENIZER.encode("cd")
    for prompts, wanted in (
        ("ab", ["ab"]),
        (["ab", "cd"], ["ab", "cd"]),
        (ids, ["cd"]),
        ([ids, "x", tuple(ids)], ["cd", "x", "cd"]),
        ({"prompt": "ab"}, ["ab"]),
        ([{"prompt_token_ids": ids}, {"prompt": "x"}], ["cd", "x"]),
        ([], []),
    ):
        assert texts(llm.generate(prompts)) == wanted


def test_results_keep_the_order_of_the_prompts(llm: LLM, engine: EchoEngine) -> None:
    prompts = ["a" * (9 - size) for size in range(9)]
    outputs = llm.generate(prompts)
    assert texts(outputs) == prompts
    assert [output.prompt for output in outputs] == prompts
    assert outputs[0].prompt_token_ids == TOKENIZER.encode("a" * 9)
    assert outputs[0].outputs[0].finish_reason == "stop"
    assert len({request.request_id for request in engine.seen}) == 9
    assert engine.most_waiting <= 2


def test_parameters_for_all_for_each_and_by_default(llm: LLM, engine: EchoEngine) -> None:
    llm.generate(["abc", "abc"], SamplingParams(max_tokens=2))
    assert [output.outputs[0].text for output in llm.generate(["abc"] * 2, [SamplingParams(max_tokens=n) for n in (1, 2)])] == [
        "a",
        "ab",
    ]
    engine.seen.clear()
    llm.generate("ab")
    assert (engine.seen[0].params.temperature, engine.seen[0].params.max_tokens) == (0.25, 16)
    for wrong in ([SamplingParams()], [], "x", {"n": 1}, [None, None], 5):
        with pytest.raises(InvalidParameter) as caught:
            llm.generate(["a", "b"], wrong)
        assert caught.value.param == "sampling_params"


def test_a_conversation_is_no_text(llm: LLM) -> None:
    with pytest.raises(InvalidParameter, match=r'messages must be a list like \[{"role": "user", .* but got .hi'):
        llm.chat("hi")


def test_priorities_and_salts(llm: LLM, engine: EchoEngine) -> None:
    llm.generate(["a", {"prompt": "b", "cache_salt": "mine"}], priority=[3, -1])
    assert [(one.priority, one.cache_salt) for one in engine.seen] == [(3, ""), (-1, "mine")]
    llm.generate([{"prompt_token_ids": [5], "cache_salt": None}], priority=7)
    assert (engine.seen[-1].priority, engine.seen[-1].cache_salt) == (7, "")
    for bad in ([1], [1, 2, 3], "12", None, 2**31, [0, 1.0]):
        with pytest.raises(InvalidParameter, match="priority"):
            llm.generate(["a", "b"], priority=bad)
    with pytest.raises(InvalidParameter, match="cache_salt"):
        llm.generate({"prompt": "a", "cache_salt": ""})


def test_the_prefix_cache_can_be_reset(llm: LLM, engine: EchoEngine) -> None:
    llm.reset_prefix_cache()
    assert engine.resets == 1
    llm.close()
    with pytest.raises(EngineDead):
        llm.reset_prefix_cache()


def test_prompt_logprobs(llm: LLM) -> None:
    (output,) = llm.generate("abc", SamplingParams(prompt_logprobs=0, max_tokens=0))
    assert output.outputs[0].token_ids == [] and output.outputs[0].finish_reason == "length"
    assert output.prompt_logprobs is not None and output.prompt_logprobs[0] is None
    assert [one.token_id for one in output.prompt_logprobs[1:] if one] == output.prompt_token_ids[1:]
    assert llm.generate("abc")[0].prompt_logprobs is None


def test_several_answers(llm: LLM) -> None:
    (output,) = llm.generate("ab", SamplingParams(n=3))
    assert [(one.index, one.text) for one in output.outputs] == [(0, "ab"), (1, "ab"), (2, "ab")]


@pytest.mark.parametrize(
    "prompts",
    [
        "",
        [""],
        ["a", ""],
        [[]],
        ["a", [10**6]],
        5,
        None,
        b"a",
        ["a", None],
        {"text": "a"},
        {"prompt": "a", "x": 1},
        [{"prompt": ""}],
        [1, "a"],
    ],
)
def test_a_bad_prompt_is_refused_before_anything_runs(llm: LLM, engine: EchoEngine, prompts: Any) -> None:
    with pytest.raises(InvalidParameter):
        llm.generate(prompts)
    assert not engine.seen


def test_an_over_long_prompt_among_good_ones_is_named(llm: LLM, engine: EchoEngine) -> None:
    with pytest.raises(ContextLengthExceeded) as caught:
        llm.generate(["a", "b" * 64])
    assert caught.value.__notes__ == ["in prompts[1]"]
    assert not engine.seen


def test_chat(llm: LLM, engine: EchoEngine) -> None:
    hi = [{"role": "user", "content": "hi"}]
    (output,) = llm.chat(hi)
    assert (output.prompt, output.outputs[0].text) == ("user:hi;>", "user:hi;>")
    assert engine.seen[0].params.max_tokens is None
    assert texts(llm.chat([hi, hi], SamplingParams(max_tokens=4))) == ["user", "user"]
    assert texts(llm.chat(hi, add_generation_prompt=False)) == ["user:hi;"]
    for wrong in ([], [[]], "hi", [{"role": "robot", "content": "x"}], None):
        with pytest.raises(InvalidRequest):
            llm.chat(wrong)


def test_a_request_that_fails_lets_the_others_finish(llm: LLM, engine: EchoEngine) -> None:
    with pytest.raises(NonFiniteLogits, match="not finite") as caught:
        llm.generate(["ab", "c!d", "e"])
    assert "prompt 1" in caught.value.__notes__[0]
    assert not engine.has_work
    assert len(engine.seen) == 3
    assert texts(llm.generate("ab")) == ["ab"]


def test_ctrl_c_aborts_what_runs_and_leaves_the_llm_usable(llm: LLM, engine: EchoEngine) -> None:
    steps = 0
    handler = signal.getsignal(signal.SIGINT)

    def interrupt() -> None:
        nonlocal steps
        steps += 1
        if steps == 3:
            os.kill(os.getpid(), signal.SIGINT)

    engine.before_step = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abcdef"] * 5)
    assert steps > 3  # the step was not torn: it ended, and the aborts were taken
    assert not engine.has_work
    assert signal.getsignal(signal.SIGINT) is handler
    assert texts(llm.generate("ab")) == ["ab"]


def test_an_engine_that_cannot_go_on_closes_the_llm(llm: LLM, engine: EchoEngine) -> None:
    def fail() -> None:
        raise RuntimeError("no device")

    engine.before_step = fail
    with pytest.raises(RuntimeError, match="no device"):
        llm.generate("ab")
    assert engine.closed == 1
    with pytest.raises(EngineDead):
        llm.generate("ab")


def test_close_is_final_and_repeatable(llm: LLM, engine: EchoEngine) -> None:
    with llm:
        llm.generate("ab")
    llm.close()
    assert engine.closed == 1
    with pytest.raises(EngineDead, match="has been closed"):
        llm.generate("ab")


def test_the_progress_bar_is_for_terminals_and_on_request(llm: LLM, capsys: pytest.CaptureFixture[str]) -> None:
    llm.generate(["ab", "cd"])
    assert capsys.readouterr() == ("", "")
    llm.generate(["ab", "cd"], use_tqdm=True)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "2/2" in captured.err


def test_an_unknown_setting_is_named_before_anything_is_loaded() -> None:
    with pytest.raises(ConfigError, match="temprature"):
        LLM("no-such-model", temprature=1)


def test_the_front_imports_no_torch() -> None:
    code = (
        "import sys, slipstream; from slipstream import SamplingParams, EngineConfig, LLM; "
        "import slipstream.frontend.assemble, slipstream.frontend.prepare, slipstream.text.template, slipstream.engine.cut; "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_an_answer_says_what_its_drafts_came_to() -> None:
    """The draft model is the target: nearly all it says is accepted."""
    path = str(tiny_checkpoint("llama"))
    how: dict[str, Any] = {"dtype": "float64", "adaptive_speculation": False, "num_threads": 1}
    with LLM(path, speculate=(f"draft_model:model={path},width=3",), **how) as llm:
        params = SamplingParams(max_tokens=21, temperature=0, ignore_eos=True)
        drafted, plain = llm.generate(["one two"] * 2, [params, SamplingParams(**{**asdict(params), "speculate": 0})])
    (mine,) = drafted.outputs[0].drafting.values()
    assert list(drafted.outputs[0].drafting) == ["draft_model"] and 12 <= mine.num_accepted <= mine.num_drafted
    assert mine.num_accepted == sum(mine.accepted_at) and mine.num_drafts == mine.accepted_at[0]
    assert plain.outputs[0].drafting == {} and plain.outputs[0].token_ids == drafted.outputs[0].token_ids
