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

Results of encoders have a "task" ("masked-lm", "classification" or "token-classification"), and rows of other keys:

    masked-lm: "targets", "nats", "correct", "loss", "accuracy", and "by_distance": a list of {"from": 4, "to": 7,
        "targets": 1, "nats": 1.0, "correct": 1}, where null stands for targets whose window cuts nothing
    the others: "scored", "nats", "loss", "accuracy", "macro_f1"

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
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from ..presets import TASKS
from ..settings.base import MAX_INTEGER
from ..utils.files import clear_leftovers, result_stem, write_json, write_text
from ..utils.locks import lock_output
from ..utils.markdown import escape_markdown, markdown_table
from ..utils.parsing import read_json
from ..utils.plotting import Line, Point, perplexity_figure, save_figure, skip_without_matplotlib
from .encoder_report import border_figure, classification_tables, masked_tables
from .result_series import (
    Result,
    Row,
    Series,
    by_data,
    check_not_empty,
    cost,
    flops_text,
    number,
    overlap_text,
    variant,
    with_notes,
)

logger = logging.getLogger(__name__)
_LOCK = ".carryforward.report"  # held for a moment, and not the one of a run that may use the same folder

_Types = tuple[type, ...]
_NONE = type(None)
_COUNT, _NUMBER, _NUMBER_OR_NONE = (int,), (int, float), (int, float, _NONE)
_REQUIRED: dict[str, dict[str, _Types]] = {  # keys that are needed, and the types of their values
    "model": {"name": (str,), "recurrent": (bool,), "window": _COUNT},
    "data": {"name": (str,), "split": (str,), "documents": _COUNT, "words": _COUNT, "max_tokens": (int, _NONE)},
    "row": {"overlap": _COUNT, "use_state": (bool,), "untrained_overlap": (bool,), "nats": _NUMBER, "flops": (dict,)},
    "causal-lm": {"words": _COUNT, "line_ends": _COUNT, "word_perplexity": _NUMBER_OR_NONE,
                  "token_perplexity": _NUMBER_OR_NONE, "bits_per_byte": _NUMBER_OR_NONE},
    "masked-lm": {"targets": _COUNT, "correct": _COUNT, "loss": _NUMBER_OR_NONE, "accuracy": _NUMBER_OR_NONE,
                  "by_distance": (list,)},
    **{task: {"scored": _COUNT, "accuracy": _NUMBER_OR_NONE, "macro_f1": _NUMBER_OR_NONE} for task in TASKS[2:]},
    "distance": {"from": (int, _NONE), "to": (int, _NONE), "targets": _COUNT, "nats": _NUMBER, "correct": _COUNT},
    "masking": {"probability": _NUMBER, "seed": _COUNT},
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
    if _task(result) not in TASKS:
        raise ValueError(f"{file} is damaged: task {_task(result)!r} is none. Run its evaluation again.")
    for name, part in _parts(result):
        missing = [key for key in _REQUIRED[name] if not isinstance(part, dict) or key not in part]
        if missing:
            raise ValueError(f"{file}: {name} lacks {', '.join(missing)}. Run its evaluation again.")
        wrong = [key for key, types in _REQUIRED[name].items() if not _has_type(part[key], types)]  # type: ignore[index]
        if wrong:
            raise ValueError(f"{file} is damaged: {name} has a wrong {', '.join(wrong)}. Run its evaluation again.")
    if not isinstance(result.get("settings") or {}, dict):
        raise ValueError(f"{file} is damaged: settings are not an object. Run its evaluation again.")
    return result


def _parts(result: Result) -> Iterator[tuple[str, Any]]:
    """The parts of a result that must have certain keys, each with its name in `_REQUIRED`."""
    data, rows, task = result.get("data"), result.get("rows"), _task(result)
    yield "model", result.get("model")
    yield "data", data
    if task == "masked-lm":
        yield "masking", data.get("masking") if isinstance(data, dict) else None
    row: Any
    for row in rows if isinstance(rows, list) and rows else [None]:
        yield "row", row
        yield task, row
        yield "flops", row.get("flops")  # a dictionary: what is yielded is checked before the next part is
        for group in row["by_distance"] if task == "masked-lm" else ():
            yield "distance", group


def _has_type(value: Any, types: _Types) -> bool:
    """Whether a value of a file has one of the types. True and False are no numbers, and counts have a usual size."""
    if isinstance(value, bool):
        return bool in types
    return isinstance(value, types) and not (isinstance(value, int) and abs(value) > MAX_INTEGER)


def markdown(results: list[Result]) -> str:
    """A table for each data set: one line per model and overlap, with the result without state in a column."""
    check_not_empty(results)
    return "\n".join(tables(own) for task, tables in _TABLES.items() if (own := _of(task, results)))


def _of(task: str, results: list[Result]) -> list[Result]:
    return [result for result in results if _task(result) == task]


def _task(result: Result) -> str:
    return result.get("task") or TASKS[0]


def _perplexity_tables(results: list[Result]) -> str:
    tables = []
    for title, models in by_data(results).items():
        count_line_ends = title.lower().startswith("wikitext")
        head = ["model", "overlap", "FLOPs/token", "word perplexity", "state removed", "token perplexity", "bits/byte"]
        if count_line_ends:
            head.insert(5, "word perplexity, line ends counted")
        lines = []
        for name, (_, series) in models.items():
            for overlap, (row, control) in sorted(series.items()):
                columns = [number(r, "word_perplexity") for r in (row, control)]
                if count_line_ends:
                    columns.append(number(_with_line_ends(row), "with_line_ends"))
                columns += [number(row, "token_perplexity"), number(row, "bits_per_byte", digits=4)]
                label = overlap_text(overlap, row, control)
                lines.append([escape_markdown(name), label, flops_text(cost(row or control)), *columns])
        tables.append(with_notes(title, markdown_table(head, lines)))
    return "\n".join(tables)


_TABLES: dict[str, Callable[[list[Result]], str]] = {
    "causal-lm": _perplexity_tables,
    "masked-lm": masked_tables,
    "classification": classification_tables,
    "token-classification": classification_tables,
}


def csv_text(results: list[Result]) -> str:
    """All values in full precision: one line per row of a result, with nested keys joined by dots."""
    check_not_empty(results)
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


def save(results: list[Result], folder: str | os.PathLike, measure: str = "word_perplexity") -> None:
    """Write each result as JSON, named by its model and data, and the report on all results in the folder.

    Args:
        measure: what the figure of language models shows: "word_perplexity", "token_perplexity" or "bits_per_byte".
    """
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    with lock_output(target / _LOCK, target, wait=True):  # several evaluations may share a folder
        clear_leftovers(target)
        for result in results:
            parts = result["model"]["name"], result["data"]["name"], result["data"]["split"]
            name = result_stem(parts, (result["data"], variant(result), [row["overlap"] for row in result["rows"]]))
            write_json(target / f"{name}.json", result)
        write(load(target), target, measure)


def flops_table(rows: list[Row]) -> str:
    """FLOPs per token as a Markdown table; rows have the keys overlap, base, recurrence and vocabulary."""
    head = ["overlap", "FLOPs/token", "recurrence adds", "vocabulary projection"]
    keys = ("base", "recurrence", "vocabulary")
    lines = [[f"{row['overlap']}", *(flops_text(row[key]) for key in keys)] for row in rows]
    return markdown_table(head, lines, text_columns=0)


def write(results: list[Result], folder: str | os.PathLike, measure: str = "word_perplexity") -> None:
    """Write table.md, results.csv and, if matplotlib is installed, figure.png (perplexity, or another measure, against
    FLOPs) and borders.png (the loss of masked tokens by distance to a border); each of them atomically."""
    texts = {"table.md": markdown(results), "results.csv": csv_text(results)}
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        write_text(target / name, text)
    figures: dict[str, tuple[str, Callable]] = {
        "causal-lm": ("figure.png", partial(figure, measure=measure)),
        "masked-lm": ("borders.png", border_figure),
    }
    for task, (name, draw) in figures.items():
        if own := _of(task, results):
            with skip_without_matplotlib(target / name):
                draw(own, target / name)


def figure(results: list[Result], path: str | os.PathLike, measure: str = "word_perplexity") -> Any:
    """Draw a measure against FLOPs per token, one line per model and one panel per data set. Needs matplotlib.

    Returns:
        The matplotlib figure, which is saved to `path`.
    """
    panels = by_data(_of("causal-lm", results))
    lines = {title: _lines(models, measure) for title, models in panels.items()}
    plot = perplexity_figure(lines, measure.replace("_", " "))
    save_figure(plot, path)
    return plot


def _lines(models: dict[str, tuple[bool, Series]], measure: str) -> list[Line]:
    lines = []
    for name, (recurrent, series) in models.items():
        with_state, without = (_points([rows[i] for _, rows in sorted(series.items())], measure) for i in (0, 1))
        lines.append(Line(name, recurrent, with_state, without))
    return lines


def _points(rows: list[Row | None], measure: str) -> list[Point]:
    """FLOPs, measure and label of each row in which both numbers are finite."""
    finite = [r for r in rows if r and math.isfinite(r[measure] or math.inf) and math.isfinite(cost(r))]
    return [(cost(row), row[measure], f"{row['overlap']}{'*' * row['untrained_overlap']}") for row in finite]


def _with_line_ends(row: Row | None) -> Row | None:
    """Word perplexity with every line end counted as a word, as is usual for WikiText."""
    if row is None or not row["words"]:
        return None
    nats_per_word = row["nats"] / (row["words"] + row["line_ends"])
    return {"with_line_ends": math.exp(nats_per_word) if nats_per_word < 700 else math.inf}


def _flatten(value: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Pairs of dotted key and text: null is empty, numbers, booleans and lists are JSON (floats in full precision)."""
    for key, inner in value.items():
        if isinstance(inner, dict):
            yield from _flatten(inner, f"{prefix}{key}.")
        elif inner is None or isinstance(inner, str):
            yield prefix + key, inner or ""
        else:
            yield prefix + key, json.dumps(inner)
