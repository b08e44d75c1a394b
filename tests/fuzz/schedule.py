"""One random schedule: an engine, requests that arrive and are aborted while it runs, and what must come out.

A schedule is plain data, drawn from a `random.Random`; a failing one is made smaller and told with the line that repeats it.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch

from slipstream.cache.pages import pages_for
from slipstream.config import EngineConfig
from slipstream.engine.build import assemble_engine, default_chooser
from slipstream.engine.loop import Engine
from slipstream.engine.runner import Runner
from slipstream.speculate.choice import Chooser, Shape
from slipstream.speculate.draft_model import DraftModel
from slipstream.speculate.ngram import Corpus, NGram
from slipstream.speculate.off import Off
from slipstream.testing.adversarial import AdversarialExecutor
from slipstream.testing.drafters import DrafterFactory, partial, rand_chain, rand_tree, self_chain, self_tree
from slipstream.testing.relaying import relaying
from slipstream.types import EngineRequest, FinishReason
from tests.engine.harness import Answer, Job, assert_equal, collect
from tests.fuzz.auditor import Auditor
from tests.fuzz.cached import check_cached
from tests.fuzz.mixed import RandomChooser
from tests.fuzz.universe import (
    CONTEXT,
    EOS,
    NUM_JOBS,
    VOCAB,
    attention_of,
    jobs,
    model_of,
    other_model,
    relatives,
    right_answer,
    stop_text,
    unguarded,
)
from tests.speculate.eagle_heads import eagle

MAX_STEPS = 3000
SIMPLEST = {
    "drafter": "off",
    "lag": 0,
    "num_seqs": 8,
    "num_pages": 256,
    "budget": 64,
    "caching": False,
    "num_host_pages": 0,
    "headroom": 64,
    "order": "fcfs",
    "adaptive": False,
    "accept": "coupled",
}
MODELS = ("hash 1", "hash 1", "hash 2")


def drafters(model: str) -> dict[str, DrafterFactory]:
    """Every drafter a schedule may use, for a model."""
    attention = attention_of(model)
    return {
        "off": lambda target: Off(),
        "self 1": self_chain(1, attention),
        "self 3": self_chain(3, attention),
        "self 7": self_chain(7, attention),
        "self tree 3": self_tree(3, 3, attention),
        "self tree 7": self_tree(7, 2, attention),
        "rand 3": rand_chain(3, beyond=3),
        "rand tree 7": rand_tree(7, beyond=3),
        "partial 7": partial(7, attention=attention),
        "partial tree 3": partial(3, 3, percent=50, attention=attention),
        "relaying 1": relaying(partial(1, attention=attention), 1),
        "relaying 3": relaying(partial(3, 2, attention=attention), 3, probs_steps=2),
        "relaying 7": relaying(rand_tree(7), 7),
        "ngram 3": lambda target: NGram(3, 1, 3),
        "ngram 7": lambda target: NGram(7, 1, 2, Corpus(torch.arange(32, VOCAB - 2).repeat(2), 2)),
        "draft model 1": lambda target: DraftModel(target.model, target, 1),
        "draft model 3": lambda target: DraftModel(target.model, target, 3),
        "other draft model 3": lambda target: DraftModel(other_model(model), target, 3),
        "eagle chain 3": eagle(1, 3, kind=1),
        "eagle tree 8": eagle(3, 4, 8),
        "eagle tree 3": eagle(4, 3, 3),
    }


MIXED = ("self tree 3", "relaying 3", "off", "rand 3", "relaying 1")
MIXES = {"mixed": MIXED, "mixed models": ("draft model 3", "eagle tree 8", "ngram 7", "self 7", "draft model 1", "off")}
DRAFTERS = (*drafters("hash 1"), *MIXES, *MIXES)


@dataclass(frozen=True)
class Setting:
    """How the engine of a schedule is built. Rules are checked and buffers poisoned in all of them; few are `guarded`."""

    lag: int = 1
    page_size: int = 16
    budget: int = 64
    num_seqs: int = 8
    num_pages: int = 64
    drafter: str = "off"
    executor_seed: int = 0
    model: str = "hash 1"
    guarded: bool = False
    caching: bool = True
    headroom: int = 64
    order: Literal["fcfs", "cache-aware"] = "fcfs"
    num_host_pages: int = 0
    adaptive: bool = False
    accept: Literal["coupled", "rejection"] = "coupled"

    @property
    def draws(self) -> bool:
        """Whether drafts are drawn at random: only rows at temperature 0 then have the tokens of plain decoding."""
        return self.accept == "rejection" and ("model" in self.drafter or "eagle chain" in self.drafter)


@dataclass(frozen=True)
class Schedule:
    """A setting, the requests (numbers in the universe), and what the host does before it only steps.

    Actions: ("add", i) and ("abort", i) of request i, ("step", 0), ("breathe", 0), ("reset", 0) of the prefix cache.
    `kinds`: priority and salt of each request. A request that asks the same as an earlier one is a sample of the same prompt.
    """

    setting: Setting
    requests: tuple[int, ...]
    kinds: tuple[tuple[int, str], ...]
    actions: tuple[tuple[str, int], ...]


def draw(rng: random.Random, models: Sequence[str] = MODELS, num_jobs: int = NUM_JOBS) -> Schedule:
    """A schedule of 2 to 4 requests."""
    count = rng.choice((2, 2, 3, 3, 4))
    family = [number for number in rng.choice(relatives()) if number < num_jobs]
    if rng.random() < 0.75:
        requests = tuple(rng.choice(family) for _ in range(count))
        if rng.random() < 0.5:  # samples of one prompt
            requests = tuple(rng.choice(requests) for _ in requests)
    else:
        requests = tuple(rng.randrange(num_jobs) for _ in range(count))
    kinds = tuple((rng.choice((0, 0, 0, 1, -1)), rng.choice(("", "", "", "", "", "salt"))) for _ in requests)
    page_size = rng.choice((1, 2, 4, 16))
    needs = sorted(pages_for(limit_of(number), page_size) for number in requests)
    setting = Setting(
        lag=rng.choice((0, 1, 1)),
        page_size=page_size,
        budget=rng.choice((1, 2, 4, 8, 8, 16, 16, 64, 64, 64, 64, 64)),
        num_seqs=rng.choice((1, 2, 3, 4, 8)),
        # From a pool in which the largest request does not fit at all to one that holds them all.
        num_pages=max(1, rng.choice((needs[-1], needs[-1], needs[-1] + 1, needs[-1] + needs[0], sum(needs), needs[-1] - 1))),
        drafter=rng.choice(DRAFTERS),
        executor_seed=rng.randrange(2**32),
        model=rng.choice(models),
        guarded=rng.random() < 0.04,
        caching=rng.random() < 0.8,
        headroom=rng.choice((0, 0, 0, 4, 64)),
        order=rng.choice(("fcfs", "fcfs", "cache-aware")),
        num_host_pages=rng.choice((0, 0, 1, 3, 20)),
        adaptive=rng.random() < 0.2,
    )
    setting = replace(setting, accept="rejection" if setting.executor_seed % 4 == 0 else "coupled")
    actions: list[tuple[str, int]] = []
    for place in range(len(requests)):
        actions.append(("add", place))
        actions.extend([("step", 0)] * rng.choice((0, 0, 1, 2, 5)))
    for place in range(len(requests)):
        if rng.random() < 0.2:
            at = rng.randint(actions.index(("add", place)) + 1, len(actions))
            actions.insert(at, ("abort", place))
            actions[at:at] = [("step", 0)] * rng.choice((0, 1, 3))
    for _ in range(rng.randint(0, 3)):
        actions.insert(rng.randint(0, len(actions)), ("breathe", 0))
    if rng.random() < 0.1:
        actions.insert(rng.randint(0, len(actions)), ("reset", 0))
    return Schedule(setting, requests, kinds, tuple(actions))


def limit_of(number: int) -> int:
    """Most tokens, prompt and output, of a request of the universe."""
    job = jobs()[number]
    return min(CONTEXT, len(job.prompt) + (job.params.max_tokens or CONTEXT))


Build = Callable[[Setting], Engine]


def build(setting: Setting) -> Engine:
    """The engine of a schedule: an adversarial executor behind the auditor, the most recently freed is reused first."""
    return _build(setting, checked=True)


def build_unchecked(setting: Setting) -> Engine:
    """The same with every check off: what is wrong shows in the answers, or not at all."""
    return _build(setting, checked=False)


def _build(setting: Setting, checked: bool) -> Engine:
    known = drafters(setting.model)
    names = MIXES.get(setting.drafter, (setting.drafter,))
    adversary = AdversarialExecutor.factory(setting.executor_seed)
    token_bytes = sum(layer.bytes_per_token for layer in model_of(setting.model).kv_layers)
    config = EngineConfig(
        model="in-memory",
        lag=setting.lag,
        page_size=setting.page_size,
        max_num_batched_tokens=setting.budget,
        max_num_seqs=setting.num_seqs,
        num_pages=setting.num_pages,
        enable_prefix_caching=setting.caching,
        admission_headroom_tokens=setting.headroom,
        scheduling_policy=setting.order,
        adaptive_speculation=setting.adaptive,
        accept=setting.accept,
        kv_offload_memory_bytes=setting.num_host_pages * setting.page_size * token_bytes,
        debug=checked,
    )

    def random_chooser(shapes: Mapping[str, Shape], config: EngineConfig) -> Chooser:
        return RandomChooser(shapes, setting.executor_seed)

    return assemble_engine(
        model_of(setting.model),
        config,
        eos_token_ids=(EOS,),
        stop_text=stop_text,
        context_len=CONTEXT,
        attention=attention_of(setting.model),
        drafters={name: known[name] for name in names},
        executor=Auditor.around(adversary, setting.page_size) if checked else adversary,
        order="newest",
        chooser=random_chooser if setting.drafter in MIXES and not setting.adaptive else default_chooser,
    )


def play(schedule: Schedule, engine: Engine, universe: Sequence[Job]) -> list[Answer]:
    """Run it to the end; answers in the order of the requests. Checks balance whenever the engine idles."""
    executor = engine._executor
    adversary = executor.inner if isinstance(executor, Auditor) else executor
    assert isinstance(adversary, AdversarialExecutor)
    answers: dict[str, Answer] = {}
    try:
        for what, place in schedule.actions:
            if what == "add":
                engine.add(_request(schedule, universe, place))
            elif what == "abort":
                engine.abort(str(place))
            elif what == "reset":
                engine.reset_prefix_cache()
            elif what == "breathe":
                adversary.breathe()
            else:
                _step(engine, answers)
        for _ in range(MAX_STEPS):
            if not engine.has_work:
                _check_cached(schedule, engine, universe, answers)
                return [answers[str(place)] for place in range(len(schedule.requests))]
            _step(engine, answers)
            adversary.breathe()
        raise AssertionError(f"the engine must come to an end, but was still at work after {MAX_STEPS} steps")
    finally:
        engine.close()


def _check_cached(schedule: Schedule, engine: Engine, universe: Sequence[Job], answers: dict[str, Answer]) -> None:
    """Nothing but what was asked and answered is cached, and it is what it says."""
    executor = engine._executor
    if not isinstance(executor, Auditor):
        return  # without checks only the answers tell
    assert isinstance(executor.inner, AdversarialExecutor) and isinstance(executor.inner._device, Runner)
    told = []
    for place, (number, (_, salt)) in enumerate(zip(schedule.requests, schedule.kinds, strict=True)):
        tokens = (*universe[number].prompt, *answers[str(place)].token_ids)
        told.append((salt, tokens, len(tokens) - _num_without_kv(answers[str(place)])))
    runner = executor.inner._device
    check_cached(engine.scheduler.ledger, told, runner if schedule.setting.model.startswith("hash") else None)


def _num_without_kv(answer: Answer) -> int:
    """Tokens whose KV cannot be there: an answer's last, unless it was resumed; it comes with the next step."""
    return 1 if answer.token_ids and not answer.num_retractions else 0


def _request(schedule: Schedule, universe: Sequence[Job], place: int) -> EngineRequest:
    number, (priority, salt) = schedule.requests[place], schedule.kinds[place]
    first = schedule.requests.index(number)
    parent = str(first) if first != place else None
    return universe[number].request(str(place), priority=priority, cache_salt=salt, parent_id=parent)


def _step(engine: Engine, answers: dict[str, Answer]) -> None:
    collect(engine, answers)
    if not engine.has_work:
        engine.scheduler.ledger.check_balanced()
        assert engine.num_running == engine.num_waiting == 0


def check(schedule: Schedule, answers: Sequence[Answer], wanted: Sequence[Answer], never_fits: Sequence[bool]) -> None:
    """Every answer equals the right one; an aborted one is its beginning."""
    aborted = {place for what, place in schedule.actions if what == "abort"}
    for place, (got, right) in enumerate(zip(answers, wanted, strict=True)):
        if never_fits[place]:
            assert got.error is not None and got.error[0] == "NeverFits" and not got.token_ids, f"request {place}: {got}"
            continue
        assert got.num_accepted <= got.num_drafted
        if schedule.setting.draws and jobs()[schedule.requests[place]].params.temperature > 0:
            assert got.terminal_events == 1 and got.finish_reason is not None, f"request {place}: {got}"
            continue
        if place in aborted and got.finish_reason is FinishReason.ABORT:
            assert got.token_ids == right.token_ids[: len(got.token_ids)], f"request {place}: {got.token_ids} begins {right}"
            assert got.terminal_events == 1
            continue
        assert_equal([got], [right], f"{schedule.setting}, request {place}")


def run(schedule: Schedule, make: Build = build) -> None:
    """Play a schedule and check it; raises what went wrong."""
    setting = schedule.setting
    with nullcontext() if setting.guarded else unguarded():
        answers = play(schedule, make(setting), jobs())
    pool = setting.num_pages * setting.page_size
    wanted = [within(right_answer(setting.model, number), number, pool) for number in schedule.requests]
    check(schedule, answers, wanted, [not fits(number, pool) for number in schedule.requests])


def fits(number: int, pool: int) -> bool:
    """Whether a request can ever run in a pool of so many tokens: an answer without a bound of its own needs one token."""
    job = jobs()[number]
    return (limit_of(number) if job.params.max_tokens is not None else len(job.prompt) + 1) <= pool


def within(right: Answer, number: int, pool: int) -> Answer:
    """The right answer in such a pool: one without a bound of its own ends where the pool ends."""
    job = jobs()[number]
    room = pool - len(job.prompt)
    if job.params.max_tokens is not None or right.error is not None or len(right.token_ids) < max(room, 1):
        return right
    if len(right.token_ids) == room and right.finish_reason is FinishReason.STOP:
        return right
    kept = max(room, 0)
    return replace(
        right,
        token_ids=right.token_ids[:kept],
        logprobs=right.logprobs[:kept],
        finish_reason=FinishReason.LENGTH,
        stop_reason=None,
    )


# -- seeds and failures ---------------------------------------------------------------------------------------------------


def failure(schedule: Schedule, make: Build = build) -> Exception | None:
    """What is wrong with a schedule, or None."""
    try:
        run(schedule, make)
    except Exception as error:  # noqa: BLE001 - whatever it is, it is the finding
        return error
    return None


def run_seed(seed: int, models: Sequence[str] = MODELS, num_jobs: int = NUM_JOBS) -> None:
    """Run the schedule of a seed; a failure is made smaller and told with the line that repeats it."""
    schedule = draw(random.Random(seed), models, num_jobs)
    error = failure(schedule)
    if error is None:
        return
    small = shrink(schedule, lambda one: failure(one) is not None)
    again = failure(small)
    on = "" if models == MODELS else f" --model {models[0]}"
    raise AssertionError(
        f"schedule {seed} fails: {type(error).__name__}: {error}\n"
        f"run it again: python -m tests.fuzz.replay {seed}{on}\n"
        f"made smaller: {small!r}\n"
        f"which fails with {type(again).__name__}: {again}"
    ) from error


def shrink(schedule: Schedule, fails: Callable[[Schedule], bool], most_tries: int = 300) -> Schedule:
    """A smaller schedule that fails too: fewer requests and actions, a simpler setting."""
    tries = 0
    progress = True
    while progress:
        progress = False
        for smaller in _smaller(schedule):
            tries += 1
            if tries > most_tries:
                return schedule
            if fails(smaller):
                schedule, progress = smaller, True
                break
    return schedule


def _smaller(schedule: Schedule) -> Iterator[Schedule]:
    for place in range(len(schedule.requests)):
        kept = tuple(number for at, number in enumerate(schedule.requests) if at != place)
        kinds = tuple(kind for at, kind in enumerate(schedule.kinds) if at != place)
        actions = tuple(
            (what, at - (at > place)) if what in ("add", "abort") else (what, at)
            for what, at in schedule.actions
            if not (what in ("add", "abort") and at == place)
        )
        if kept:
            yield Schedule(schedule.setting, kept, kinds, actions)
    if any(kind != (0, "") for kind in schedule.kinds):
        yield replace(schedule, kinds=((0, ""),) * len(schedule.kinds))
    for at, (what, _) in enumerate(schedule.actions):
        if what != "add":
            yield replace(schedule, actions=schedule.actions[:at] + schedule.actions[at + 1 :])
    for name, simple in SIMPLEST.items():
        if getattr(schedule.setting, name) != simple:
            yield replace(schedule, setting=replace(schedule.setting, **{name: simple}))
