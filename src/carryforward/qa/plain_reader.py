# SPDX-License-Identifier: Apache-2.0
"""Reads documents with a question-answering model that has no recurrence, in overlapping windows.

It gives what `RecurrentForQuestionAnswering` gives, for any of transformers' question-answering encoders: nothing is
added to the model, so that recurrence need not support its type. Where windows overlap, a token's scores are those of
the window in which it lies farthest from an edge.
"""

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..models.add_recurrence import pair_tokens
from ..models.argument_checks import token_lists
from ..models.question_answering import AnswerOutput
from ..windows import Window, encoder_schedule

_WINDOW, _OVERLAP = 384, 128  # at most, if the user gives none


class PlainReader:
    """A plain question-answering model and its tokenizer."""

    def __init__(self, model: PreTrainedModel, tokenizer: Any):
        self.model = model
        self.prefix, self.separator, self.suffix = pair_tokens(tokenizer)
        pair = tokenizer("a", "a")
        types = pair.get("token_type_ids")
        size = (len(pair["input_ids"]) - len(self.prefix) - len(self.separator) - len(self.suffix)) // 2
        sizes = [len(self.prefix), size, len(self.separator), size, len(self.suffix)]
        starts = [sum(sizes[:i]) for i in range(len(sizes))]
        self._types = None if types is None else [[*types, 0][start] for start in starts]  # of each part of a window
        self._filler = getattr(tokenizer, "pad_token_id", None) or 0
        self._longest = min(tokenizer.model_max_length, _WINDOW)

    def window_of(self, question_length: int, max_seq_len: int | None, doc_stride: int | None) -> tuple[int, int]:
        """Window and overlap for a question; those that leave no room for the document are refused."""
        window = self._longest if max_seq_len is None else max_seq_len
        special = len(self.prefix) + len(self.separator) + len(self.suffix)
        room = window - special - question_length
        overlap = max(min(_OVERLAP, window // 2, room // 2), 0) if doc_stride is None else doc_stride
        if room <= overlap or overlap < 0:
            raise ValueError(
                f"max_seq_len={window}, doc_stride={overlap}: beside a question of {question_length} tokens and "
                f"{special} special ones, a window has room for {max(room, 0)} tokens of the context, and needs more "
                "than doc_stride. Use a larger max_seq_len, a smaller doc_stride, or a shorter question."
            )
        return window, overlap

    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        question_ids: Tensor,
        question_mask: Tensor,
        max_seq_len: int | None = None,
        doc_stride: int | None = None,
    ) -> AnswerOutput:
        """Scores of documents' tokens, -inf at padding; arguments as those of a recurrent model."""
        documents, questions = token_lists("input_ids", input_ids), token_lists("question_ids", question_ids)
        logits = torch.full((*input_ids.shape, 2), -torch.inf)
        lowest = torch.full((len(documents), 2), torch.inf)
        windows: list[tuple[int, list[int], list[int], Window]] = []
        for row, (document, question) in enumerate(zip(documents, questions, strict=True)):
            real = [token for token, keep in zip(document, attention_mask[row].tolist(), strict=True) if keep]
            question = [token for token, keep in zip(question, question_mask[row].tolist(), strict=True) if keep]
            window, overlap = self.window_of(len(question), max_seq_len, doc_stride)
            before = len(self.prefix) + len(question) + len(self.separator)
            schedule = encoder_schedule(len(real), window, overlap, prefix=before, suffix=len(self.suffix))
            windows += [(row, question, real, one) for one in schedule]
        columns = [mask.nonzero()[:, 0] for mask in attention_mask.cpu()]
        for begin in range(0, len(windows), len(documents)):
            part = windows[begin : begin + len(documents)]
            scores = self._read([(question, real[w.start : w.end]) for _, question, real, w in part])
            for (row, question, _, w), score in zip(part, scores, strict=True):
                shift = len(self.prefix) + len(question) + len(self.separator) - w.start
                logits[row, columns[row][w.score_from : w.score_to]] = score[w.score_from + shift : w.score_to + shift]
                lowest[row] = torch.minimum(lowest[row], score[0])
        starts, ends = logits.unbind(-1)
        return AnswerOutput(start_logits=starts, end_logits=ends, null_logits=lowest if self.prefix else None)

    def _read(self, pairs: list[tuple[list[int], list[int]]]) -> Tensor:
        """Start and end scores of every position of some windows, [n, width, 2]."""
        rows, types = [], []
        for question, document in pairs:
            parts = [self.prefix, question, self.separator, document, self.suffix]
            rows.append([token for part in parts for token in part])
            if self._types is not None:
                types.append([kind for part, kind in zip(parts, self._types, strict=True) for _ in part])
        width = max(map(len, rows))
        inputs = {"input_ids": [row + [self._filler] * (width - len(row)) for row in rows]}
        inputs["attention_mask"] = [[1] * len(row) + [0] * (width - len(row)) for row in rows]
        if types:
            inputs["token_type_ids"] = [row + [0] * (width - len(row)) for row in types]
        out = self.model(**{name: torch.tensor(value, device=self.model.device) for name, value in inputs.items()})
        return torch.stack([out.start_logits, out.end_logits], dim=-1).float().cpu()
