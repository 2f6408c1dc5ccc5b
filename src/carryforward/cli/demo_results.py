# SPDX-License-Identifier: Apache-2.0
"""What `carryforward demo` shows: the gain on one text, predictions that became right, and the table of all models."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import typer

from ..evaluation.result_series import cost, number
from ..utils.markdown import markdown_table

if TYPE_CHECKING:
    from ..analysis.token_gains import TokenGains

_CONTEXT = 70  # characters shown in front of a prediction
_MIN_LETTERS = 4  # of a prediction that is shown


def gain_lines(tokens: "TokenGains", pieces: Sequence[str]) -> str:
    """Bits per byte and token perplexity of a text, with what is carried and without."""
    import numpy as np

    size = len("".join(pieces[1:]).encode())
    sides = {"windows on their own": tokens.without, "with what is carried": tokens.with_state}
    bits = {name: -float(np.nansum(side.log_probs)) / np.log(2) / size for name, side in sides.items()}
    rows = [[name, f"{bits[name]:.3f}", f"{side.perplexity:.1f}"] for name, side in sides.items()]
    change = tokens.with_state.perplexity / tokens.without.perplexity - 1
    table = markdown_table(["the model as it is, untrained", "bits per byte", "token perplexity"], rows)
    return f"{table}\n\nToken perplexity {100 * change:+.1f} %.\n"


def corrected_lines(tokens: "TokenGains", pieces: Sequence[str], texts: Sequence[str], count: int = 3) -> str:
    """Words that the model predicts with what is carried only, each with what stands before it.

    Args:
        texts: the most probable token at each place without a state.
    """
    from ..analysis.token_gains import corrected
    from ..analysis.word_classes import classify

    examples: dict[str, str] = {}  # by word
    for indices in corrected(tokens, classify(pieces, tokens.windows)):
        word = "".join(pieces[i] for i in indices).strip()
        if len(word) < _MIN_LETTERS or not word.isalpha() or word.casefold() in examples:
            continue
        space = " " if pieces[indices[0]][:1].isspace() else ""
        before = " ".join("".join(pieces[max(indices[0] - 60, 0) : indices[0]]).split())[-_CONTEXT:]
        wrong = next(i for i in indices if tokens.without.top_ids[i, 0] != tokens.ids[i])
        instead = "".join([*pieces[indices[0] : wrong], texts[wrong]]).strip()
        right = typer.style(f"[{word}]", fg="green", bold=True)
        examples[word.casefold()] = f"  ... {before}{space}{right}   without: {instead or 'a space'}"
        if len(examples) == count:
            break
    if not examples:
        return "No word became right: give a longer text.\n"
    return "\n".join(["Predictions that became right, in brackets:", *examples.values()]) + "\n"


def table(results: Sequence[dict[str, Any]]) -> str:
    """All models and overlaps, bits per byte first. FLOPs are relative to the plain model without overlap."""
    rows = list(_rows(results))
    least = cost(rows[0][1])
    lines = [
        [name, f"{row['overlap']}", f"{cost(row) / least:.2f}", number(row, "bits_per_byte", digits=3),
         number(row, "token_perplexity")]
        for name, row in rows
    ]  # fmt: skip
    return markdown_table(
        ["trained on the same tokens", "overlap", "FLOPs", "bits per byte", "token perplexity"], lines
    )


def scores(results: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Bits per byte at overlap 0 of the plain model, the recurrent one, and that with its state removed."""
    kinds = {"plain": "plain", "keys and values carried": "recurrent", "the same, state removed": "removed"}
    return {kinds[name]: row["bits_per_byte"] for name, row in _rows(results) if row["overlap"] == 0}


def conclusion(results: Sequence[dict[str, Any]]) -> str:
    """What the table says: the gain at equal windows, and the overlaps that the recurrent model is better than."""
    rows = list(_rows(results))
    bits = scores(results)
    (flops,) = [cost(row) for name, row in rows if name == "keys and values carried"]
    change = 100 * (bits["recurrent"] / bits["plain"] - 1)
    beaten = [row for name, row in rows if name == "plain" and row["bits_per_byte"] > bits["recurrent"]]
    text = f"Carried keys and values change bits per byte by {change:+.1f} %."
    if beaten:
        last, window = max(beaten, key=lambda row: row["overlap"]), results[0]["model"]["window"]
        text += (
            f" That is better than the plain model with an overlap of {last['overlap']} of {window} tokens, for "
            f"{flops / cost(last):.2f} of its FLOPs."
        )
    return text


def _rows(results: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each row of the results with the name of what was scored, in the order of the table."""
    for result in results:
        names = {True: "keys and values carried", False: "the same, state removed"}
        for row in sorted(result["rows"], key=lambda row: (row["overlap"], not row["use_state"])):
            yield names[row["use_state"]] if result["model"]["recurrent"] else "plain", row
