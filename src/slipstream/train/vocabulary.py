"""Which of the target's tokens the head can say. Fewer of them make its largest product small; the rest it never drafts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from slipstream.train.features import Text


@dataclass(frozen=True, slots=True)
class DraftVocabulary:
    """The kept ids.

    Attributes:
        target_ids: [D] int64, rising: the target's id of each draft token.
        vocab_size: of the target.
        coverage: share of the answers' tokens that are kept.
    """

    target_ids: Tensor
    vocab_size: int
    coverage: float

    def draft_ids(self) -> Tensor:
        """[vocab_size] int64: the draft token of each of the target's ids, -1 where it has none."""
        ids = torch.full((self.vocab_size,), -1)
        return ids.index_copy_(0, self.target_ids, torch.arange(len(self.target_ids)))


def choose_vocabulary(
    texts: Sequence[Text], size: int, eos_token_ids: Collection[int], num_known_ids: int, vocab_size: int
) -> DraftVocabulary:
    """The most frequent ids of the answers, those that end an answer always among them.

    Of two that are as frequent the lower one comes first. Where the answers have fewer ids than are wanted, the prompts' most
    frequent ones come next, then the lowest.

    Args:
        texts: prompts and answers.
        size: most ids to keep.
        eos_token_ids: ids that end an answer.
        num_known_ids: ids below it stand for something.
        vocab_size: rows of the target's head.
    """
    answers = Counter(token for text in texts for token in text.token_ids[text.prompt_len :])
    prompts = Counter(token for text in texts for token in text.token_ids[: text.prompt_len])
    ranked = [token for counts in (answers, prompts) for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))]
    ends = sorted(token for token in eos_token_ids if token < num_known_ids)
    order = dict.fromkeys([*ends, *(token for token in ranked if token < num_known_ids), *range(num_known_ids)])
    kept = sorted(list(order)[: max(size, len(ends) + 1)])
    covered = sum(answers[token] for token in kept) / max(1, answers.total())
    return DraftVocabulary(torch.tensor(kept), vocab_size, covered)
