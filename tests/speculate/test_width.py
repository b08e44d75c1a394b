"""The cost model on machines and requests that are made up: never slower than plain decoding, and near the best fixed width."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from slipstream.speculate.choice import OFF, Choice, RowDrafting, Shape
from slipstream.speculate.curve import Curve
from slipstream.speculate.width import WidthModel

DEPTH = 8
LIGHT = Shape(DEPTH, DEPTH, 1 + DEPTH)
MODEL = Shape(4, 4, 5, kv_behind=1, has_kv=True, catches_up=True)
HEAD = Shape(4, 4, 5, has_kv=True, relays=True)
Seconds = Callable[[int], float]


def memory_bound(tokens: int) -> float:
    """Weights are read once whatever the tokens, up to many of them: a GPU, or a CPU with good kernels."""
    return max(10e-3, tokens * 0.1e-3)


def compute_bound(tokens: int) -> float:
    """Every token costs almost as much as the first: torch's fp32 products on two cores."""
    return 2e-3 + tokens * 8e-3


def between(tokens: int) -> float:
    return 8e-3 + tokens * 0.7e-3


@dataclass
class World:
    """A machine and some requests; `alphas`: chance that a level is accepted."""

    seconds: Seconds
    alphas: list[float]
    draft_s: float = 0.2e-3  # a node
    noise: float = 0.1
    rng: random.Random = field(default_factory=lambda: random.Random(3))
    weather: random.Random = field(default_factory=lambda: random.Random(4))  # of its own: the same for all that are compared

    def step(self, widths: list[int]) -> tuple[list[int], float, float]:
        """Accepted levels of each row, seconds of the step, and of drafting."""
        accepted = []
        for alpha, width in zip(self.alphas, widths, strict=True):
            level = 0
            while level < width and self.rng.random() < alpha:
                level += 1
            accepted.append(level)
        nodes = sum(widths)
        factor = 1 + self.noise * self.weather.random()
        if self.weather.random() < 0.01:
            factor *= 10  # a hiccup
        draft_s = self.draft_s * nodes
        return accepted, self.seconds(len(widths) + nodes) * factor + draft_s, draft_s


def rate_of(
    world: World, choose: Callable[[], list[int]], told: WidthModel | None, rows: list[RowDrafting], steps: int
) -> float:
    tokens, seconds = 0, 0.0
    for number in range(steps):
        widths = choose()
        accepted, step_s, draft_s = world.step(widths)
        if told is not None:
            told.step_took(len(widths), 0, {"d": sum(widths)}, step_s - draft_s, {"d": draft_s})
            for row, level, width in zip(rows, accepted, widths, strict=True):
                if width:
                    told.draft_was(row, "d", level, width)
        if number >= steps // 5:  # behind the first steps, in which it learns
            tokens += len(widths) + sum(accepted)
            seconds += step_s
    return tokens / seconds


def one_drafter(shape: Shape = LIGHT) -> WidthModel:
    return WidthModel({"d": shape, OFF: Shape(0, 0, 1)})


def widths_of(model: WidthModel, rows: list[RowDrafting], most: list[int]) -> list[int]:
    return [choice.num_nodes for choice in model.choose(rows, most, 0)]


def adaptive(seconds: Seconds, alphas: list[float], steps: int = 1500) -> float:
    model, rows = one_drafter(), [RowDrafting() for _ in alphas]
    return rate_of(World(seconds, alphas), lambda: widths_of(model, rows, [DEPTH] * len(rows)), model, rows, steps)


def fixed(seconds: Seconds, alphas: list[float], width: int, steps: int = 1500) -> float:
    return rate_of(World(seconds, alphas), lambda: [width] * len(alphas), None, [], steps)


@pytest.mark.parametrize("seconds", [memory_bound, compute_bound, between])
@pytest.mark.parametrize("num_rows", [1, 4, 16, 32])
@pytest.mark.parametrize("alpha", [0.0, 0.2, 0.5, 0.8, 0.97])
def test_never_slower_than_plain_and_near_the_best_width(seconds: Seconds, num_rows: int, alpha: float) -> None:
    got = adaptive(seconds, [alpha] * num_rows)
    plain = fixed(seconds, [alpha] * num_rows, 0)
    best = max(fixed(seconds, [alpha] * num_rows, width) for width in (0, 1, 2, 4, 8))
    assert got > 0.98 * plain
    assert got > 0.85 * best


@pytest.mark.parametrize("alpha", [0.02, 0.1, 0.3])
def test_a_first_node_that_costs_far_more_than_the_next_is_not_tried_often(alpha: float) -> None:
    """32 rows: one node makes rows of unequal length, and another kernel of their products."""

    def jump(tokens: int) -> float:
        return 140e-3 if tokens <= 32 else 175e-3 + (tokens - 32) * 2e-3

    assert adaptive(jump, [alpha] * 32) > 0.985 * fixed(jump, [alpha] * 32, 0)


def test_what_nodes_add_is_the_same_beside_prompts_whose_tokens_are_cheap() -> None:
    rows = [RowDrafting() for _ in range(8)]
    for verify_s, drafts in ((0.9, False), (0.11, True)):
        model = one_drafter()
        model.step_took(8, 0, {}, 0.1, {})
        model.step_took(8, 504, {}, 0.2, {})
        model.step_took(8, 0, {"d": 8 * DEPTH}, verify_s, {"d": 1e-3})
        for other in (0, 400):
            assert any(choice.num_nodes for choice in model.choose(rows, [DEPTH] * 8, other)) == drafts


@pytest.mark.parametrize("seconds", [compute_bound, between])
def test_rows_that_draft_well_draft_and_the_others_do_not(seconds: Seconds) -> None:
    alphas = [0.95] * 4 + [0.02] * 4
    got = adaptive(seconds, alphas)
    assert got > 0.96 * max(fixed(seconds, alphas, width) for width in (0, 1, 2, 4, 8))


def test_a_request_that_begins_to_copy_is_found_out() -> None:
    world, model, rows = World(memory_bound, [0.0]), one_drafter(), [RowDrafting()]
    widths: list[int] = []

    def choose() -> list[int]:
        widths.extend(widths_of(model, rows, [DEPTH]))
        return widths[-1:]

    rate_of(world, choose, model, rows, 300)
    assert sum(widths[-100:]) < 100, "nothing is accepted: it hardly tries"
    world.alphas[0] = 1.0
    rate_of(world, choose, model, rows, 300)
    assert sum(width == DEPTH for width in widths[-100:]) > 90


def test_no_row_gets_more_than_it_may_have() -> None:
    model, rows = one_drafter(), [RowDrafting() for _ in range(3)]
    for _ in range(20):
        widths = widths_of(model, rows, [0, 1, DEPTH])
        assert widths[0] == 0 and widths[1] <= 1 and widths[2] <= DEPTH
        model.step_took(3, 0, {"d": sum(widths)}, 0.01, {"d": 0.001})
        for row, width in zip(rows, widths, strict=True):
            if width:
                model.draft_was(row, "d", width, width)
    usual = [widths_of(model, rows, [0, 1, DEPTH]) for _ in range(2)]  # one of them may be a look at plain decoding
    assert [0, 1, DEPTH] in usual
    assert model.choose([], [], 0) == []


def test_a_tree_has_fewer_levels_than_nodes() -> None:
    model, row = one_drafter(Shape(3, 9, 10)), RowDrafting()
    model.draft_was(row, "d", 3, 9)
    assert (row.record("d").accepted, row.record("d").tried) == (3, 3)
    model.draft_was(row, "d", 1, 6)
    assert row.record("d").tried == pytest.approx(0.85 * 3 + 2)


@dataclass
class Several:
    """Rows drafted by a light drafter "n" and by "s", which has state; the host's half of the scheduler, in short."""

    shape: Shape
    alphas: dict[str, float]
    level_s: dict[str, float]
    num_rows: int = 4
    watch_s: float = 0.0  # what "s" takes to watch a row that it does not draft for
    rng: random.Random = field(default_factory=lambda: random.Random(5))
    tokens: int = 0
    seconds: float = 0.0
    fills: int = 0
    proposed: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.model = WidthModel({"n": LIGHT, "s": self.shape, OFF: Shape(0, 0, 1)})
        self.rows = [RowDrafting() for _ in range(self.num_rows)]

    def step(self) -> None:
        for row in self.rows:
            row.missing = 0 if row.observer == "s" else 50
        choices = self.model.choose(self.rows, [DEPTH] * self.num_rows, 0)
        nodes = {name: sum(c.num_nodes for c in choices if c.drafter == name) for name in "ns"}
        most = {name: max((c.num_nodes for c in choices if c.drafter == name), default=0) for name in "ns"}
        draft_s = {name: self.level_s[name] * most[name] for name in "ns"}
        filled = sum(self._watch(row, choice) for row, choice in zip(self.rows, choices, strict=True))
        step_s = memory_bound(self.num_rows + sum(nodes.values()))
        self.model.step_took(self.num_rows, 0, nodes, step_s, draft_s)
        if filled:
            self.model.filled("s", filled * 50, filled * 0.01)
        watched = sum(row.observer == "s" for row in self.rows) if not nodes["s"] else 0
        if watched:
            self.model.watched("s", watched, self.watch_s * watched)
        for row, choice in zip(self.rows, choices, strict=True):
            level = 0
            while level < choice.num_nodes and self.rng.random() < self.alphas[choice.drafter]:
                level += 1
            if choice.num_nodes:
                self.model.draft_was(row, choice.drafter, level, choice.num_nodes)
            self.tokens += 1 + level
            self.proposed.append(choice.drafter)
        self.seconds += step_s + sum(draft_s.values()) + filled * 0.01 + watched * self.watch_s

    def _watch(self, row: RowDrafting, choice: Choice) -> int:
        """What the scheduler makes of a choice: who has state proposes only where it watched, and fills in when it comes."""
        assert choice.drafter in ("n", OFF, row.observer)
        drafts = choice.drafter == row.observer and choice.num_nodes > 0
        row.idle = 0 if drafts else row.idle + 1
        if drafts and row.on_trial == choice.drafter:
            row.on_trial = ""
        leaves = row.observer == choice.observer == "s" and self.shape.catches_up and not drafts
        came = choice.observer == "s" != row.observer
        row.observer = OFF if leaves else choice.observer
        self.fills += came
        return int(came and self.shape.catches_up)


@pytest.mark.parametrize("shape", [MODEL, HEAD], ids=["model", "head"])
def test_of_two_drafters_the_better_one_drafts(shape: Shape) -> None:
    cheap = {"n": 0.1e-3, "s": 0.5e-3}
    for alphas, best in (({"n": 0.05, "s": 0.9}, "s"), ({"n": 0.95, "s": 0.3}, "n")):
        world = Several(shape, alphas, cheap)
        for _ in range(1000):
            world.step()
        assert world.proposed[-1000:].count(best) > 900


@pytest.mark.parametrize("shape", [MODEL, HEAD], ids=["model", "head"])
def test_drafters_that_do_not_pay_sleep_and_cost_nothing(shape: Shape) -> None:
    world = Several(shape, {"n": 0.0, "s": 0.0}, {"n": 0.1e-3, "s": 5e-3})
    for _ in range(2000):
        world.step()
    plain_s = 2000 * memory_bound(world.num_rows)
    assert (world.tokens / world.seconds) / (2000 * world.num_rows / plain_s) > 0.98
    assert all(row.observer != "s" for row in world.rows) or world.rows[0].on_trial
    world.alphas["s"], world.level_s["s"] = 0.95, 0.5e-3  # it begins to pay: it is found out
    for _ in range(4000):
        world.step()
    assert world.proposed[-1000:].count("s") > 800


def test_a_head_that_does_not_pay_does_not_stay_to_watch() -> None:
    """To watch a row takes it a tenth of a step. It is tried now and then, as much as may be spent on it, and leaves again."""
    world = Several(HEAD, {"n": 0.0, "s": 0.1}, {"n": 0.1e-3, "s": 1e-3}, watch_s=1e-3)
    for row in world.rows:
        row.observer = "s"
    for _ in range(3000):
        world.step()
    plain_s = 3000 * memory_bound(world.num_rows)
    assert (world.tokens / world.seconds) / (3000 * world.num_rows / plain_s) > 0.98
    assert "s" in world.proposed[-1500 * world.num_rows :], "it must be tried again"


def test_who_is_on_trial_does_not_come_to_a_row_that_may_have_no_node() -> None:
    """It would catch up, find no room to draft, and leave, again and again."""
    model = WidthModel({OFF: Shape(0, 0, 1), "s": MODEL})
    model.step_took(1, 0, {}, 10e-3, {})
    row = RowDrafting(on_trial="s")
    assert [model.choose([row], [most], 0)[0].observer for most in (0, 4)] == [OFF, "s"]


def test_a_curve_has_straight_lines_and_never_falls() -> None:
    curve = Curve(0.5)
    assert curve(3) is None
    for count, seconds in ((4, 2.0), (8, 1.0), (12, 5.0)):
        curve.add(count, seconds)
    assert [curve(count) for count in (2, 4, 6, 8, 10, 12, 14)] == [1.0, 1.0, 1.0, 1.0, 3.0, 5.0, 7.0], "the newest is right"
    curve.add(4, 2000.0)
    assert curve(4) == pytest.approx(1.025), "an outlier counts as one and a half times what is known at most"


def test_more_tokens_take_no_longer_than_in_proportion() -> None:
    curve = Curve(0.5)
    for count, seconds in ((8, 40.0), (4, 10.0)):
        curve.add(count, seconds)
    assert [curve(count) for count in (4, 8)] == [10.0, 20.0]


@pytest.mark.parametrize("first", [1, 10, 100])
@pytest.mark.parametrize("num_rows", [1, 8, 32])
@pytest.mark.parametrize("alpha", [0.02, 0.07, 0.3])
def test_what_was_learnt_on_a_busy_machine_is_unlearnt(first: int, num_rows: int, alpha: float) -> None:
    """Another process takes more than half of it for twenty steps. What plain steps take must be seen to fall again."""
    world, model, rows = World(compute_bound, [alpha] * num_rows), one_drafter(), [RowDrafting() for _ in range(num_rows)]
    calm = world.seconds
    widths: list[int] = []

    def choose() -> list[int]:
        widths[:] = widths_of(model, rows, [4] * num_rows)
        return widths

    rate_of(world, choose, model, rows, first)
    world.seconds = lambda tokens: 2.5 * calm(tokens)
    rate_of(world, choose, model, rows, 20)
    world.seconds = calm
    world.weather = random.Random(4)
    got = rate_of(world, choose, model, rows, 300)
    assert got > 0.97 * fixed(calm, world.alphas, 0, 300)


def test_a_curve_forgets_what_was_not_measured_again() -> None:
    curve = Curve(0.5)
    for count, seconds in ((4, 2.0), (5, 2.0), (8, 100.0)):
        curve.add(count, seconds)
    for _ in range(300):
        curve.add(4, 2.0)
        curve.add(5, 2.0)
    assert curve(8) == 2.0
