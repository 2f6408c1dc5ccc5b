# SPDX-License-Identifier: Apache-2.0
"""The arms of `settings.yaml`: a model that reads documents in some way, and how its vectors are made."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from transformers import AutoModel, AutoTokenizer

import carryforward as cf
from carryforward.embeddings.modules import read_modules

Spans = list[tuple[int, int]]


@dataclass(frozen=True)
class Arm:
    """How documents are read.

    Attributes:
        window, overlap, memory: of `add_recurrence`; without a memory, windows are independent.
        use_state: False removes the state.
        alone: every chunk is a text of its own.
    """

    name: str
    window: int
    overlap: int = 0
    memory: dict[str, Any] | None = None
    use_state: bool = True
    alone: bool = False

    def fields(self) -> dict[str, Any]:
        """As results record it."""
        return asdict(self)


class Reader:
    """A model that reads documents as an arm says; vectors are pooled and normalized as its folder says."""

    def __init__(self, folder: str, arm: Arm, *, device: str, batch_size: int):
        self.arm, self.tokenizer = arm, AutoTokenizer.from_pretrained(folder)
        base = AutoModel.from_pretrained(folder).eval().to(device)
        self.model = cf.add_recurrence(
            base, tokenizer=self.tokenizer, window=arm.window, overlap=arm.overlap, memory=arm.memory or "vector"
        )
        self.how: dict[str, Any] = {**read_modules(folder).choose(), "batch_size": batch_size}
        self.how["use_state"] = arm.use_state and arm.memory is not None

    def encode(self, texts: Sequence[str], **others: Any) -> Any:
        """The vectors of `cf.encode`."""
        return cf.encode(self.model, texts, self.tokenizer, **self.how | others)

    def chunks(self, texts: Sequence[str], spans: Sequence[Spans]) -> np.ndarray:
        """The vectors of all chunks of all documents, [C, k]."""
        if self.arm.alone:
            return self.encode([text[a:b] for text, ends in zip(texts, spans, strict=True) for a, b in ends])
        return np.concatenate([one.vectors for one in self.encode(texts, output="chunks", chunks=spans)])


def arms_of(settings: dict[str, Any], names: Sequence[str] | None = None) -> list[Arm]:
    """The arms of the settings, or some of them."""
    known = [Arm(name, **fields) for name, fields in settings["arms"].items()]
    unknown = set(names or ()) - {arm.name for arm in known}
    if unknown:
        raise SystemExit(f"--only {' '.join(sorted(unknown))}: the arms are {', '.join(arm.name for arm in known)}.")
    return [arm for arm in known if not names or arm.name in names]
