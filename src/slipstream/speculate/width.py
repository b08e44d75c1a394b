"""The cost model: who drafts for each row, and how many nodes, so that drafting never costs more than it brings.

What a step without nodes takes, t(T), is learnt from such steps, by the tokens T they compute, prompts' too; what one with nodes
takes, v(T), from those without prompts; what each drafter takes, likewise. They are kept apart: the first node of a step may cost
far more than the next ones (rows of unequal length, a kernel for another shape), and a prompt's tokens far less than nodes. To a
step of R rows, n nodes add v(R + n) - t(R), whatever prompts are computed beside them.

What nodes bring is learnt by request and drafter: alpha, how often the next level of its drafts was accepted. The first level
brings alpha tokens, the second alpha^2, and so on. Each row takes the drafter that would bring most, net of its time, if all R
rows drafted like it. Then the levels of all rows, best first, are taken as long as

    tokens a second        (R + what they bring) / (t(T) + v(R + their nodes) - t(R) + drafting)             grows.

Machines are faster and slower by turns. What is known of plain steps, which most are or which are looked at now and then, tells
the pace, and all is kept at one pace: else drafts that were measured in good times would look cheap in bad ones.

A row that drafts nothing would never learn that it should, and rows that always draft would never learn that plain steps have
become cheap. Less than a hundredth of the time is set aside for trying: it is saved up step by step, and spent on the row and
drafter that have gone longest without, or on a step without drafts. It imports no torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from slipstream.speculate.choice import OFF, Acceptance, Choice, RowDrafting, Shape
from slipstream.speculate.curve import LOWER, SHARE, Curve

PACE, JUMP = 0.3, 1.2  # share of a plain step in how fast the machine is just now, and how much slower it may say that this is
ROW_MEMORY, ALL_MEMORY = 0.85, 0.99  # how much of what was seen still counts one draft later, of a row and of all
PRIOR_WEIGHT = 1.5  # levels that a new request is thought to have seen, with the acceptance of the others
FIRST_ALPHA = 0.6  # acceptance before anything is known: worth a try
PROMISE = 1.06  # drafting must promise this many times the rate of plain decoding: of many noisy estimates the best is too good
Costs = Mapping[str, Sequence[float]]  # by drafter, of 1, 2, ... levels

REST = 6  # steps without nodes, and without news of drafts, before the same rows are looked at again
TRYING_SHARE = 0.008
TRIED_LEVELS = 2
PLAIN_AGE = 16  # steps with nodes after which what one without takes is worth a look
CHANGE = 0.1  # tokens a step by which another observer must promise more than what there is
STAY = 32  # steps for which a new observer is thought to stay; one that cannot catch up leaves after so many idle ones,
LEAVE = 4  # or after so many if it does not promise what watching takes: a step to watch, one to draft, two until that is settled


@dataclass(frozen=True, slots=True)
class Base:
    """What a step computes without nodes: a token of each row, and prompts."""

    num_rows: int
    num_other_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """All of them."""
        return self.num_rows + self.num_other_tokens


@dataclass(slots=True)
class Rest:
    """A choice of no node that stands for some steps more, for the same rows: to choose takes the host's time too.

    Attributes:
        steps: that are left.
        rows, num_other_tokens: what was chosen for.
        plain_s: seconds of a step without nodes.
        choices: what was chosen.
    """

    steps: int
    rows: list[RowDrafting]
    num_other_tokens: int
    plain_s: float
    choices: list[Choice]

    def is_of(self, rows: Sequence[RowDrafting], num_other_tokens: int) -> bool:
        """Whether these are the same."""
        same = len(rows) == len(self.rows) and num_other_tokens == self.num_other_tokens
        return same and all(row is other for row, other in zip(rows, self.rows, strict=True))


class WidthModel:
    """A `Chooser` that measures.

    Args:
        shapes: of every drafter, by name.
    """

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self._shapes = {name: shape for name, shape in shapes.items() if shape.num_nodes}
        self._light = [name for name, shape in self._shapes.items() if not shape.has_state]
        self._stateful = [name for name, shape in self._shapes.items() if shape.has_state]
        self._plain_s = Curve(SHARE)  # steps without nodes; what passes is their pace
        self._verify_s = Curve(LOWER)  # steps with nodes, at their best: dear by chance, they would not be measured again
        self._tried_s = Curve(SHARE)  # the same on average: what tries really take
        self._pace = 1.0  # what a step takes now, as a multiple of what such a step is known to take
        self._since_plain = 0
        self._draft_s = {name: Curve(LOWER) for name in self._shapes}
        self._fill_s = {name: Curve(LOWER) for name in self._stateful}
        self._watch_s = {name: Curve(LOWER) for name in self._stateful}
        self._all = {name: Acceptance() for name in self._shapes}
        self._saved_s = 0.0
        self._step = 0
        self._rest: Rest | None = None

    def step_took(
        self, num_rows: int, num_other_tokens: int, num_nodes: Mapping[str, int], step_s: float, draft_s: Mapping[str, float]
    ) -> None:
        """See `Chooser`."""
        all_nodes, num_tokens = sum(num_nodes.values()), num_rows + num_other_tokens
        if not all_nodes and (known_s := self._plain_s.known(num_tokens)):
            self._pace *= 1 + PACE * (min(step_s / (known_s * self._pace), JUMP) - 1)
        step_s /= self._pace
        if not all_nodes:
            self._plain_s.add(num_tokens, step_s)
        elif not num_other_tokens:
            self._verify_s.add(num_rows + all_nodes, step_s)
            self._tried_s.add(num_rows + all_nodes, step_s)
            self._plain_s.bound(num_rows + all_nodes, step_s)  # without nodes they would have taken no longer
        self._since_plain = self._since_plain + 1 if all_nodes else 0
        for name, count in num_nodes.items():
            if count and name in draft_s:
                self._draft_s[name].add(count, draft_s[name] / self._pace)

    def filled(self, drafter: str, num_tokens: int, fill_s: float) -> None:
        """To catch up with `num_tokens` tokens took `drafter` fill_s seconds."""
        self._fill_s[drafter].add(num_tokens, fill_s / self._pace)

    def watched(self, drafter: str, num_rows: int, watch_s: float) -> None:
        """See `Chooser`."""
        if drafter in self._watch_s:
            self._watch_s[drafter].add(num_rows, watch_s / self._pace)

    def draft_was(self, row: RowDrafting, drafter: str, num_accepted: int, num_nodes: int) -> None:
        """A row's draft of `num_nodes` nodes had `num_accepted` of its levels accepted."""
        self._rest = None
        levels = self._levels(drafter, num_nodes)
        row.record(drafter).add(num_accepted, levels, ROW_MEMORY)
        self._all[drafter].add(num_accepted, levels, ALL_MEMORY)

    def first_observer(self, num_rows: int) -> str:
        """Who promises most to one row among `num_rows` more that draft like it; unmeasured, the first that was named."""
        values = dict(self._values(RowDrafting(), [*self._stateful, *self._light], self._costs(Base(num_rows + 1))))
        best = max(values, key=values.__getitem__, default=OFF)
        least = CHANGE if best in self._stateful else 0.0  # it watches the prompt, too
        return best if values.get(best, 0.0) > least else OFF

    def choose(self, rows: Sequence[RowDrafting], most: Sequence[int], num_other_tokens: int) -> list[Choice]:
        """See `Chooser`."""
        self._step += 1
        if (rest := self._rest) is not None:
            if rest.steps and rest.is_of(rows, num_other_tokens):
                rest.steps -= 1
                self._saved_s += TRYING_SHARE * rest.plain_s
                return rest.choices
            self._rest = None
        base = Base(len(rows), num_other_tokens)
        plain_s = self._plain_s(base.num_tokens)
        if not plain_s:  # nothing measured yet
            return [Choice(OFF, 0, row.observer) for row in rows]
        one_alone = len(self._light) == 1 and not self._stateful  # compared with nobody
        costs = {} if one_alone else self._costs(base)
        drafters = [self._pick(row, costs) for row in rows]
        levels, rate = self._best_levels(rows, drafters, most, base)
        rests = not any(levels)
        if any(levels) and not num_other_tokens and self._since_plain > PLAIN_AGE:
            lost_s = plain_s - len(rows) / rate
            if lost_s <= self._saved_s:
                self._saved_s -= lost_s
                levels = [0] * len(rows)
        for place, row in enumerate(rows):
            if row.on_trial and row.on_trial == row.observer:
                drafters[place] = row.observer
                levels[place] = min(TRIED_LEVELS, self._levels(row.observer, most[place]))
        self._saved_s += TRYING_SHARE * plain_s
        self._try_one(rows, drafters, levels, most, base)
        choices: list[Choice] = []
        for place, (row, drafter, count) in enumerate(zip(rows, drafters, levels, strict=True)):
            if count:
                row.record(drafter).last_tried = self._step
            on_trial = row.on_trial if most[place] else ""  # nobody comes who may not draft
            observer = on_trial or self._observer(row, drafter, most[place], costs, len(rows), plain_s)
            choices.append(Choice(drafter if count else OFF, min(most[place], self._nodes(drafter, count)), observer))
        watched = any(row.on_trial or choice.observer in self._stateful for row, choice in zip(rows, choices, strict=True))
        if rests and not any(levels) and not watched:
            self._rest = Rest(REST, list(rows), num_other_tokens, plain_s, choices)
        return choices

    # -- who ------------------------------------------------------------------------------------------------------------

    def _options(self, row: RowDrafting) -> list[str]:
        """Who can propose for a row now."""
        return [row.observer, *self._light] if row.observer in self._stateful else self._light

    def _costs(self, base: Base) -> dict[str, list[float]]:
        """Tokens that plain decoding would commit, a row, in the time that each number of levels takes, from 1 on, by drafter."""
        seconds = self._seconds_of(base)
        plain_s = seconds({})
        if not plain_s:
            return {name: [0.0] * shape.depth for name, shape in self._shapes.items()}
        out: dict[str, list[float]] = {}
        for name, shape in self._shapes.items():
            nodes = [self._nodes(name, level) * base.num_rows for level in range(1, shape.depth + 1)]
            out[name] = [max(seconds({name: count}) - plain_s, 0.0) / plain_s for count in nodes]
        return out

    def _values(self, row: RowDrafting, names: Sequence[str], costs: Costs) -> Iterator[tuple[str, float]]:
        """Each drafter with the tokens a step it promises to a row beyond what its time costs, at its best number of levels."""
        for name in names:
            alpha = self._alpha(row, name)
            gain, reach, best = 0.0, 1.0, 0.0
            for cost in costs[name]:
                reach *= alpha
                gain += reach
                best = max(best, gain - cost * PROMISE)
            yield name, best

    def _pick(self, row: RowDrafting, costs: Costs) -> str:
        options = self._options(row)
        return options[0] if len(options) == 1 else self._best(row, options, costs)[0]

    def _best(self, row: RowDrafting, names: Sequence[str], costs: Costs) -> tuple[str, float]:
        return max(self._values(row, names, costs), key=lambda each: each[1], default=(OFF, 0.0))

    def _observer(
        self, row: RowDrafting, drafter: str, limit: int, costs: Costs, num_rows: int, plain_s: float
    ) -> str:
        """Who is to watch a row, of `num_rows` whose plain step takes plain_s, that `drafter` drafts for."""
        if not self._stateful:
            return drafter
        tokens_per_s = num_rows / plain_s
        value = self._best(row, self._options(row), costs)[1]
        others = [name for name in self._stateful if name != row.observer]
        better, promised = self._best(row, others, costs)
        if limit and promised > value + CHANGE and (promised - value) * STAY > self._fill_seconds(row, better) * tokens_per_s:
            return better
        if row.observer in self._stateful:
            own = self._best(row, [row.observer], costs)[1]
            pays = own > (self._watch_s[row.observer](num_rows) or 0.0) * tokens_per_s / num_rows
            return OFF if row.idle >= (STAY if pays else LEAVE) else row.observer
        return drafter if drafter in self._light else OFF

    def _fill_seconds(self, row: RowDrafting, drafter: str) -> float:
        """What it takes a drafter to catch up with a row; never measured, it is tried."""
        if drafter not in self._fill_s or not self._shapes[drafter].catches_up:
            return 0.0
        return self._fill_s[drafter](row.missing) or 0.0

    def _alpha(self, row: RowDrafting, drafter: str) -> float:
        return row.record(drafter).alpha(self._prior(drafter), PRIOR_WEIGHT)

    def _prior(self, drafter: str) -> float:
        return self._all[drafter].alpha(FIRST_ALPHA, PRIOR_WEIGHT)

    # -- how far --------------------------------------------------------------------------------------------------------

    def _best_levels(
        self, rows: Sequence[RowDrafting], drafters: Sequence[str], most: Sequence[int], base: Base
    ) -> tuple[list[int], float]:
        """How many levels of each row are worth their nodes, and the tokens a second that they promise."""
        seconds = self._seconds_of(base)
        priors = {name: self._prior(name) for name in self._shapes}
        gains: list[tuple[float, int]] = []
        for place, (row, drafter, limit) in enumerate(zip(rows, drafters, most, strict=True)):
            if drafter == OFF:
                continue
            alpha, gain = row.record(drafter).alpha(priors[drafter], PRIOR_WEIGHT), 1.0
            for _ in range(self._levels(drafter, limit)):
                gain *= alpha
                gains.append((gain, place))
        gains.sort(reverse=True)
        left = sum(gain for gain, _ in gains)
        best, best_rate, gained, looked_at = 0, PROMISE * len(rows) / max(seconds({}), 1e-9), 0.0, 1
        taken_levels: Counter[str] = Counter()
        for taken, (gain, place) in enumerate(gains, 1):
            gained, left = gained + gain, left - gain
            taken_levels[drafters[place]] += 1
            if taken < looked_at and taken < len(gains):
                continue
            looked_at = max(taken + 1, taken * 9 // 8)
            took_s = max(seconds({name: self._nodes(name, count) for name, count in taken_levels.items()}), 1e-9)
            rate = (len(rows) + gained) / took_s
            if rate > best_rate:
                best, best_rate = taken, rate
            if (len(rows) + gained + left) / took_s <= best_rate:  # not even if the others cost nothing
                break
        levels = [0] * len(rows)
        for _, place in gains[:best]:
            levels[place] += 1
        return levels, best_rate

    def _try_one(
        self, rows: Sequence[RowDrafting], drafters: list[str], levels: list[int], most: Sequence[int], base: Base
    ) -> None:
        """Spend what was saved on a try: by a drafter that could, or by one that must come and watch first."""
        tries: list[tuple[int, int, str]] = []
        for place, (row, limit) in enumerate(zip(rows, most, strict=True)):
            options = self._options(row)
            if limit and not levels[place]:
                tries += [(row.record(name).last_tried, place, name) for name in options]
            if limit and row.observer not in self._stateful and not row.on_trial:
                tries += [(row.record(name).last_tried, place, name) for name in self._stateful]
        if not tries:
            return
        _, place, name = min(tries)
        tried = min(TRIED_LEVELS, self._levels(name, most[place]))
        comes = name not in self._options(rows[place])
        nodes = Counter() if comes else self._all_nodes(drafters, levels)  # who comes drafts in a later step, perhaps alone
        seconds = self._seconds_of(base, self._tried_s)
        cost = seconds(nodes + Counter({name: self._nodes(name, tried)})) - seconds(nodes)
        if comes:
            cost += self._fill_seconds(rows[place], name) + LEAVE * (self._watch_s[name](1) or 0.0)
        if cost > self._saved_s:
            return
        self._saved_s -= cost
        if comes:
            rows[place].on_trial = name
        else:
            drafters[place], levels[place] = name, tried

    def _all_nodes(self, drafters: Sequence[str], levels: Sequence[int]) -> Counter[str]:
        nodes: Counter[str] = Counter()
        for name, count in zip(drafters, levels, strict=True):
            if count:
                nodes[name] += self._nodes(name, count)
        return nodes

    def _seconds_of(self, base: Base, verify: Curve | None = None) -> Callable[[Mapping[str, int]], float]:
        """What a step takes with `base`, by the nodes of each drafter; `verify`: what steps with nodes take."""
        verify = verify or self._verify_s
        plain_s, alone_s = self._plain_s(base.num_tokens) or 0.0, self._plain_s(base.num_rows) or 0.0

        def seconds(nodes: Mapping[str, int]) -> float:
            all_nodes = sum(nodes.values())
            if not all_nodes:
                return plain_s
            verify_s = verify(base.num_rows + all_nodes) or self._plain_s(base.num_rows + all_nodes) or 0.0
            drafting = sum(self._draft_s[name](count) or 0.0 for name, count in nodes.items() if count)
            return plain_s + max(verify_s - alone_s, 0.0) + drafting

        return seconds

    def _levels(self, drafter: str, nodes: int) -> int:
        shape = self._shapes[drafter]
        return min(shape.depth, -int(-min(nodes, shape.num_nodes) // self._nodes_per_level(drafter)))

    def _nodes(self, drafter: str, levels: int) -> int:
        return int(levels * self._nodes_per_level(drafter) + 0.5) if levels else 0

    def _nodes_per_level(self, drafter: str) -> float:
        shape = self._shapes[drafter]
        return max(1.0, shape.num_nodes / max(shape.depth, 1))
