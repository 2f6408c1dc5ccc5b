# SPDX-License-Identifier: Apache-2.0
"""The model `carryforward` of the LM Evaluation Harness (lm-eval): its Hugging Face model, reading texts of any length.

Texts are never truncated. A request is one document: it is read window by window, and the state is carried from its
first token to its last. Importing this module registers the model:

    import carryforward.evaluation.lm_eval
    lm_eval.simple_evaluate(model="carryforward", model_args={"pretrained": "my-model"}, tasks=["wikitext"])

`carryforward lm-eval` does the same on the command line. Needs the package lm-eval.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedModel

from ..models import argument_checks
from ..models.causal_lm import RecurrentForCausalLM
from ..models.loading import describe_causal, usable_device
from ..models.model_files import find
from ..utils.checks import check_count, check_flag
from ..utils.peft import get_recurrent_model
from ..windows import IGNORE
from .evaluate import window_and_overlap, wrap_plain
from .token_losses import ScoredWindows, score

_UNLIMITED = 10**12  # tokens; lm-eval truncates what is longer than its model's `max_length`
_Request = tuple[tuple[str, str] | None, list[int], list[int]]  # texts, tokens of the context, of the continuation


@register_model("carryforward")
class RecurrentLM(HFLM):
    """lm-eval's `HFLM` for recurrent models, and for plain ones, whose windows stand alone."""

    def __init__(
        self,
        pretrained: str | PreTrainedModel,
        *,
        use_state: bool = True,
        overlap: int | None = None,
        window: int | None = None,
        device: str | None = None,
        **kwargs: Any,
    ):
        """
        Args:
            pretrained: a recurrent or plain causal model, or its name.
            use_state: False removes the state: the control.
            overlap: tokens that consecutive windows share; by default that of the model, 0 for a plain one.
            window: tokens in a window, for plain models only; by default as in `carryforward evaluate`.
            device: by default a GPU if there is one.
            **kwargs: as for `HFLM`.
        """
        check_flag("use_state", use_state)
        check_count("overlap", overlap, 0, optional=True)
        check_count("window", window, optional=True)
        _refuse(kwargs)
        name, run = "pretrained", None
        if isinstance(pretrained, str):
            name = pretrained
            _, run = describe_causal(name)  # refuses encoders
            pretrained, more = find(name)
            kwargs |= {**more, "device": usable_device(device)}
        super().__init__(pretrained, **kwargs)
        model: Any = self.model
        if run is not None and not run["settings"].get("recurrence", True):
            model = getattr(model, "base", model)  # the recurrence was never trained
        window, own_overlap = window_and_overlap(name, get_recurrent_model(model).config, run, window)
        is_plain = not isinstance(get_recurrent_model(model), RecurrentForCausalLM)
        self.use_state = use_state and not is_plain
        self._model = wrap_plain(model, window) if is_plain else model
        if not isinstance(self._recurrent, RecurrentForCausalLM):
            raise ValueError(f"pretrained: a {type(self._model).__name__} cannot be read in windows. Use --model hf.")
        overlap = own_overlap or 0 if overlap is None else overlap
        self.overlap = argument_checks.check_overlap(self._recurrent.config, overlap)

    @property
    def max_length(self) -> int:
        """There is no longest text."""
        return _UNLIMITED

    @property
    def _recurrent(self) -> Any:
        return get_recurrent_model(self.model)

    def _loglikelihood_tokens(  # type: ignore[override]
        self, requests: Sequence[_Request], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """The log-likelihood of each continuation, and whether greedy search would give it.

        Requests that differ in their last token alone, such as a choice among letters, are read once.
        """
        groups: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, continuation) in enumerate(requests):
            groups.setdefault((*context, *continuation[:-1]), []).append(index)
        longest_first = sorted(groups, key=len, reverse=True)
        answers: dict[int, tuple[float, bool]] = {}
        size = int(override_bs or self.batch_size)
        with tqdm(total=len(requests), desc="Scoring", disable=disable_tqdm or self.rank != 0) as bar:
            for begin in range(0, len(longest_first), size):
                texts = longest_first[begin : begin + size]
                documents = [[*text, requests[groups[text][0]][2][-1]] for text in texts]
                for text, scores in zip(texts, self._score(documents), strict=True):
                    for index in groups[text]:
                        strings, context, continuation = requests[index]
                        answers[index] = scores.continuation(len(context), continuation[-1])
                        if strings is not None:  # None: part of a rolling log-likelihood
                            self.cache_hook.add_partial("loglikelihood", strings, answers[index])
                    bar.update(len(groups[text]))
        return [answers[index] for index in range(len(requests))]

    @torch.no_grad()
    def _score(self, documents: list[list[int]]) -> list["_TokenScores"]:
        """Read a batch of documents."""
        scores = [_TokenScores(len(document)) for document in documents]

        def consume(scored: ScoredWindows) -> None:
            scored.put(-scored.losses(), [one.log_likelihoods for one in scores])
            scored.put(scored.logits.argmax(dim=-1) == scored.targets, [one.is_greedy for one in scores])
            for row, (document, window) in enumerate(zip(scored.documents, scored.windows, strict=True)):
                if window.score_to == len(documents[document]):
                    last = int((scored.targets[row] != IGNORE).nonzero()[-1])
                    scores[document].last = scored.logits[row, last].log_softmax(dim=-1).cpu()

        with self._autocast():
            score(
                self._recurrent, documents, consume,
                overlap=self.overlap, use_state=self.use_state, batch_size=len(documents),
            )  # fmt: skip
        return scores

    def _autocast(self) -> AbstractContextManager:
        dtype = self.mixed_precision_dtype
        return torch.autocast(self.device.type, dtype, enabled=dtype is not None)

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **settings: Any) -> Tensor:
        return super()._model_generate(
            context, max_length, stop, overlap=self.overlap, use_state=self.use_state, **settings
        )


class _TokenScores:
    """The scores of a document's n tokens.

    Attributes:
        log_likelihoods: of each token, [n]; that of the first is not known.
        is_greedy: whether each token is the most likely one, [n].
        last: the log-probabilities of all tokens in the last place, [V].
    """

    def __init__(self, length: int):
        self.log_likelihoods = np.full(length, np.nan)
        self.is_greedy = np.zeros(length, dtype=bool)
        self.last = torch.empty(0)

    def continuation(self, start: int, last: int) -> tuple[float, bool]:
        """The summed log-likelihood of the tokens from `start` on, with `last` in the last place, and whether all are
        the most likely ones."""
        total = self.log_likelihoods[start:-1].sum() + float(self.last[last])
        return float(total), bool(self.is_greedy[start:-1].all() and int(self.last.argmax()) == last)


def _refuse(arguments: dict[str, Any]) -> None:
    """Refuse what lets lm-eval truncate texts, or presumes that they have a longest length."""
    for name in ("max_length", "truncation"):
        if arguments.get(name):
            raise ValueError(f"{name}={arguments[name]!r}: texts are not truncated. Leave it out.")
    if str(arguments.get("batch_size")).startswith("auto"):
        raise ValueError(
            f"batch_size={arguments['batch_size']!r} would be measured with a longest text, and there is none. Give a "
            "number of texts."
        )
