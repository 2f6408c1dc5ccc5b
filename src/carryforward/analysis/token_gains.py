# SPDX-License-Identifier: Apache-2.0
"""Measure how the state changes the prediction of each token of a text, for a notebook or for `html_report`.

    tokens = measure_token_gains(model, ids)
    pandas.DataFrame(tokens.columns())  # a row for each token
    tokens.attention  # [layers, heads]
    summary(tokens), by_position(tokens), by_window(tokens)  # rows for a DataFrame
    by_kind(tokens, classes), by_token(tokens, classes)  # with `classes = word_classes.classify(...)`
    corrected(tokens, classes)  # words that are predicted with the state only
    draw(tokens).savefig("gains.png")

The *gain* of a token is its log-probability with the state minus that with the state removed, in nats.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from .. import windows
from ..backbones.attention import recording_attention
from ..evaluation.token_losses import ScoredWindows, checked_overlap, score
from ..memories.vector import VectorMemory, VectorMemoryConfig
from ..models.causal_lm import RecurrentForCausalLM
from ..utils.plotting import COLOURS, new_figure, style_axes
from ..windows import Window
from .word_classes import INSIDE, KINDS, SEEN, WordClasses

Row = dict[str, Any]
_POSITION_BINS = 32


@dataclass(frozen=True)
class Predictions:
    """A model's predictions of the tokens of a text. The first token is not predicted: NaN and 0.

    Attributes:
        log_probs: log-probability of each token, [N], in nats.
        top_ids, top_log_probs: the k most probable tokens at each position, in descending order, [N, k].
    """

    log_probs: np.ndarray
    top_ids: np.ndarray
    top_log_probs: np.ndarray

    @property
    def perplexity(self) -> float:
        """Perplexity per token."""
        return math.exp(-float(np.nanmean(self.log_probs)))


@dataclass(frozen=True)
class TokenGains:
    """Predictions of a text with the state and with the state removed.

    Attributes:
        ids: the tokens, [N].
        with_state, without: the predictions.
        windows: the windows in which the text was read. A token belongs to the window that predicts it.
        attention: attention of each head to everything that is carried, [L, H]: mean over the tokens that are
            predicted with a state. NaN in layers that the state does not enter.
        layer_weights: weights of the layers in the pooled vector (equation 1), [L]; None if layers are not mixed.
    """

    ids: np.ndarray
    with_state: Predictions
    without: Predictions
    windows: list[Window]
    attention: np.ndarray
    layer_weights: np.ndarray | None

    @property
    def gain(self) -> np.ndarray:
        """Gain of each token, [N]."""
        return self.with_state.log_probs - self.without.log_probs

    @property
    def window(self) -> np.ndarray:
        """Index of each token's window, [N]; window 0 has no state."""
        indices = np.zeros(len(self.ids), dtype=np.int64)
        for index, window in enumerate(self.windows):
            indices[window.score_from : window.score_to] = index
        return indices

    @property
    def position(self) -> np.ndarray:
        """Position of each token among those that its window predicts, from 0, [N]; -1 for the first token."""
        positions = np.full(len(self.ids), -1)
        for window in self.windows:
            positions[window.score_from : window.score_to] = np.arange(window.score_to - window.score_from)
        return positions

    @property
    def stateful(self) -> np.ndarray:
        """Whether each token is predicted with a state, [N]."""
        return self.window > 0

    def columns(self) -> dict[str, np.ndarray]:
        """Columns of a table with a row for each token."""
        return {
            "token": self.ids,
            "window": self.window,
            "position": self.position,
            "with_state": self.with_state.log_probs,
            "without": self.without.log_probs,
            "gain": self.gain,
        }


def measure_token_gains(
    model: RecurrentForCausalLM,
    ids: Sequence[int] | np.ndarray,
    *,
    top: int = 5,
    overlap: int | None = None,
    progress: Callable[[int], object] = lambda scored: None,
) -> TokenGains:
    """Read a text twice, with the state and with the state removed.

    Args:
        ids: the tokens, at least two windows.
        top: how many of the most probable tokens to record at each position.
        overlap: an overlap other than the model's own.
        progress: called with the number of tokens just scored, in both passes.
    """
    overlap = checked_overlap(model, overlap)
    _check_arguments(model, len(ids), top, overlap)
    recurrence = model.config.recurrence
    heads = _AttentionMean(model.config.base_config)

    def predict(use_state: bool) -> Predictions:
        shape = len(ids), top
        predictions = Predictions(np.full(len(ids), np.nan), np.zeros(shape, np.int64), np.full(shape, np.nan))

        def take(scored: ScoredWindows) -> None:
            scored.put(-scored.losses(), [predictions.log_probs])
            best = scored.logits.log_softmax(dim=-1).topk(top)
            scored.put(best.indices, [predictions.top_ids])
            scored.put(best.values, [predictions.top_log_probs])
            heads.add(scored)

        score(model, [ids], take, overlap=overlap, use_state=use_state, record_attention=use_state, progress=progress)
        return predictions

    # the same attention implementation for both passes: they must differ in the state only
    with recording_attention(model.backbone.config):
        with_state, without = predict(True), predict(False)
    if not np.isfinite([with_state.log_probs[1:], without.log_probs[1:]]).all():
        raise ArithmeticError("the model's log-probabilities are not finite: its weights are NaN or much too large.")
    layer_weights = None
    vector = model.memory.get(VectorMemoryConfig.kind)
    if isinstance(vector, VectorMemory) and vector.config.pooled_layers == "all":
        layer_weights = vector.layer_weights.detach().float().cpu().numpy()
    return TokenGains(
        ids=np.asarray(ids),
        with_state=with_state,
        without=without,
        windows=list(windows.schedule(len(ids), recurrence.window, overlap)),
        attention=heads.mean(),
        layer_weights=layer_weights,
    )


def _check_arguments(model: RecurrentForCausalLM, length: int, top: int, overlap: int) -> None:
    window, vocabulary = model.config.recurrence.window, model.config.base_config.vocab_size
    if not 1 <= top <= vocabulary:
        raise ValueError(f"top={top}: it must be from 1 to the {vocabulary:,} tokens of the vocabulary.")
    least = max(2 * window - overlap, window + 2)  # so that the second window predicts at least one token
    if length < least:
        raise ValueError(
            f"the text has {length:,} tokens, fewer than two windows ({least:,}): the second window is the first one "
            "with a state. Give a longer text."
        )


class _AttentionMean:
    """Mean attention of each head to the state, over all predicted tokens."""

    def __init__(self, config: Any):
        self.total = np.full((config.num_hidden_layers, config.num_attention_heads), np.nan)
        self.tokens = 0

    def add(self, scored: ScoredWindows) -> None:
        if not scored.attention:
            return
        predicted = (scored.targets >= 0) & torch.tensor(scored.has_state, device=scored.targets.device)[:, None]
        for layer, weights in scored.attention.items():
            total = (weights.double() * predicted[:, None].to(weights.device)).sum(dim=(0, 2)).cpu().numpy()
            self.total[layer - 1] = np.nan_to_num(self.total[layer - 1]) + total
        self.tokens += int(predicted.sum())

    def mean(self) -> np.ndarray:
        return self.total / self.tokens


def summary(tokens: TokenGains) -> Row:
    """Figures of the whole text; gains are means over the tokens that are predicted with a state."""
    gains = tokens.gain[tokens.stateful]
    return {
        "tokens": len(tokens.ids),
        "windows": len(tokens.windows),
        "perplexity": tokens.with_state.perplexity,
        "perplexity_without": tokens.without.perplexity,
        "gain": float(gains.mean()),
        "helped": float((gains > 0).mean()),
    }


def by_position(tokens: TokenGains) -> list[Row]:
    """Mean gain by position in the window, over the windows that have a state."""
    position = tokens.position
    width = max(-(-int(position[tokens.stateful].max() + 1) // _POSITION_BINS), 1)
    return _means(tokens, position // width, lambda group: {"from": group * width, "to": (group + 1) * width})


def by_window(tokens: TokenGains) -> list[Row]:
    """Mean gain of each window that has a state, by the window's index from 0."""
    return _means(tokens, tokens.window, lambda group: {"window": group})


def by_kind(tokens: TokenGains, classes: WordClasses) -> list[Row]:
    """Mean gain by kind of word, and by whether the word is new, was seen in this window, or only in earlier ones."""
    rows = []
    for kind, kind_name in enumerate(KINDS):
        for seen, seen_name in ((None, "all"), *enumerate(SEEN)):
            chosen = tokens.stateful & (classes.kinds == kind) & (True if seen is None else classes.seen == seen)
            if chosen.any():
                rows.append({"kind": kind_name, "seen": seen_name, **_sums(tokens.gain[chosen])})
    return rows


def by_token(tokens: TokenGains, classes: WordClasses) -> list[Row]:
    """Total gain of each word or sign over its occurrences, ignoring case; the largest comes first.

    All tokens of a word are included; `places` are the first token of each occurrence.
    """
    occurrences: dict[str, list[int]] = {}
    for i in np.flatnonzero(tokens.stateful).tolist():
        if classes.words[i]:
            occurrences.setdefault(classes.words[i].casefold(), []).append(i)
    gain = tokens.gain
    rows = []
    for indices in occurrences.values():
        spelling = Counter(classes.words[i] for i in indices).most_common(1)[0][0]
        # a word that the border between the first two windows cuts may have no first token here
        first_tokens = [i for i in indices if classes.kinds[i] != INSIDE] or indices
        rows.append({"word": spelling, "places": first_tokens, "times": len(first_tokens), **_sums(gain[indices])})
    return sorted(rows, key=lambda row: (-row["total"], row["word"]))


def corrected(tokens: TokenGains, classes: WordClasses) -> list[list[int]]:
    """Words each of whose tokens is the most probable one with the state, but not without it; the largest gain first.

    Returns:
        The indices of each word's tokens.
    """
    with_state, without = (side.top_ids[:, 0] == tokens.ids for side in (tokens.with_state, tokens.without))
    starts = np.flatnonzero(classes.kinds != INSIDE).tolist()
    words = [range(start, stop) for start, stop in pairwise([*starts, len(tokens.ids)])]
    found = [
        [*word]
        for word in words
        if classes.words[word[0]] and tokens.stateful[word[0]] and with_state[word].all() and not without[word].all()
    ]
    return sorted(found, key=lambda word: -float(tokens.gain[word].sum()))


def draw(tokens: TokenGains) -> Any:
    """Draw a matplotlib figure: gain by position, gain by window, and attention to the state, if any is paid to it."""
    attended = not np.isnan(tokens.attention).all()
    figure, (position_axes, window_axes, *attention_axes) = new_figure(2 + attended)
    positions, numbers = by_position(tokens), by_window(tokens)
    position_axes.plot(
        [row["from"] for row in positions], [row["gain"] for row in positions], color=COLOURS[0], marker="o"
    )
    window_axes.bar([row["window"] + 1 for row in numbers], [row["gain"] for row in numbers], color=COLOURS[0])
    for axes, quantity in ((position_axes, "position in the window"), (window_axes, "window number")):
        style_axes(axes, f"Gain by {quantity}", quantity, "gain in nats per token")
        axes.axhline(0, color="#454545", linewidth=0.8)
    for axes in attention_axes:
        _draw_attention(axes, tokens.attention)
    return figure


def _draw_attention(axes: Any, attention: np.ndarray) -> None:
    style_axes(axes, "Attention to the state", "head", "layer")
    layers, heads = attention.shape
    edges = (0.5, heads + 0.5, layers + 0.5, 0.5)
    image = axes.imshow(attention, cmap="Blues", aspect="auto", vmin=0, extent=edges)
    axes.figure.colorbar(image, ax=axes)
    axes.locator_params(integer=True)
    axes.grid(False)


def _means(tokens: TokenGains, groups: np.ndarray, describe: Callable[[int], Row]) -> list[Row]:
    """Mean gain of each group of tokens; `describe` gives the columns that identify a group."""
    chosen = tokens.stateful
    present, index = np.unique(groups[chosen], return_inverse=True)
    counts, totals = np.bincount(index), np.bincount(index, weights=tokens.gain[chosen])
    return [
        {**describe(group), "tokens": count, "gain": total / count, "total": total}
        for group, count, total in zip(present.tolist(), counts.tolist(), totals.tolist(), strict=True)
    ]


def _sums(gains: np.ndarray) -> Row:
    return {"tokens": len(gains), "gain": float(gains.mean()), "total": float(gains.sum())}
