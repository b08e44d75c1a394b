"""The guard fails what reads values on the host, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from slipstream.errors import InvariantBroken
from slipstream.observe.guard import SyncGuard, declared
from slipstream.sampling.sampler import choose, perturbed, process
from tests.sampling.oracle import Asked
from tests.sampling.steps import Row, step_of


def assign(x: Tensor, index: object, value: object) -> None:
    x[index] = value


READS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda x: x[0].item(),
    "tolist": lambda x: x.tolist(),
    "numpy": lambda x: x.numpy(),
    "numpy, forced": lambda x: x.numpy(force=True),
    "np.asarray": lambda x: np.asarray(x),
    "bool": lambda x: bool(x[0]),
    "if": lambda x: 1 if x.any() else 2,
    "int": lambda x: int(x[0]),
    "float": lambda x: float(x[0]),
    "index of a list": lambda x: [5, 6, 7][x[0]],
    "slice": lambda x: x[: x[1]],
    "range": lambda x: range(x[0]),
    "format": lambda x: f"{x[0]}",
    "repr": lambda x: repr(x),
    "in": lambda x: 3 in x,
    "nonzero": lambda x: x.nonzero(),
    "torch.nonzero": lambda x: torch.nonzero(x),
    "argwhere": lambda x: torch.argwhere(x),
    "where": lambda x: torch.where(x > 1),
    "masked_select": lambda x: x.masked_select(x > 1),
    "boolean index": lambda x: x[x > 1],
    "boolean index among others": lambda x: x[None, x > 1],
    "boolean assignment": lambda x: assign(x, x > 1, torch.tensor([8, 9])),
    "unique": lambda x: x.unique(),
    "torch.unique": lambda x: torch.unique(x, return_counts=True),
    "unique_consecutive": lambda x: torch.unique_consecutive(x),
    "bincount": lambda x: torch.bincount(x),
    "equal": lambda x: torch.equal(x, x + 1),
    "allclose": lambda x: torch.allclose(x, x),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x),
    "split by tensor": lambda x: x.tensor_split(x[:1]),
}

FREE: dict[str, Callable[[Tensor], object]] = {
    "arithmetic": lambda x: (x + 1) * 2,
    "index by tensor": lambda x: x[x.clamp(max=1)],
    "assign by tensor": lambda x: assign(x, torch.tensor([0, 1]), 4),
    "assign booleans": lambda x: assign(x > 1, slice(1, None), torch.tensor([True, False])),
    "slices": lambda x: x[1:, None],
    "where of three": lambda x: torch.where(x > 1, x, 0),
    "masked_fill": lambda x: x.masked_fill(x > 1, 0),
    "gather": lambda x: x.gather(0, torch.tensor([0])),
    "sort": lambda x: x.sort().values,
    "shape": lambda x: x.shape[0] + len(x) + x.ndim,
    "upload": lambda x: torch.from_numpy(np.arange(3)).to(x.device),
    "upload of a list": lambda x: torch.tensor([1, 2]),
    "repeat by a number": lambda x: x.repeat_interleave(2),
    "repeat to a known size": lambda x: torch.repeat_interleave(x, x, output_size=6),
    "split by list": lambda x: x.split([1, 2]),
}


@pytest.mark.parametrize("name", READS)
def test_reads_fail_unless_declared(name: str) -> None:
    with SyncGuard(), pytest.raises(InvariantBroken, match="must not read values"):
        READS[name](torch.tensor([1, 2, 3]))
    with SyncGuard(), declared("a test"):
        READS[name](torch.tensor([1, 2, 3]))
    READS[name](torch.tensor([1, 2, 3]))


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_device_work_passes(name: str, mode: Callable[[], torch.inference_mode]) -> None:
    with mode(), SyncGuard():
        FREE[name](torch.tensor([1, 2, 3]))


def test_a_declaration_ends_with_its_block_and_nests() -> None:
    x = torch.tensor([1])
    with SyncGuard():
        with declared("outer"):
            with declared("inner"):
                x.tolist()
            x.tolist()
        with pytest.raises(InvariantBroken):
            x.tolist()
        with pytest.raises(KeyError), declared("left by an error"):
            raise KeyError
        with pytest.raises(InvariantBroken):
            x.tolist()


def test_a_declaration_says_why() -> None:
    with pytest.raises(ValueError, match="why"), declared(""):
        pass


def test_other_threads_are_neither_guarded_nor_excused() -> None:
    x = torch.tensor([1, 2])
    outcomes: dict[str, object] = {}

    def unguarded() -> None:
        outcomes["unguarded"] = x.tolist()

    def guarded() -> None:
        try:
            with SyncGuard():
                x.tolist()
        except InvariantBroken as error:
            outcomes["guarded"] = error

    with SyncGuard(), declared("only here"):
        for work in (unguarded, guarded):
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
    assert outcomes["unguarded"] == [1, 2]
    assert isinstance(outcomes["guarded"], InvariantBroken)


@pytest.mark.parametrize(
    "asked",
    [
        Asked(temperature=0),
        Asked(),
        Asked(temperature=0.5, top_k=3, top_p=0.5, min_p=0.1),
        Asked(top_p=0.99),
        Asked(min_p=0.001),
        Asked(temperature=0, repetition_penalty=1.5, presence_penalty=0.5, frequency_penalty=0.5),
        Asked(logit_bias={3: 1.0}, bad_words=((3,), (4, 5)), allowed_token_ids=(3, 4, 5, 6), min_tokens=9, stop_token_ids=(6,)),
    ],
)
@pytest.mark.parametrize("vocab_size", [20, 5003])
def test_the_sampler_reads_only_what_it_declares(asked: Asked, vocab_size: int) -> None:
    rows = [Row(asked, [3, 4], [5], [4, 5], [0, 0], {0: {3, 4}}), Row(Asked(temperature=0), [3])]
    step = step_of(rows, [(0, 0), (0, 1), (0, 2), (1, 0)], vocab_size)
    logits = torch.randn(4, vocab_size)
    with torch.inference_mode(), SyncGuard():
        choose(logits, step.rows, lambda: step.nodes, step.masks)
        process(logits, step.rows, step.nodes, step.masks)
        perturbed(logits, step.rows, step.nodes, step.masks)
