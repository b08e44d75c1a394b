"""Prompts that come with the command: made here from a few words, the same ones every time, as many as are asked for.

copy     a list of stock, again and again: a model goes on with it, and what it says has been said before
plain    short tasks of many kinds, through the chat template: little is copied
"""

from __future__ import annotations

import random

_THINGS = (
    "lamps", "kettles", "ropes", "mirrors", "clocks", "baskets", "ladders", "wheels", "brushes", "tents", "boots", "maps",
    "bells", "chairs", "hinges", "stoves",
)  # fmt: skip
_COLOURS = ("red", "blue", "green", "grey", "white", "black", "yellow", "brown")
_PLACES = ("shelf", "cellar", "yard", "attic", "counter", "cabinet", "hall", "window")
_TASKS = (
    "Explain to a ten-year-old how {topic} works.",
    "Write a short story in which {topic} plays a part.",
    "What are the advantages and the drawbacks of {topic}?",
    "Give a list of ten facts about {topic}.",
    "Write a Python function that has to do with {topic}, and say what it does.",
    "Write a letter to a newspaper about {topic}.",
    "Compare {topic} as it was a hundred years ago with how it is today.",
    "How would you teach {topic} in one afternoon? Give the steps.",
)
_TOPICS = (
    "a suspension bridge", "a public library", "baking bread", "the water cycle", "a railway timetable", "chess", "beekeeping",
    "a thermostat", "an orchestra", "a post office", "growing tomatoes", "the tides",
)  # fmt: skip


def passage(number: int, num_lines: int) -> str:
    """A list of stock of `num_lines` lines; no two numbers have the same one."""
    draw = random.Random(number)
    lines = [
        f"{place}: {draw.randint(2, 99)} {draw.choice(_COLOURS)} {draw.choice(_THINGS)}, checked on day {draw.randint(1, 28)}\n"
        for place in draw.choices(_PLACES, k=num_lines)
    ]
    return f"Stock list {number}\n" + "".join(lines)


def task(number: int) -> str:
    """A task; the first 96 differ."""
    turn, kind = divmod(number, len(_TASKS))
    return _TASKS[kind].format(topic=_TOPICS[(turn + kind) % len(_TOPICS)])
