# SPDX-License-Identifier: Apache-2.0
"""An inspected text as one HTML file that needs nothing else: no network, no server.

The text itself is ordinary HTML, a section for each window, so it can be read, searched and copied as any other; the
script lays figures over it where one looks. They are embedded as base64 of whole numbers: a log-probability is
rounded to 1/1000 nat, a token is its place in a table of those that occur. What comes from outside is escaped in both
places, and the page allows no script but its own.
"""

import base64
import hashlib
import html
import json
import re
from collections.abc import Callable, Sequence
from importlib import resources
from typing import Any

import numpy as np

from . import word_classes
from .token_gains import Inspection, by_kind, by_position, by_token, by_window, summary

_STEPS = 1000  # of a nat; what is less likely than e^-65 is not told apart
_LISTED = 16  # words that gain or lose most
_PLACES = 100  # occurrences of one that the page can go to
_DEEPEST = 0.04  # of all tokens have about the deepest colour
_SCALES = (0.5, 1, 2, 3, 5)  # gains that have it; none smaller, so that a state that does little looks like it


def page(
    found: Inspection,
    pieces: Sequence[str],
    spelt: Callable[[list[int]], list[str]],
    *,
    title: str,
    model: str,
    provenance: dict[str, Any],
) -> str:
    """The page of a text.

    Args:
        pieces: the stretch of text that each token stands for.
        spelt: token ids as they read, for alternatives.
        title, model: names to be shown.
        provenance: what is said at the end of the page.
    """
    script, style = _asset("page.js"), _asset("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": _escaped(title),
        "digest": digest,
        "style": style,
        "script": script,
        "windows": _windows(found, pieces),
        "data": _json({"model": model, "provenance": provenance, **_figures(found, pieces, spelt)}),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda place: parts[place[1]], _asset("page.html"))


def _figures(found: Inspection, pieces: Sequence[str], spelt: Callable[[list[int]], list[str]]) -> dict[str, Any]:
    told = word_classes.classify(pieces, found.windows)
    sides = (found.with_state, found.without)
    every = np.concatenate([found.ids, *(side.top_ids.ravel() for side in sides)])
    table, index = np.unique(every, return_inverse=True)
    place = np.dtype(np.uint16 if len(table) <= 1 << 16 else np.uint32)
    tokens, *tops = np.split(index, [len(found.ids), len(found.ids) + sides[0].top_ids.size])
    ranked = by_token(found, told)
    helped = [row for row in ranked if row["total"] > 0][:_LISTED]
    hurt = [row for row in reversed(ranked) if row["total"] < 0][:_LISTED]
    for row in (*helped, *hurt):
        row["places"] = row["places"][:_PLACES]
    return {
        "summary": summary(found),
        "window": found.windows[0].end,
        "overlap": found.windows[0].end - found.windows[1].start,
        "scale": _scale(found),
        "steps": _STEPS,
        "top": sides[0].top_ids.shape[1],
        "wide": place.itemsize == 4,
        "lengths": _packed([len(piece.encode("utf-16-le")) // 2 for piece in pieces], np.uint32),
        "windows": _packed([window.score_to for window in found.windows], np.uint32),
        "kinds": _packed(told.kinds * len(word_classes.SEEN) + told.seen, np.uint8),
        "kindNames": word_classes.KINDS,
        "seenNames": word_classes.SEEN,
        "tokens": _packed(tokens, place),
        "logProbs": [_packed(_whole(side.log_probs), np.uint16) for side in sides],
        "topTokens": [_packed(top, place) for top in tops],
        "topLogProbs": [_packed(_whole(side.top_log_probs), np.uint16) for side in sides],
        "vocabulary": spelt(table.tolist()),
        "attention": [[None if np.isnan(x) else round(x, 5) for x in layer] for layer in found.attention.tolist()],
        "layerWeights": None if found.layer_weights is None else found.layer_weights.round(5).tolist(),
        "byPosition": by_position(found),
        "byWindow": by_window(found),
        "byKind": by_kind(found, told),
        "helped": helped,
        "hurt": hurt,
    }


def _windows(found: Inspection, pieces: Sequence[str]) -> str:
    """The text, a section for each window: the tokens it answers for, and with the first one the very first token."""
    sections = []
    for number, window in enumerate(found.windows):
        text = "".join(pieces[window.score_from if number else 0 : window.score_to])
        sections.append(
            f'<section class="window" id="w{number + 1}" aria-label="window {number + 1}">'
            f'<div class="text">{_escaped(text)}</div></section>'
        )
    return "\n".join(sections)


def _escaped(text: str) -> str:
    """As HTML that a browser reads back character by character: it would make others of these two."""
    return html.escape(text.replace("\0", "\ufffd")).replace("\r", "&#13;")


def _json(value: Any) -> str:
    """JSON that no tag can end."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _whole(log_probs: np.ndarray) -> np.ndarray:
    """Log-probabilities as numbers of steps below 0."""
    return np.clip(np.rint(-np.nan_to_num(log_probs) * _STEPS), 0, np.iinfo(np.uint16).max)


def _packed(numbers: Any, dtype: Any) -> str:
    return base64.b64encode(np.asarray(numbers).astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()


def _scale(found: Inspection) -> float:
    wanted = np.quantile(np.abs(found.gain[found.stateful]), 1 - _DEEPEST)
    return min(_SCALES, key=lambda scale: abs(scale - wanted))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
