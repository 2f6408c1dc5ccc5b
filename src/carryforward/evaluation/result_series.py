# SPDX-License-Identifier: Apache-2.0
"""Results of `carryforward evaluate` in the order of a table: by data set, then model, then overlap."""

import math
from typing import Any

from ..utils.markdown import escape_markdown

Result = dict[str, Any]
Row = dict[str, Any]
# A model's rows by overlap: (with state, without state); one of them may be missing.
Series = dict[int, tuple[Row | None, Row | None]]


def check_not_empty(results: list[Result]) -> None:
    if not results:
        raise ValueError("results is empty: there is nothing to report. Give the results that `load` returns.")


def by_data(results: list[Result]) -> dict[str, dict[str, tuple[bool, Series]]]:
    """Title of the data set → label of the model → (whether it is recurrent, its rows). Plain models come first."""
    check_not_empty(results)
    variants: dict[str, list[dict[str, Any]]] = {}
    windows: dict[str, set[int]] = {}
    for result in results:
        variants.setdefault(result["model"]["name"], []).append(variant(result))
        windows.setdefault(data_title(result["data"]), set()).add(result["model"]["window"])
    tables: dict[str, dict[str, tuple[bool, Series]]] = {}
    for result in sorted(results, key=lambda result: str(result.get("date") or "")):
        model, title = result["model"], data_title(result["data"])
        label = model["name"]
        for key, value in variant(result).items():
            differs = any(one[key] != value for one in variants[model["name"]])
            if differs or (key == "window" and len(windows[title]) > 1):
                label += f", {key} {value}"
        _, series = tables.setdefault(title, {}).setdefault(label, (model["recurrent"], {}))
        for row in result["rows"]:
            with_state, control = series.get(row["overlap"], (None, None))
            is_control = model["recurrent"] and not row["use_state"]
            series[row["overlap"]] = (with_state, row) if is_control else (row, control)
    return {title: dict(sorted(models.items(), key=lambda item: item[1][0])) for title, models in tables.items()}


def variant(result: Result) -> dict[str, Any]:
    """Settings other than data and overlap in which two results of one model may differ."""
    settings = result.get("settings") or {}
    own = {"window": result["model"]["window"], "seed": result.get("seed")}
    return own | {key: settings.get(key) for key in ("reset_every", "bf16")}


def data_title(data: dict[str, Any]) -> str:
    """What was scored, in a line. Results with different titles cannot be compared."""
    limit = f", max_tokens {data['max_tokens']:,}" if data["max_tokens"] is not None else ""
    if masking := data.get("masking"):
        limit += f"; {masking['probability']:.0%} of tokens to predict, seed {masking['seed']}"
    size = f"{data['documents']:,} document{'s' * (data['documents'] != 1)}, {data['words']:,} words{limit}"
    return f"{data['name']}, {data['split']} ({size})"


def cost(row: Row | None) -> float:
    """FLOPs per token, without the vocabulary projection; NaN if unknown."""
    assert row is not None, "an overlap in a series has at least one row"
    if row["flops"]["base"] is None:
        return math.nan
    return row["flops"]["base"] + row["flops"]["recurrence"]


def number(row: Row | None, name: str, digits: int = 2) -> str:
    """A value of a row, or a dash."""
    value = row[name] if row else None
    if value is None:
        return "–"
    return f"{value:,.{digits}f}" if value < 1e6 else f"{value:.3g}"


def flops_text(value: float) -> str:
    """FLOPs in short form, such as 1.75e8."""
    if math.isnan(value):
        return "–"
    return f"{value:.2e}".replace("e+0", "e").replace("e+", "e")


def overlap_text(overlap: int, *rows: Row | None) -> str:
    """An overlap, with an asterisk if the model was not trained at it."""
    return f"{overlap}\\*" if any(row and row["untrained_overlap"] for row in rows) else f"{overlap}"


def with_notes(title: str, table: str, *notes: str) -> str:
    """A table under its title, with notes below it: what FLOPs are, what an asterisk means, and others."""
    flops = "FLOPs/token: layers and recurrence, without the vocabulary projection."
    text = [f"### {escape_markdown(title)}", "", table, "", flops]
    if "\\* |" in table:
        text += ["", "\\* not the overlap the model was trained at."]
    return "\n".join([*text, *(line for note in notes for line in ("", note))]) + "\n"
