"""The draft vocabulary, the order of batches, and a stop that changes nothing."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from slipstream.errors import ModelError
from slipstream.train import features
from slipstream.train.features import Text
from slipstream.train.loop import batches, learning_rate
from slipstream.train.vocabulary import choose_vocabulary
from tests.train.tiny_training import Recorder, make, settings, write_prompts


def test_the_vocabulary_is_what_answers_say_most_and_their_ends() -> None:
    texts = [Text((7, 7, 8, 3, 3, 3, 4, 4, 9), 3), Text((6, 4, 5), 1)]
    found = choose_vocabulary(texts, 4, {1}, 20, 24)
    assert found.target_ids.tolist() == [1, 3, 4, 5]  # 3 and 4 thrice, 5 and 9 once: the lower one
    assert found.coverage == pytest.approx(7 / 8)
    assert found.draft_ids().tolist() == [-1, 0, -1, 1, 2, 3, *[-1] * 18]
    # Then the prompts' ids, 7 twice, 6 and 8 once; then the lowest.
    assert choose_vocabulary(texts, 8, {1}, 20, 24).target_ids.tolist() == [1, 3, 4, 5, 6, 7, 8, 9]
    assert choose_vocabulary(texts, 10, {1}, 20, 24).target_ids.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert choose_vocabulary(texts, 99, {1, 22}, 20, 24).target_ids.tolist() == list(range(20))


def test_an_epoch_has_every_text_once_in_an_order_of_its_own() -> None:
    texts = [Text(tuple(range(length)), 1) for length in (30, 10, 50, 20, 70, 10, 10)]
    first, second = (batches(texts, 60, 5, epoch) for epoch in (0, 1))
    for epoch in (first, second):
        assert sorted(index for batch in epoch for index in batch) == list(range(7))
        sizes = [sum(len(texts[index].token_ids) for index in batch) for batch in epoch]
        assert all(size <= 60 or len(batch) == 1 for size, batch in zip(sizes, epoch, strict=True))
    assert first != second
    assert first == batches(texts, 60, 5, 0) != batches(texts, 60, 6, 0)


def test_the_learning_rate_rises_and_falls() -> None:
    rates = [learning_rate(1.0, step, 100) for step in range(100)]
    assert rates[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])
    assert rates[5:] == sorted(rates[5:], reverse=True)
    assert 0 < rates[-1] < 0.001


@pytest.fixture(autouse=True, scope="module")
def small_shards() -> Iterator[None]:
    """So that there are several."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(features, "SHARD_TOKENS", 400)
        yield


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, small_shards: None) -> Path:
    """A folder that was never stopped."""
    folder = tmp_path_factory.mktemp("whole")
    make(settings(folder / "out", write_prompts(folder / "prompts.jsonl")))
    return folder


@pytest.mark.parametrize(
    ("stage", "stop_at"), [("answers", 3), ("features", 1), ("training", 3), ("training", 6), ("measuring", 1)]
)
def test_a_run_that_was_stopped_ends_with_the_same_bits(whole: Path, tmp_path: Path, stage: str, stop_at: int) -> None:
    """Stopped in the middle of each stage; everything but the times is what it would have been."""
    out = tmp_path / "out"
    prompts, stopping = whole / "prompts.jsonl", Recorder(stage, stop_at)
    with pytest.raises(KeyboardInterrupt):
        make(settings(out, prompts), stopping)
    done = stopping.stages[stage][-1]
    assert done > 0
    resumed = Recorder()
    report = make(settings(out, prompts), resumed)
    if stage != "measuring":  # which begins again
        assert resumed.stages[stage][0] == done
    earlier = ["answers", "features", "training"]
    for name in earlier[: earlier.index(stage)] if stage in earlier else earlier[:2]:
        assert name not in resumed.stages
    assert (out / "head" / "model.safetensors").read_bytes() == (whole / "out" / "head" / "model.safetensors").read_bytes()
    finished = make(settings(whole / "out", prompts))
    for part in ("data", "epochs", "num_steps"):
        assert report[part] == finished[part]
    assert report["held_out"]["acceptance"] == finished["held_out"]["acceptance"]


def test_a_run_that_is_over_says_so_at_once(whole: Path) -> None:
    recorder = Recorder()
    make(settings(whole / "out", whole / "prompts.jsonl"), recorder)
    assert recorder.stages == {}


def test_a_checkpoint_that_is_none_is_refused(whole: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(whole / "out", out)
    (out / "report.json").unlink()
    (out / "training" / "checkpoint.pt").write_bytes(b"nothing")
    with pytest.raises(ModelError, match=r"checkpoint\.pt must be a checkpoint of this head, but is not"):
        make(settings(out, whole / "prompts.jsonl"))


def test_a_head_learns_what_an_untrained_one_does_not_know(whole: Path, tmp_path: Path) -> None:
    """On prompts it never saw, through the engine. The same answers and states serve both, once training/ is removed."""
    out, prompts = tmp_path / "out", whole / "prompts.jsonl"
    shutil.copytree(whole / "out", out)
    for epochs, rate in ((1, 1e-12), (20, 3e-3)):
        shutil.rmtree(out / "training")
        recorder = Recorder()
        report = make(settings(out, prompts, epochs=epochs, learning_rate=rate), recorder)
        assert "answers" not in recorder.stages
        assert "features" not in recorder.stages
        if epochs == 1:
            untrained = report["held_out"]["accept_length"]
    assert untrained < 1.3
    assert report["held_out"]["accept_length"] > untrained + 0.4
    assert report["epochs"][-1]["accuracy"][0] > 0.5
    assert torch.tensor(report["epochs"][-1]["loss"]).lt(torch.tensor(report["epochs"][0]["loss"])).all()
