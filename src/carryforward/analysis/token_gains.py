# SPDX-License-Identifier: Apache-2.0
"""What the state does to each token of a text: numbers, for a notebook or for the page (`page`).

    found = inspect(model, ids)
    pandas.DataFrame(found.columns())  # a row for each token
    found.attention  # [layers, heads]
    summary(found), by_position(found), by_window(found)  # rows for a DataFrame
    by_kind(found, words), by_token(found, words)  # `words.classify` says what the tokens are
    draw(found).savefig("carried.png")

A *gain* is a log-probability with the state minus the one with the state removed, in nats.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import windows
from ..backbones.attention import recording_attention
from ..evaluation.token_losses import Scored, checked_overlap, score
from ..models.causal_lm import RecurrentForCausalLM
from ..utils.plotting import COLOURS, dress, empty
from ..windows import Window
from .word_classes import INSIDE, KINDS, SEEN, Words

Row = dict[str, Any]
_POSITIONS = 32  # points of gain against position


@dataclass(frozen=True)
class Side:
    """What the model expects, with the state or without it; NaN and 0 at the first token, which nothing predicts.

    Attributes:
        log_probs: of the tokens that came, [N], in nats.
        top_ids, top_log_probs: the likeliest tokens, the best first, [N, k].
    """

    log_probs: np.ndarray
    top_ids: np.ndarray
    top_log_probs: np.ndarray

    @property
    def perplexity(self) -> float:
        """Of the tokens."""
        return math.exp(-float(np.nanmean(self.log_probs)))


@dataclass(frozen=True)
class Inspection:
    """A text as a model reads it.

    Attributes:
        ids: its tokens, [N].
        with_state, without: what the model expects.
        windows: how it was read. A token belongs to the window that answers for it.
        attention: what each head pays to all that is carried, [L, H]: the mean over tokens predicted with a state. NaN
            in layers that it does not enter.
        layer_weights: of the pooling (equation 1), [L], where it has some.
    """

    ids: np.ndarray
    with_state: Side
    without: Side
    windows: list[Window]
    attention: np.ndarray
    layer_weights: np.ndarray | None

    @property
    def gain(self) -> np.ndarray:
        return self.with_state.log_probs - self.without.log_probs

    @property
    def window(self) -> np.ndarray:
        """The number of each token's window, from 0; the first one has no state."""
        numbers = np.zeros(len(self.ids), dtype=np.int64)
        for number, one in enumerate(self.windows):
            numbers[one.score_from : one.score_to] = number
        return numbers

    @property
    def position(self) -> np.ndarray:
        """Where each token stands among those its window answers for, from 0; -1 for the first token of the text."""
        places = np.full(len(self.ids), -1)
        for one in self.windows:
            places[one.score_from : one.score_to] = np.arange(one.score_to - one.score_from)
        return places

    @property
    def stateful(self) -> np.ndarray:
        """Which tokens are predicted with a state, [N]."""
        return self.window > 0

    def columns(self) -> dict[str, np.ndarray]:
        """A row for each token."""
        return {
            "token": self.ids,
            "window": self.window,
            "position": self.position,
            "with_state": self.with_state.log_probs,
            "without": self.without.log_probs,
            "gain": self.gain,
        }


def inspect(
    model: RecurrentForCausalLM,
    ids: Sequence[int] | np.ndarray,
    *,
    top: int = 5,
    overlap: int | None = None,
    progress: Callable[[int], object] = lambda scored: None,
) -> Inspection:
    """Read a text with the state and with it removed.

    Args:
        ids: its tokens, at least two windows of them.
        top: how many of the likeliest tokens.
        overlap: another than the model was made for.
        progress: called with the number of tokens just scored; there are two passes.
    """
    overlap = checked_overlap(model, overlap)
    recurrence, base = model.config.recurrence, model.config.base_config
    if not 1 <= top <= base.vocab_size:
        raise ValueError(f"top={top}: it must be from 1 to the {base.vocab_size:,} tokens of the vocabulary.")
    least = max(2 * recurrence.window - overlap, recurrence.window + 2)  # one of them predicted by the second
    if len(ids) < least:
        raise ValueError(
            f"the text has {len(ids):,} tokens, fewer than two windows ({least:,}): a state is first used in the "
            "second. Give a longer text."
        )
    attention, watched = np.full((base.num_hidden_layers, base.num_attention_heads), np.nan), 0

    def side(use_state: bool) -> Side:
        found = Side(np.full(len(ids), np.nan), np.zeros((len(ids), top), np.int64), np.full((len(ids), top), np.nan))

        def take(scored: Scored) -> None:
            nonlocal watched
            scored.put(-scored.losses(), [found.log_probs])
            best = scored.logits.log_softmax(dim=-1).topk(top)
            scored.put(best.indices, [found.top_ids])
            scored.put(best.values, [found.top_log_probs])
            at = scored.targets[0] >= 0
            for layer, paid in scored.paid.items():
                total = paid[0][:, at.to(paid.device)].double().sum(dim=-1).cpu().numpy()
                attention[layer - 1] = np.nan_to_num(attention[layer - 1]) + total
            watched += int(at.sum()) if scored.paid else 0

        score(model, [ids], take, overlap=overlap, use_state=use_state, watch=use_state, progress=progress)
        return found

    with recording_attention(model.backbone.config):  # for both: what does not come from the state must not differ
        with_state, without = side(True), side(False)
    if not np.isfinite([with_state.log_probs[1:], without.log_probs[1:]]).all():
        raise ArithmeticError("the model gives no finite likelihoods: its weights hold NaN or are far too large.")
    mixed = recurrence.slots and recurrence.pooled_layers == "all"
    return Inspection(
        ids=np.asarray(ids),
        with_state=with_state,
        without=without,
        windows=list(windows.schedule(len(ids), recurrence.window, overlap)),
        attention=attention / watched,
        layer_weights=model.recurrence.layer_weights.detach().float().cpu().numpy() if mixed else None,
    )


def summary(found: Inspection) -> Row:
    """The figures of the whole text; gains are those of tokens that are predicted with a state."""
    gains = found.gain[found.stateful]
    return {
        "tokens": len(found.ids),
        "windows": len(found.windows),
        "perplexity": found.with_state.perplexity,
        "perplexity_without": found.without.perplexity,
        "gain": float(gains.mean()),
        "helped": float((gains > 0).mean()),
    }


def by_position(found: Inspection) -> list[Row]:
    """Mean gain by position among the tokens that a window answers for, over windows that have a state."""
    position = found.position
    step = max(-(-int(position[found.stateful].max() + 1) // _POSITIONS), 1)
    return _means(found, position // step, lambda group: {"from": group * step, "to": (group + 1) * step})


def by_window(found: Inspection) -> list[Row]:
    """Mean gain of each window that has a state, by its number from 0."""
    return _means(found, found.window, lambda group: {"window": group})


def by_kind(found: Inspection, words: Words) -> list[Row]:
    """Mean gain of each kind of word, and of those that are new, were seen before, or only in earlier windows."""
    rows = []
    for number, name in enumerate(KINDS):
        for seen, told in ((None, "all"), *enumerate(SEEN)):
            chosen = found.stateful & (words.kinds == number) & (True if seen is None else words.seen == seen)
            if chosen.any():
                rows.append({"kind": name, "seen": told, **_sums(found.gain[chosen])})
    return rows


def by_token(found: Inspection, words: Words) -> list[Row]:
    """What the occurrences of each word or sign gain in all, small and large letters alike, the most first. Pieces
    inside a word count to it; `places` are the first pieces."""
    occurrences: dict[str, list[int]] = {}
    for i in np.flatnonzero(found.stateful).tolist():
        if words.words[i]:
            occurrences.setdefault(words.words[i].casefold(), []).append(i)
    gain = found.gain
    rows = []
    for places in occurrences.values():
        spelt = Counter(words.words[i] for i in places).most_common(1)[0][0]
        begins = [i for i in places if words.kinds[i] != INSIDE] or places  # a word that the first border cuts has none
        rows.append({"word": spelt, "places": begins, "times": len(begins), **_sums(gain[places])})
    return sorted(rows, key=lambda row: (-row["total"], row["word"]))


def draw(found: Inspection) -> Any:
    """A matplotlib figure: gain against position and against window number, attention paid to what is carried."""
    drawn, (place, number, heads) = empty(3)
    positions, numbers = by_position(found), by_window(found)
    place.plot([row["from"] for row in positions], [row["gain"] for row in positions], color=COLOURS[0], marker="o")
    number.bar([row["window"] + 1 for row in numbers], [row["gain"] for row in numbers], color=COLOURS[0])
    for axes, across in ((place, "position in the window"), (number, "number of the window")):
        dress(axes, f"Gain against {across}", across, "gain in nats per token")
        axes.axhline(0, color="#454545", linewidth=0.8)
    dress(heads, "Attention paid to what is carried", "head", "layer")
    layers, count = found.attention.shape
    edges = (0.5, count + 0.5, layers + 0.5, 0.5)
    drawn.colorbar(heads.imshow(found.attention, cmap="Blues", aspect="auto", vmin=0, extent=edges), ax=heads)
    heads.locator_params(integer=True)
    heads.grid(False)
    return drawn


def _means(found: Inspection, groups: np.ndarray, name: Callable[[int], Row]) -> list[Row]:
    chosen = found.stateful
    present, index = np.unique(groups[chosen], return_inverse=True)
    counts, totals = np.bincount(index), np.bincount(index, weights=found.gain[chosen])
    return [
        {**name(group), "tokens": count, "gain": total / count, "total": total}
        for group, count, total in zip(present.tolist(), counts.tolist(), totals.tolist(), strict=True)
    ]


def _sums(gains: np.ndarray) -> Row:
    return {"tokens": len(gains), "gain": float(gains.mean()), "total": float(gains.sum())}
