# SPDX-License-Identifier: Apache-2.0
"""Tasks in words: facts among the sentences of a text, a question at the end. Sizes count tokens, exactly."""

import functools
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ..models.causal_lm import RecurrentForCausalLM
from .base import Samples, Task, check_size, generator, label_answers
from .filler import Filler


@dataclass(frozen=True)
class Story:
    """What a document hides.

    Attributes:
        facts: sentences, in their order.
        question: what stands behind the text, up to the answer.
        answer: it, with the space in front.
        needed: the first of the facts that the answer needs.
        depth: where the fact is to stand, from 0 to 1; None: facts stand anywhere.
    """

    facts: Sequence[str]
    question: str
    answer: str
    needed: int = 0
    depth: float | None = None


class TextTask(Task):
    """A task in words, for a model with a tokenizer.

    Attributes:
        filler: the sentences between which facts are strewn.
    """

    unit: ClassVar[str] = "tokens"
    train_sizes = (512, 1024, 2048, 4096)
    test_sizes = tuple(1024 * 2**power for power in range(8))

    def __init__(self, tokenizer: Any, filler: Filler):
        self.tokenizer, self.filler = tokenizer, filler
        self.encode = functools.lru_cache(maxsize=4096)(self._encode)

    @abstractmethod
    def story(self, rng: np.random.Generator) -> Story:
        """What a document hides."""

    def length(self, size: int) -> int:
        return size

    def check_model(self, model: RecurrentForCausalLM) -> None:
        super().check_model(model)
        if len(self.tokenizer) > model.get_input_embeddings().weight.shape[0]:
            raise ValueError(f"model has fewer tokens than the tokenizer of {self.name}: use the model's own one.")

    def samples(self, size: int, count: int, seed: Sequence[int]) -> Samples:
        check_size(self, size, count)
        rng, sentences = generator(seed), self.filler.sentences[seed[0]]
        ids, answers = np.zeros((count, size), dtype=np.int64), np.zeros((count, size), dtype=bool)
        depths = np.zeros(count)
        for row in range(count):
            story = self.story(rng)
            facts = [self.encode(f" {fact}") for fact in story.facts]
            question, answer = self.encode(story.question), self.encode(story.answer)
            room = size - sum(map(len, (*facts, question, answer)))
            if room < 0:
                raise ValueError(f"size={size}: a question and its facts take {size - room} tokens. Use a larger size.")
            text, place = strew(rng, facts, sentences.draw(rng, room), story)
            ids[row] = np.concatenate([*text, question, answer])
            answers[row, size - len(answer) :] = True
            depths[row] = place / size
        return Samples(*label_answers(ids, answers), torch.from_numpy(depths))

    def _encode(self, text: str) -> np.ndarray:
        return np.array(self.tokenizer(text, add_special_tokens=False)["input_ids"], dtype=np.int64)


def strew(
    rng: np.random.Generator, facts: list[np.ndarray], sentences: list[np.ndarray], story: Story
) -> tuple[list[np.ndarray], int]:
    """Facts, in their order, among sentences; and the number of tokens before the first one that is needed."""
    gaps = np.sort(rng.integers(len(sentences) + 1, size=len(facts)))
    if story.depth is not None:  # the gap that is closest to this share of the text
        ends = np.cumsum([0, *map(len, sentences)])
        gaps[:] = np.abs(ends - story.depth * ends[-1]).argmin()
    text: list[np.ndarray] = []
    before = place = 0
    for number, (gap, fact) in enumerate(zip(gaps, facts, strict=True)):
        text += sentences[before:gap]
        before = gap
        if number == story.needed:
            place = sum(map(len, text))
        text.append(fact)
    return [*text, *sentences[before:]], place
