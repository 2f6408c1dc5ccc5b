# SPDX-License-Identifier: Apache-2.0
"""Render the gains of a text's tokens as one self-contained HTML file, without network or server.

The text is ordinary HTML with a section for each window, so that it can be read, searched and copied. The script adds
figures and colours to the windows near the viewport. Numbers are embedded as base64 of integers: log-probabilities are
rounded to 1/1000 nat, and tokens are indices into a table of those that occur. All texts are escaped in HTML and in
JSON, and the page's content security policy allows only its own script.
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
from .token_gains import Row, TokenGains, by_kind, by_position, by_token, by_window, summary

_STEPS = 1000  # per nat; in 16 bits, log-probabilities below -65 become -65
_LISTED_WORDS = 16  # words with the largest gains and losses
_LISTED_OCCURRENCES = 100  # occurrences of a word that the page can jump to
_DEEPEST_SHARE = 0.04  # approximate share of tokens that get the deepest colour
_SCALES = (0.5, 1, 2, 3, 5)  # gains that can have the deepest colour; not less, so that a weak state looks weak


def render_html(
    tokens: TokenGains,
    pieces: Sequence[str],
    decode: Callable[[list[int]], list[str]],
    *,
    title: str,
    model: str,
    provenance: dict[str, Any],
) -> str:
    """Render the page of a text.

    Args:
        pieces: the text of each token.
        decode: turns token ids into the text of each, for the alternatives.
        title, model: names to show.
        provenance: shown at the end of the page.
    """
    script, style = _asset("page.js"), _asset("page.css")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    parts = {
        "title": _escape(title),
        "digest": digest,
        "style": style,
        "script": script,
        "windows": _windows(tokens, pieces),
        "data": _json({"model": model, "provenance": provenance, **_data(tokens, pieces, decode)}),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda match: parts[match[1]], _asset("page.html"))


def _data(tokens: TokenGains, pieces: Sequence[str], decode: Callable[[list[int]], list[str]]) -> dict[str, Any]:
    """The data of the page's script."""
    classes = word_classes.classify(pieces, tokens.windows)
    sides = (tokens.with_state, tokens.without)
    all_ids = np.concatenate([tokens.ids, *(side.top_ids.ravel() for side in sides)])
    vocabulary, index = np.unique(all_ids, return_inverse=True)
    index_type = np.dtype(np.uint16 if len(vocabulary) <= 1 << 16 else np.uint32)
    text_index, *top_index = np.split(index, [len(tokens.ids), len(tokens.ids) + sides[0].top_ids.size])
    helped, hurt = _most_changed(by_token(tokens, classes))
    return {
        "summary": summary(tokens),
        "window": tokens.windows[0].end,
        "overlap": tokens.windows[0].end - tokens.windows[1].start,
        "scale": _scale(tokens),
        "steps": _STEPS,
        "top": sides[0].top_ids.shape[1],
        "wide": index_type.itemsize == 4,
        "lengths": _pack([len(piece.encode("utf-16-le")) // 2 for piece in pieces], np.uint32),
        "windows": _pack([window.score_to for window in tokens.windows], np.uint32),
        "kinds": _pack(classes.kinds * len(word_classes.SEEN) + classes.seen, np.uint8),
        "kindNames": word_classes.KINDS,
        "seenNames": word_classes.SEEN,
        "tokens": _pack(text_index, index_type),
        "logProbs": [_pack(_quantise(side.log_probs), np.uint16) for side in sides],
        "topTokens": [_pack(indices, index_type) for indices in top_index],
        "topLogProbs": [_pack(_quantise(side.top_log_probs), np.uint16) for side in sides],
        "vocabulary": decode(vocabulary.tolist()),
        "attention": [[None if np.isnan(x) else round(x, 5) for x in layer] for layer in tokens.attention.tolist()],
        "layerWeights": None if tokens.layer_weights is None else tokens.layer_weights.round(5).tolist(),
        "byPosition": by_position(tokens),
        "byWindow": by_window(tokens),
        "byKind": by_kind(tokens, classes),
        "helped": helped,
        "hurt": hurt,
    }


def _most_changed(ranked: list[Row]) -> tuple[list[Row], list[Row]]:
    """The words with the largest total gains, and those with the largest losses."""
    helped = [row for row in ranked if row["total"] > 0][:_LISTED_WORDS]
    hurt = [row for row in reversed(ranked) if row["total"] < 0][:_LISTED_WORDS]
    for row in (*helped, *hurt):
        row["places"] = row["places"][:_LISTED_OCCURRENCES]
    return helped, hurt


def _windows(tokens: TokenGains, pieces: Sequence[str]) -> str:
    """The text as HTML, a section for each window: the tokens that it predicts; the first also has the first token."""
    sections = []
    for number, window in enumerate(tokens.windows):
        text = "".join(pieces[window.score_from if number else 0 : window.score_to])
        sections.append(
            f'<section class="window" id="w{number + 1}" aria-label="window {number + 1}">'
            f'<div class="text">{_escape(text)}</div></section>'
        )
    return "\n".join(sections)


def _escape(text: str) -> str:
    """Escape a text as HTML. Browsers would change NUL and carriage return, which must count as one character each."""
    return html.escape(text.replace("\0", "\ufffd")).replace("\r", "&#13;")


def _json(value: Any) -> str:
    """JSON that cannot close the script element that contains it."""
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _quantise(log_probs: np.ndarray) -> np.ndarray:
    """Negative log-probabilities in steps of 1/`_STEPS` nat."""
    return np.clip(np.rint(-np.nan_to_num(log_probs) * _STEPS), 0, np.iinfo(np.uint16).max)


def _pack(numbers: Any, dtype: Any) -> str:
    return base64.b64encode(np.asarray(numbers).astype(np.dtype(dtype).newbyteorder("<")).tobytes()).decode()


def _scale(tokens: TokenGains) -> float:
    """The gain that has the deepest colour."""
    target = np.quantile(np.abs(tokens.gain[tokens.stateful]), 1 - _DEEPEST_SHARE)
    return min(_SCALES, key=lambda scale: abs(scale - target))


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
