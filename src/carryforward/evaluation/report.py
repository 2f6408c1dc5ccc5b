# SPDX-License-Identifier: Apache-2.0
"""From result files to a table, a CSV file and a figure. It reads JSON only and knows neither models nor torch.

One result file, as `carryforward evaluate` writes it; other keys may be there too:

    {"kind": "evaluation", "carryforward": "0.1.0", "commit": "...", "date": "2025-01-31T12:00:00", "command": "...",
     "seed": 0, "versions": {"python": "...", ...}, "hardware": {"device": "...", ...},
     "model": {"name": "runs/wt103", "base": "gpt2", "recurrent": true, "parameters": 123, "trained_overlap": 0,
               "recurrence": {...} or null, "window": 300},
     "data": {"name": "wikitext-103", "split": "test", "documents": 60, "tokens": 1, "words": 1, "bytes": 1,
              "line_ends": 1, "max_tokens": null},
     "rows": [{"overlap": 0, "use_state": true, "untrained_overlap": false, "nats": 1.0, "tokens": 1, "words": 1,
               "bytes": 1, "line_ends": 1, "word_perplexity": 1.0, "token_perplexity": 1.0, "bits_per_byte": 1.0,
               "flops": {"base": 1.0, "recurrence": 1.0, "vocabulary": 1.0}, "seconds": 1.0}]}

A recurrent model's row with `use_state` false is its control and stands beside the row with the state. Results with
another data set, split, cut or number of documents are never put in one table. Where a model was evaluated twice in
the same way, table and figure show the newest; the CSV file has all.
"""

import csv as _csv
import io
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..utils.files import name_of, write_json, write_text
from ..utils.markdown import markdown_table
from ..utils.plotting import Line, Point, draw, left_out
from ..utils.plotting import save as save_figure

logger = logging.getLogger(__name__)

Result = dict[str, Any]
Row = dict[str, Any]
# A model's rows by overlap: (with its state, without); either may be missing.
Series = dict[int, tuple[Row | None, Row | None]]

_NEEDED = {
    "model": ("name", "recurrent", "window"),
    "data": ("name", "split", "documents", "words", "max_tokens"),
    "row": ("overlap", "use_state", "untrained_overlap", "nats", "words", "line_ends", "word_perplexity",
            "token_perplexity", "bits_per_byte", "flops"),
    "flops": ("base", "recurrence", "vocabulary"),
}  # fmt: skip


def load(paths: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Result]:
    """Read result files. Folders are searched, and what is no result in them is passed over.

    Args:
        paths: files and folders, or one of them.
    """
    given = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    found: dict[Path, Result] = {}
    for path in map(Path, given):
        if not path.exists():
            raise ValueError(f"{path} does not exist: give result files, or folders that hold some.")
        for file in sorted(path.rglob("*.json")) if path.is_dir() else [path]:
            try:
                found.setdefault(file.resolve(), _read(file))
            except _ForeignError:
                if not path.is_dir():
                    raise
            except (ValueError, OSError) as error:
                if not path.is_dir():
                    raise
                logger.warning("passed over: %s", error)
    if not found:
        raise ValueError(f"no result of `carryforward evaluate` in {', '.join(map(str, given)) or 'no paths'}.")
    return list(found.values())


class _ForeignError(ValueError):
    """A JSON file that is about something else."""


def _read(file: Path) -> Result:
    try:
        result = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is not JSON, or cut short: {error}. Run its evaluation again.") from error
    if not isinstance(result, dict) or result.get("kind") != "evaluation":
        raise _ForeignError(f'{file} is not a result of `carryforward evaluate` (it lacks "kind": "evaluation").')
    rows = result.get("rows")
    parts = [("model", result.get("model")), ("data", result.get("data"))]
    for row in rows if isinstance(rows, list) and rows else [None]:
        parts += [("row", row), ("flops", row.get("flops") if isinstance(row, dict) else None)]
    for name, part in parts:
        lacking = [key for key in _NEEDED[name] if not isinstance(part, dict) or key not in part]
        if lacking:
            raise ValueError(f"{file}: {name} lacks {', '.join(lacking)}. Run its evaluation again.")
    return result


def markdown(results: list[Result]) -> str:
    """A table for each data set: one line per model and overlap, the state removed beside it."""
    tables = []
    for title, models in _by_data(results).items():
        line_ends = title.lower().startswith("wikitext")
        head = ["model", "overlap", "FLOPs/token", "word perplexity", "state removed", "token perplexity", "bits/byte"]
        if line_ends:
            head.insert(5, "word perplexity, line ends counted")
        lines, marked = [], False
        for name, (_, series) in models.items():
            for overlap, (row, removed) in sorted(series.items()):
                untrained = any(r and r["untrained_overlap"] for r in (row, removed))
                marked |= untrained
                perplexities = [_number(r, "word_perplexity") for r in (row, removed)]
                rest = [_number(row, "token_perplexity"), _number(row, "bits_per_byte", digits=4)]
                if line_ends:
                    rest.insert(0, _number(_with_line_ends(row), "with_line_ends"))
                shown = f"{overlap}\\*" if untrained else f"{overlap}"
                lines.append([name, shown, flops_text(_cost(row or removed)), *perplexities, *rest])
        text = [f"### {title}", "", markdown_table(head, lines), ""]
        text.append("FLOPs/token: layers and recurrence, without the vocabulary projection.")
        if marked:
            text += ["", "\\* not the overlap the model was trained at."]
        tables.append("\n".join(text) + "\n")
    return "\n".join(tables)


def csv(results: list[Result]) -> str:
    """Everything, flat, in full precision: a line per row of a result, nested keys joined by dots."""
    _by_data(results)  # refuses an empty list
    flat = []
    for result in results:
        shared = dict(_flatten({key: value for key, value in result.items() if key != "rows"}))
        flat += [shared | dict(_flatten(row)) for row in result["rows"]]
    columns = list(dict.fromkeys(key for line in flat for key in line))
    # null in one result and a dictionary in the next: the dictionary's own columns say it all
    columns = [key for key in columns if not any(other.startswith(f"{key}.") for other in columns)]
    out = io.StringIO()
    writer = _csv.DictWriter(out, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def save(results: list[Result], folder: str | os.PathLike) -> None:
    """Write each result as JSON, named by its model and data, and beside them what `write` makes of all."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for result in results:
        parts = result["model"]["name"], result["data"]["name"], result["data"]["split"]
        name = name_of(parts, (result["data"], _variant(result), [row["overlap"] for row in result["rows"]]))
        write_json(target / f"{name}.json", result)
    write(load(target), target)


def flops_table(rows: list[Row]) -> str:
    """Rows of overlap, base, recurrence and vocabulary as Markdown."""
    head = ["overlap", "FLOPs/token", "recurrence adds", "vocabulary projection"]
    parts = ("base", "recurrence", "vocabulary")
    return markdown_table(head, [[f"{row['overlap']}", *(flops_text(row[p]) for p in parts)] for row in rows], words=0)


def write(results: list[Result], folder: str | os.PathLike) -> None:
    """Write table.md, results.csv and, where there is matplotlib, figure.png; none is ever seen half-written."""
    texts = {"table.md": markdown(results), "results.csv": csv(results)}
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_text(target / name, text)
    with left_out(target / "figure.png"):
        figure(results, target / "figure.png")


def figure(results: list[Result], path: str | os.PathLike) -> Any:
    """Draw word perplexity against FLOPs per token, a line per model and a panel per data set; needs matplotlib.

    Returns:
        the matplotlib figure that was saved.
    """
    drawn = draw({title: _lines(models) for title, models in _by_data(results).items()})
    save_figure(drawn, path)
    return drawn


def _lines(models: dict[str, tuple[bool, Series]]) -> list[Line]:
    lines = []
    for name, (recurrent, series) in models.items():
        kept, removed = (_points([rows[i] for _, rows in sorted(series.items())]) for i in (0, 1))
        lines.append(Line(name, recurrent, kept, removed))
    return lines


def _points(rows: list[Row | None]) -> list[Point]:
    """FLOPs, perplexity and label of each row that has something to show."""
    shown = [r for r in rows if r and math.isfinite(r["word_perplexity"] or math.inf) and math.isfinite(_cost(r))]
    return [(_cost(row), row["word_perplexity"], f"{row['overlap']}{'*' * row['untrained_overlap']}") for row in shown]


def _by_data(results: list[Result]) -> dict[str, dict[str, tuple[bool, Series]]]:
    """Data set → model → (whether it is recurrent, its rows), in the order in which they come."""
    if not results:
        raise ValueError("results is empty: there is nothing to report. Give what `load` gives back.")
    variants: dict[str, list[dict[str, Any]]] = {}
    windows: dict[str, set[int]] = {}
    for result in results:
        variants.setdefault(result["model"]["name"], []).append(_variant(result))
        windows.setdefault(_title(result["data"]), set()).add(result["model"]["window"])
    tables: dict[str, dict[str, tuple[bool, Series]]] = {}
    for result in sorted(results, key=lambda result: str(result.get("date") or "")):
        model = result["model"]
        label = model["name"]
        for key, value in _variant(result).items():
            differs = any(other[key] != value for other in variants[model["name"]])
            if differs or (key == "window" and len(windows[_title(result["data"])]) > 1):
                label += f", {key} {value}"
        _, series = tables.setdefault(_title(result["data"]), {}).setdefault(label, (model["recurrent"], {}))
        for row in result["rows"]:
            kept, removed = series.get(row["overlap"], (None, None))
            control = model["recurrent"] and not row["use_state"]
            series[row["overlap"]] = (kept, row) if control else (row, removed)
    # plain models first: they are what the others are measured against
    return {title: dict(sorted(models.items(), key=lambda item: item[1][0])) for title, models in tables.items()}


def _variant(result: Result) -> dict[str, Any]:
    """What else than data and overlap may differ between two results of one model."""
    settings = result.get("settings") or {}
    variant = {"window": result["model"]["window"], "seed": result.get("seed")}
    return variant | {key: settings.get(key) for key in ("reset_every", "bf16")}


def _title(data: dict[str, Any]) -> str:
    cut = f", max_tokens {data['max_tokens']:,}" if data["max_tokens"] is not None else ""
    size = f"{data['documents']:,} document{'s' * (data['documents'] != 1)}, {data['words']:,} words{cut}"
    return f"{data['name']}, {data['split']} ({size})"


def _cost(row: Row | None) -> float:
    """FLOPs per token, or NaN where they are not known."""
    assert row is not None, "a series has no overlap without a row"
    if row["flops"]["base"] is None:
        return math.nan
    return row["flops"]["base"] + row["flops"]["recurrence"]


def _with_line_ends(row: Row | None) -> Row | None:
    """Word perplexity where every line end counts as a word, as WikiText's own figures do."""
    if row is None:
        return None
    nats_per_word = row["nats"] / max(row["words"] + row["line_ends"], 1)
    return {"with_line_ends": math.exp(nats_per_word) if nats_per_word < 700 else math.inf}


def _number(row: Row | None, name: str, digits: int = 2) -> str:
    value = row[name] if row else None
    if value is None:
        return "–"
    return f"{value:,.{digits}f}" if value < 1e6 else f"{value:.3g}"


def flops_text(value: float) -> str:
    """A cost, short: 1.75e8."""
    if math.isnan(value):
        return "–"
    return f"{value:.2e}".replace("e+0", "e").replace("e+", "e")


def _flatten(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _flatten(inner, f"{prefix}{key}.")
        elif inner is None or isinstance(inner, str):
            yield prefix + key, inner or ""
        else:
            yield prefix + key, json.dumps(inner)  # full precision; true and false; lists as JSON
