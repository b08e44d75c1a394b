"""The training loop. A run that was stopped and goes on makes the same head, bit for bit, as one that was not.

What decides follows from settings and place (the order of the texts from seed and epoch, the learning rate from the step), or
lies in the checkpoint: weights, the optimizer's moments, the place, the sums of losses.
"""

from __future__ import annotations

import math
import pickle
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from slipstream.errors import EngineError, ModelError
from slipstream.kernels.cpu.build import cpu_flags
from slipstream.train.features import FeatureStore, Text
from slipstream.train.folder import replacing
from slipstream.train.module import IGNORED, Batch, Embed, Head
from slipstream.train.progress import Reporter
from slipstream.train.settings import TrainSettings

STEP_WEIGHT = 0.8  # of the loss of each further step
WARM_UP = 0.05  # share of all steps, at most
MOST_WARM_UP = 200
MAX_NORM = 1.0
BETAS = (0.9, 0.95)
SAVE_EVERY_S = 60.0


@dataclass(slots=True)
class Tally:
    """Sums over an epoch, an entry for each step of the unrolling.

    `loss` and `kept` count targets among the kept ids; `right` and `all` every target: what the head cannot say it gets wrong.
    """

    loss: list[float]
    kept: list[int]
    right: list[int]
    all: list[int]

    @classmethod
    def empty(cls, num_steps: int) -> Tally:
        """Nothing yet."""
        return cls([0.0] * num_steps, *([0] * num_steps for _ in range(3)))

    def as_json(self) -> dict[str, list[float]]:
        """Mean loss, and share of right guesses, by step."""
        return {
            "loss": [loss / max(1, count) for loss, count in zip(self.loss, self.kept, strict=True)],
            "accuracy": [right / max(1, count) for right, count in zip(self.right, self.all, strict=True)],
        }


@dataclass(slots=True)
class Place:
    """How far training is: the next batch is `batch` of `epoch`. `tallies`: of each epoch begun."""

    epoch: int = 0
    batch: int = 0
    tallies: list[Tally] = field(default_factory=list)


def batches(texts: Sequence[Text], batch_tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Which texts make up each batch of an epoch: in random order, as many as make `batch_tokens`, one at least."""
    generator = torch.Generator().manual_seed((seed * 1_000_003 + epoch) % 2**63)
    out: list[list[int]] = []
    room = 0
    for index in torch.randperm(len(texts), generator=generator).tolist():
        size = len(texts[index].token_ids)
        if not out or size > room:
            out.append([])
            room = batch_tokens
        out[-1].append(index)
        room -= size
    return out


def learning_rate(highest: float, step: int, num_steps: int) -> float:
    """Of step `step` of `num_steps`: a straight line up, half a cosine down to 0."""
    warm_up = min(MOST_WARM_UP, math.ceil(WARM_UP * num_steps))
    if step < warm_up:
        return highest * (step + 1) / warm_up
    return highest * 0.5 * (1 + math.cos(math.pi * (step - warm_up) / max(1, num_steps - warm_up)))


def step_losses(head: Head, batch: Batch, embed: Embed, draft_ids: Tensor, num_steps: int, tally: Tally) -> Tensor:
    """The loss of a batch: cross-entropy on targets among the kept ids, weighted 0.8^i; counts go to `tally`."""
    total = batch.features.new_zeros(())
    for step, states in enumerate(head.unroll(batch, embed, num_steps)):
        targets = batch.following(step + 1)
        is_real = targets >= 0
        labels = draft_ids[targets.clamp(min=0)]
        is_kept = is_real & (labels >= 0)
        labels = labels.where(is_kept, IGNORED)
        logits = head.logits(states).float()
        loss = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")
        num_kept = int(is_kept.sum())
        total = total + STEP_WEIGHT**step * loss / max(1, num_kept)
        tally.loss[step] += loss.item()
        tally.kept[step] += num_kept
        tally.right[step] += int((logits.argmax(-1) == labels).sum())
        tally.all[step] += int(is_real.sum())
    return total


def computes_in_bfloat16(train_dtype: str, device: torch.device) -> bool:
    """Whether products are computed in bfloat16; `train_dtype` as in `TrainSettings`."""
    if train_dtype != "auto":
        return train_dtype == "bfloat16"
    return torch.cuda.is_bf16_supported(False) if device.type == "cuda" else "avx512_bf16" in cpu_flags()


class Trainer:
    """Trains a head, from its checkpoint on where there is one.

    Args:
        head: initialised, on its device.
        embed: see `Head.unroll`.
        store: the texts and their states.
        draft_ids: [vocab_size] int64, see `DraftVocabulary.draft_ids`.
        settings: how.
        checkpoint: the file.
    """

    def __init__(
        self, head: Head, embed: Embed, store: FeatureStore, draft_ids: Tensor, settings: TrainSettings, checkpoint: Path
    ) -> None:
        self.head = head
        self.place = Place()
        self._embed = embed
        self._store = store
        self._device = next(head.parameters()).device
        self._draft_ids = draft_ids.to(self._device)
        self._settings = settings
        self._checkpoint = checkpoint
        in_bfloat16 = computes_in_bfloat16(settings.train_dtype, self._device)
        self._autocast = partial(torch.autocast, self._device.type, torch.bfloat16, enabled=in_bfloat16)
        self._optimizer = torch.optim.AdamW(
            head.parameters(), lr=settings.learning_rate, betas=BETAS, weight_decay=0.01, fused=True
        )
        self._epochs = [batches(store.texts, settings.batch_tokens, settings.seed, epoch) for epoch in range(settings.epochs)]
        if checkpoint.exists():
            self._load()

    @property
    def num_steps(self) -> int:
        """Steps of the optimizer in all."""
        return sum(map(len, self._epochs))

    @property
    def num_done(self) -> int:
        """Those that are done."""
        return sum(map(len, self._epochs[: self.place.epoch])) + self.place.batch

    def run(self, reporter: Reporter, stop: threading.Event) -> None:
        """Train to the end. Raises `KeyboardInterrupt` behind a step, the checkpoint written, once `stop` is set.

        Raises `EngineError` where the loss is no longer a number.
        """
        reporter.begin("training", self.num_done, self.num_steps)
        saved = time.monotonic()
        place = self.place
        while place.epoch < len(self._epochs):
            if place.batch == 0:
                place.tallies.append(Tally.empty(self._settings.unroll))
            loss = self._step(self._epochs[place.epoch][place.batch])
            place.batch += 1
            is_end = place.batch == len(self._epochs[place.epoch])
            if is_end:
                shown = place.tallies[-1].as_json()
                losses, right = (" ".join(f"{one:.2f}" for one in shown[name]) for name in ("loss", "accuracy"))
                reporter.line(f"epoch {place.epoch + 1} of {len(self._epochs)}: loss {losses}, right {right} (by step)")
                place.epoch, place.batch = place.epoch + 1, 0
            is_stopping = stop.is_set()  # asked once: what is not saved must not be left
            if is_end or is_stopping or time.monotonic() - saved >= SAVE_EVERY_S:
                self.save()
                saved = time.monotonic()
            reporter.at(self.num_done, f"loss {loss:.2f}")
            if is_stopping and place.epoch < len(self._epochs):
                raise KeyboardInterrupt
        reporter.end()

    def save(self) -> None:
        """Write the checkpoint."""
        place = self.place
        state = {
            "head": self.head.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "epoch": place.epoch,
            "batch": place.batch,
            "tallies": [[one.loss, one.kept, one.right, one.all] for one in place.tallies],
        }
        with replacing(self._checkpoint) as unfinished:
            torch.save(state, unfinished)

    def _step(self, indices: Sequence[int]) -> float:
        settings, texts = self._settings, self._store.texts
        rate = learning_rate(settings.learning_rate, self.num_done, self.num_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        rows = [self._store.rows(index) for index in indices]
        batch = Batch.of([texts[index] for index in indices], rows, settings.unroll, self._device)
        with self._autocast():
            loss = step_losses(self.head, batch, self._embed, self._draft_ids, settings.unroll, self.place.tallies[-1])
        self._optimizer.zero_grad(set_to_none=True)
        torch.autograd.backward((loss,))
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), MAX_NORM)
        value = loss.item()
        if not math.isfinite(value):
            raise EngineError(
                f"the loss must be a number, but is {value} at step {self.num_done}", hint="try a lower --learning-rate"
            )
        self._optimizer.step()
        return value

    def _load(self) -> None:
        try:
            state: dict[str, Any] = torch.load(self._checkpoint, map_location=self._device, weights_only=True)
            self.head.load_state_dict(state["head"])
            self._optimizer.load_state_dict(state["optimizer"])
            tallies = [Tally(*one) for one in state["tallies"]]
            self.place = Place(state["epoch"], state["batch"], tallies)
        except (OSError, RuntimeError, ValueError, LookupError, TypeError, pickle.UnpicklingError) as error:
            raise ModelError(
                f"{self._checkpoint} must be a checkpoint of this head, but is not: {str(error).splitlines()[0]}",
                hint=f"remove {self._checkpoint.parent} to train anew",
            ) from None
