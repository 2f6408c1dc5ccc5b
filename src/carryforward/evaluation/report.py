# SPDX-License-Identifier: Apache-2.0
"""`carryforward report`: combine results of `carryforward evaluate` into a table, a CSV file and a figure.

Reads JSON only; imports neither torch nor transformers. The format of a result file, which may have further keys:

    {"kind": "evaluation", "carryforward": "0.1.0", "commit": "...", "date": "2025-01-31T12:00:00", "command": "...",
     "seed": 0, "versions": {"python": "...", ...}, "hardware": {"device": "...", ...},
     "settings": {"batch_size": 8, "bf16": false, "reset_every": null, "block_tokens": 8192},
     "model": {"name": "runs/wt103", "base": "gpt2", "recurrent": true, "parameters": 123, "trained_overlap": 0,
               "recurrence": {...} or null, "window": 300},
     "data": {"name": "wikitext-103", "split": "test", "documents": 60, "tokens": 1, "words": 1, "bytes": 1,
              "line_ends": 1, "max_tokens": null},
     "rows": [{"overlap": 0, "use_state": true, "untrained_overlap": false, "nats": 1.0, "tokens": 1, "words": 1,
               "bytes": 1, "line_ends": 1, "word_perplexity": 1.0, "token_perplexity": 1.0, "bits_per_byte": 1.0,
               "flops": {"base": 1.0, "recurrence": 1.0, "vocabulary": 1.0}, "seconds": 1.0}]}

A recurrent model's row with `use_state` false is its control and is shown beside the row with the state. Results with
different data, split, `max_tokens` or number of documents go to separate tables. If a model was evaluated twice in the
same way, table and figure show the newest result; the CSV file has both.
"""

import csv
import io
import json
import logging
import math
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from ..settings.base import MAX_INTEGER
from ..utils.files import clear_leftovers, result_stem, write_json, write_text
from ..utils.locks import lock_output
from ..utils.markdown import escape_markdown, markdown_table
from ..utils.parsing import read_json
from ..utils.plotting import Line, Point, perplexity_figure, save_figure, skip_without_matplotlib

logger = logging.getLogger(__name__)
_LOCK = ".carryforward.report"  # held for a moment, and not the one of a run that may use the same folder

Result = dict[str, Any]
Row = dict[str, Any]
# A model's rows by overlap: (with state, without state); one of them may be missing.
Series = dict[int, tuple[Row | None, Row | None]]

_Types = tuple[type, ...]
_NONE = type(None)
_COUNT, _NUMBER, _NUMBER_OR_NONE = (int,), (int, float), (int, float, _NONE)
_REQUIRED: dict[str, dict[str, _Types]] = {  # keys that are needed, and the types of their values
    "model": {"name": (str,), "recurrent": (bool,), "window": _COUNT},
    "data": {"name": (str,), "split": (str,), "documents": _COUNT, "words": _COUNT, "max_tokens": (int, _NONE)},
    "row": {"overlap": _COUNT, "use_state": (bool,), "untrained_overlap": (bool,), "nats": _NUMBER, "words": _COUNT,
            "line_ends": _COUNT, "word_perplexity": _NUMBER_OR_NONE, "token_perplexity": _NUMBER_OR_NONE,
            "bits_per_byte": _NUMBER_OR_NONE, "flops": (dict,)},
    "flops": dict.fromkeys(("base", "recurrence", "vocabulary"), _NUMBER_OR_NONE),
}  # fmt: skip


def report(paths: str | os.PathLike | Iterable[str | os.PathLike], out: str | os.PathLike | None = None) -> str:
    """Combine result files into one Markdown text; with `out`, also write table, CSV and figure to that folder."""
    results = load(paths)
    if out is not None:
        write(results, out)
    return markdown(results)


def load(paths: str | os.PathLike | Iterable[str | os.PathLike]) -> list[Result]:
    """Read result files.

    Args:
        paths: files and folders, or a single one. Folders are searched for *.json; files in them that are not results
            are ignored, and damaged results are skipped with a warning.
    """
    sources = [Path(path) for path in ([paths] if isinstance(paths, str | os.PathLike) else paths)]
    results: dict[Path, Result] = {}
    for path in sources:
        if not path.exists():
            raise ValueError(f"{path} does not exist: give result files, or folders that hold some.")
        for file in _json_files(path) if path.is_dir() else [path]:
            try:
                results.setdefault(file.resolve(), _read(file))
            except _NotAResultError:
                if not path.is_dir():
                    raise
            except (ValueError, OSError) as error:
                if not path.is_dir():
                    raise
                logger.warning("skipped: %s", error)
    if not results:
        raise ValueError(f"no result of `carryforward evaluate` in {', '.join(map(str, sources)) or 'no paths'}.")
    return list(results.values())


def _json_files(folder: Path) -> list[Path]:
    """The JSON files under a folder, without those in hidden folders, where files are written."""
    files = sorted(folder.rglob("*.json"))
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(folder).parts)]


class _NotAResultError(ValueError):
    """A JSON file that is not a result of `carryforward evaluate`."""


def _read(file: Path) -> Result:
    result = read_json(file, "Run its evaluation again.")
    if not isinstance(result, dict) or result.get("kind") != "evaluation":
        raise _NotAResultError(f'{file} is not a result of `carryforward evaluate` (it lacks "kind": "evaluation").')
    rows = result.get("rows")
    parts = [("model", result.get("model")), ("data", result.get("data"))]
    for row in rows if isinstance(rows, list) and rows else [None]:
        parts += [("row", row), ("flops", row.get("flops") if isinstance(row, dict) else None)]
    for name, part in parts:
        missing = [key for key in _REQUIRED[name] if not isinstance(part, dict) or key not in part]
        if missing:
            raise ValueError(f"{file}: {name} lacks {', '.join(missing)}. Run its evaluation again.")
        wrong = [key for key, types in _REQUIRED[name].items() if not _has_type(part[key], types)]  # type: ignore[index]
        if wrong:
            raise ValueError(f"{file} is damaged: {name} has a wrong {', '.join(wrong)}. Run its evaluation again.")
    if not isinstance(result.get("settings") or {}, dict):
        raise ValueError(f"{file} is damaged: settings are not an object. Run its evaluation again.")
    return result


def _has_type(value: Any, types: _Types) -> bool:
    """Whether a value of a file has one of the types. True and False are no numbers, and counts have a usual size."""
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, types) and not (isinstance(value, int) and abs(value) > MAX_INTEGER)


def markdown(results: list[Result]) -> str:
    """A table for each data set: one line per model and overlap, with the perplexity without state in a column."""
    tables = []
    for title, models in _by_data(results).items():
        count_line_ends = title.lower().startswith("wikitext")
        head = ["model", "overlap", "FLOPs/token", "word perplexity", "state removed", "token perplexity", "bits/byte"]
        if count_line_ends:
            head.insert(5, "word perplexity, line ends counted")
        lines, any_untrained = [], False
        for name, (_, series) in models.items():
            for overlap, (row, control) in sorted(series.items()):
                untrained = any(r and r["untrained_overlap"] for r in (row, control))
                any_untrained |= untrained
                label = f"{overlap}\\*" if untrained else f"{overlap}"
                columns = [_number(r, "word_perplexity") for r in (row, control)]
                if count_line_ends:
                    columns.append(_number(_with_line_ends(row), "with_line_ends"))
                columns += [_number(row, "token_perplexity"), _number(row, "bits_per_byte", digits=4)]
                lines.append([escape_markdown(name), label, flops_text(_cost(row or control)), *columns])
        text = [f"### {escape_markdown(title)}", "", markdown_table(head, lines), ""]
        text.append("FLOPs/token: layers and recurrence, without the vocabulary projection.")
        if any_untrained:
            text += ["", "\\* not the overlap the model was trained at."]
        tables.append("\n".join(text) + "\n")
    return "\n".join(tables)


def csv_text(results: list[Result]) -> str:
    """All values in full precision: one line per row of a result, with nested keys joined by dots."""
    _check_not_empty(results)
    flat = []
    for result in results:
        shared = dict(_flatten({key: value for key, value in result.items() if key != "rows"}))
        flat += [shared | dict(_flatten(row)) for row in result["rows"]]
    columns = list(dict.fromkeys(key for line in flat for key in line))
    # a key that is null in one result and a dictionary in another has only the dictionary's columns
    columns = [key for key in columns if not any(column.startswith(f"{key}.") for column in columns)]
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, restval="", extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return out.getvalue()


def save(results: list[Result], folder: str | os.PathLike) -> None:
    """Write each result as JSON, named by its model and data, and the report on all results in the folder."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with lock_output(target / _LOCK, target, wait=True):  # several evaluations may share a folder
        clear_leftovers(target)
        for result in results:
            parts = result["model"]["name"], result["data"]["name"], result["data"]["split"]
            name = result_stem(parts, (result["data"], _variant(result), [row["overlap"] for row in result["rows"]]))
            write_json(target / f"{name}.json", result)
        write(load(target), target)


def flops_table(rows: list[Row]) -> str:
    """FLOPs per token as a Markdown table; rows have the keys overlap, base, recurrence and vocabulary."""
    head = ["overlap", "FLOPs/token", "recurrence adds", "vocabulary projection"]
    keys = ("base", "recurrence", "vocabulary")
    lines = [[f"{row['overlap']}", *(flops_text(row[key]) for key in keys)] for row in rows]
    return markdown_table(head, lines, text_columns=0)


def write(results: list[Result], folder: str | os.PathLike) -> None:
    """Write table.md, results.csv and, if matplotlib is installed, figure.png; each of them atomically."""
    texts = {"table.md": markdown(results), "results.csv": csv_text(results)}
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_text(target / name, text)
    with skip_without_matplotlib(target / "figure.png"):
        figure(results, target / "figure.png")


def figure(results: list[Result], path: str | os.PathLike) -> Any:
    """Draw word perplexity against FLOPs per token, one line per model and one panel per data set. Needs matplotlib.

    Returns:
        The matplotlib figure, which is saved to `path`.
    """
    plot = perplexity_figure({title: _lines(models) for title, models in _by_data(results).items()})
    save_figure(plot, path)
    return plot


def _lines(models: dict[str, tuple[bool, Series]]) -> list[Line]:
    lines = []
    for name, (recurrent, series) in models.items():
        with_state, without = (_points([rows[i] for _, rows in sorted(series.items())]) for i in (0, 1))
        lines.append(Line(name, recurrent, with_state, without))
    return lines


def _points(rows: list[Row | None]) -> list[Point]:
    """FLOPs, perplexity and label of each row in which both numbers are finite."""
    finite = [r for r in rows if r and math.isfinite(r["word_perplexity"] or math.inf) and math.isfinite(_cost(r))]
    return [(_cost(row), row["word_perplexity"], f"{row['overlap']}{'*' * row['untrained_overlap']}") for row in finite]


def _check_not_empty(results: list[Result]) -> None:
    if not results:
        raise ValueError("results is empty: there is nothing to report. Give the results that `load` returns.")


def _by_data(results: list[Result]) -> dict[str, dict[str, tuple[bool, Series]]]:
    """Title of the data set → label of the model → (whether it is recurrent, its rows). Plain models come first."""
    _check_not_empty(results)
    variants: dict[str, list[dict[str, Any]]] = {}
    windows: dict[str, set[int]] = {}
    for result in results:
        variants.setdefault(result["model"]["name"], []).append(_variant(result))
        windows.setdefault(_title(result["data"]), set()).add(result["model"]["window"])
    tables: dict[str, dict[str, tuple[bool, Series]]] = {}
    for result in sorted(results, key=lambda result: str(result.get("date") or "")):
        model, title = result["model"], _title(result["data"])
        label = model["name"]
        for key, value in _variant(result).items():
            differs = any(variant[key] != value for variant in variants[model["name"]])
            if differs or (key == "window" and len(windows[title]) > 1):
                label += f", {key} {value}"
        _, series = tables.setdefault(title, {}).setdefault(label, (model["recurrent"], {}))
        for row in result["rows"]:
            with_state, control = series.get(row["overlap"], (None, None))
            is_control = model["recurrent"] and not row["use_state"]
            series[row["overlap"]] = (with_state, row) if is_control else (row, control)
    return {title: dict(sorted(models.items(), key=lambda item: item[1][0])) for title, models in tables.items()}


def _variant(result: Result) -> dict[str, Any]:
    """Settings other than data and overlap in which two results of one model may differ."""
    settings = result.get("settings") or {}
    variant = {"window": result["model"]["window"], "seed": result.get("seed")}
    return variant | {key: settings.get(key) for key in ("reset_every", "bf16")}


def _title(data: dict[str, Any]) -> str:
    limit = f", max_tokens {data['max_tokens']:,}" if data["max_tokens"] is not None else ""
    size = f"{data['documents']:,} document{'s' * (data['documents'] != 1)}, {data['words']:,} words{limit}"
    return f"{data['name']}, {data['split']} ({size})"


def _cost(row: Row | None) -> float:
    """FLOPs per token, without the vocabulary projection; NaN if unknown."""
    assert row is not None, "an overlap in a series has at least one row"
    if row["flops"]["base"] is None:
        return math.nan
    return row["flops"]["base"] + row["flops"]["recurrence"]


def _with_line_ends(row: Row | None) -> Row | None:
    """Word perplexity with every line end counted as a word, as is usual for WikiText."""
    if row is None or not row["words"]:
        return None
    nats_per_word = row["nats"] / (row["words"] + row["line_ends"])
    return {"with_line_ends": math.exp(nats_per_word) if nats_per_word < 700 else math.inf}


def _number(row: Row | None, name: str, digits: int = 2) -> str:
    value = row[name] if row else None
    if value is None:
        return "–"
    return f"{value:,.{digits}f}" if value < 1e6 else f"{value:.3g}"


def flops_text(value: float) -> str:
    """FLOPs in short form, such as 1.75e8."""
    if math.isnan(value):
        return "–"
    return f"{value:.2e}".replace("e+0", "e").replace("e+", "e")


def _flatten(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Pairs of dotted key and text: null is empty, numbers, booleans and lists are JSON (floats in full precision)."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _flatten(inner, f"{prefix}{key}.")
        elif inner is None or isinstance(inner, str):
            yield prefix + key, inner or ""
        else:
            yield prefix + key, json.dumps(inner)
