# SPDX-License-Identifier: Apache-2.0
"""Markdown tables of a recipe's results: perplexity by overlap, by window, or by variant.

Several seeds are shown as their mean and half the distance between the lowest and the highest.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..evaluation import report
from ..utils.markdown import markdown_table
from .recipes import Cell, Recipe
from .results import differences, read_record, read_result

WIKITEXT = "wikitext"  # prefix of the names of texts that are scored in addition to the books


@dataclass(frozen=True)
class Row:
    """One perplexity.

    Attributes:
        label, seed: the cell.
        text: the recipe's name for the text that was scored; `title` describes it.
        trained: the overlap a recurrent model was trained at; None for a plain one.
        overlap: the overlap it was scored at.
        use_state: False for a plain model, and for the control.
        flops: per token, recurrence included, without the vocabulary projection.
    """

    label: str
    seed: int
    text: str
    title: str
    window: int
    trained: int | None
    overlap: int
    use_state: bool
    perplexity: float
    flops: float
    split: str = "test"

    @property
    def recurrent(self) -> bool:
        return self.trained is not None

    @property
    def control(self) -> bool:
        return self.recurrent and not self.use_state

    @property
    def matched(self) -> bool:
        """Scored at the overlap it was trained at; always true of a plain model."""
        return self.trained in (None, self.overlap)


@dataclass(frozen=True)
class RecipeResults:
    """The results of a recipe that exist.

    Attributes:
        runs: the record of each cell's training, by the cell's name.
        unfinished: cells that lack a result on validation text, or have results of other settings.
        untested: cells that lack a result on a test split.
    """

    rows: list[Row]
    runs: dict[str, dict[str, Any]]
    unfinished: list[str]
    untested: list[str]


def load(recipe: Recipe) -> RecipeResults:
    """Read a recipe's results. Refuses results of different base models or texts, which cannot be compared."""
    rows, runs, unfinished, untested = [], {}, [], []
    origins: dict[str, set[str]] = {}
    for cell in recipe.cells:
        record = read_record(cell)
        if record is None or differences(cell, record):
            unfinished.append(cell.name)
            untested.append(cell.name)
            continue
        runs[cell.name] = record
        circumstances = record["circumstances"]
        origins.setdefault("base models", set()).add(str(circumstances["base"]))
        origins.setdefault("training texts", set()).add(str(circumstances["data"]))
        for text in cell.texts:
            result = read_result(cell, text, record)
            if result is None:
                (untested if cell.texts[text]["split"] == "test" else unfinished).append(cell.name)
                continue
            origins.setdefault(f"texts for {text}", set()).add(result["data"]["key"])
            rows += [row for row in _rows(cell, text, result) if row.overlap in cell.overlaps]
    for kind, values in origins.items():
        if len(values) > 1:
            raise ValueError(f"the results have different {kind} and cannot be compared. Move the wrong ones away.")
    return RecipeResults(rows, runs, list(dict.fromkeys(unfinished)), list(dict.fromkeys(untested)))


def _rows(cell: Cell, text: str, result: dict[str, Any]) -> list[Row]:
    model, data = result["model"], result["data"]
    title = f"{data['name']}, {data['split']}: {data['documents']:,} documents"
    if data["max_tokens"] is not None:
        title += f", the first {data['max_tokens']:,} tokens of each"
    return [
        Row(
            label=cell.label, seed=result["seed"], text=text, title=f"{title}, {data['words']:,} words",
            window=model["window"], trained=model["trained_overlap"], overlap=row["overlap"],
            use_state=row["use_state"], perplexity=row["word_perplexity"] or math.inf,
            flops=row["flops"]["base"] + row["flops"]["recurrence"], split=data["split"],
        )
        for row in result["rows"]
    ]  # fmt: skip


def markdown(kind: str, rows: Sequence[Row]) -> str:
    """A table for each text."""
    parts = []
    for text in dict.fromkeys(row.text for row in rows):
        own = [row for row in rows if row.text == text]
        parts += [f"**{text}** ({own[0].title})", "", _KINDS[kind](own), ""]
    return "\n".join(parts)


def overlaps(rows: Sequence[Row]) -> str:
    """As table 2: one plain model at all overlaps, a recurrent one for each; then overlaps other than the trained."""
    lines = [["overlap", "plain", "FLOPs/token", "recurrent", "FLOPs/token", "", "state removed"]]
    matched = [row for row in rows if row.matched]
    for overlap in sorted({row.overlap for row in matched}):
        plain, recurrent, removed = split(row for row in matched if row.overlap == overlap)
        shown = perplexity_text(plain), flops_text(plain), perplexity_text(recurrent), flops_text(recurrent)
        lines.append([f"{overlap}", *shown, change_text(recurrent, plain), perplexity_text(removed)])
    unmatched = [row for row in rows if row.use_state and not row.matched]
    if not unmatched:
        return _table(lines)
    more = [["trained at", "scored at", "recurrent", "against one trained there"]]
    for trained, overlap in sorted({(row.trained or 0, row.overlap) for row in unmatched}):
        own = [row for row in unmatched if (row.trained, row.overlap) == (trained, overlap)]
        there = [row for row in matched if row.recurrent and row.use_state and row.overlap == overlap]
        more.append([f"{trained}", f"{overlap}", perplexity_text(own), change_text(own, there)])
    return f"{_table(lines)}\n\n{_table(more)}"


def windows(rows: Sequence[Row]) -> str:
    """As figures 4 and 5: for each window the plain model at several overlaps, and the recurrent one."""
    plain_at = sorted({row.overlap for row in rows if not row.recurrent})
    head = ["window", *(f"plain, overlap {overlap}" for overlap in plain_at), "recurrent", "", "state removed"]
    lines = [head]
    for window in sorted({row.window for row in rows}):
        plain, recurrent, removed = split(row for row in rows if row.window == window and row.matched)
        at = {overlap: [row for row in plain if row.overlap == overlap] for overlap in plain_at}
        cells = [f"{perplexity_text(group)} ({flops_text(group)})" for group in (*at.values(), recurrent)]
        lines.append([f"{window}", *cells, change_text(recurrent, at.get(0, [])), perplexity_text(removed)])
    return f"{_table(lines)}\n\nIn brackets: FLOPs per token."


def variants(rows: Sequence[Row]) -> str:
    """One line per cell and overlap, compared with the plain model at that overlap and, if it was scored at several, at
    the largest."""
    first = next((row.label for row in rows if not row.recurrent), None)
    plain = {row.overlap: [r for r in rows if (r.label, r.overlap) == (first, row.overlap)] for row in rows}
    largest = max((row.overlap for row in rows if row.label == first), default=0)
    against_largest = [f"against plain at {largest}"] * (largest > 0)
    lines = [
        ["variant", "overlap", "FLOPs/token", "word perplexity", "against plain", *against_largest, "state removed"]
    ]
    for label, overlap in dict.fromkeys((row.label, row.overlap) for row in rows):
        own = [row for row in rows if (row.label, row.overlap) == (label, overlap)]
        shown = [row for row in own if not row.control]
        compared = (overlap, *[largest] * (largest > 0))
        changes = [change_text(shown, plain[at]) if label != first else "" for at in compared]
        removed = perplexity_text([row for row in own if row.control])
        lines.append([label, f"{overlap}", flops_text(shown), perplexity_text(shown), *changes, removed])
    return _table(lines)


_KINDS: dict[str, Callable[[Sequence[Row]], str]] = {"overlaps": overlaps, "windows": windows, "variants": variants}


def split(rows: Iterable[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    """Rows of plain models, of recurrent ones, and of recurrent ones with the state removed."""
    rows = list(rows)
    shown = [row for row in rows if not row.control]
    return [r for r in shown if not r.recurrent], [r for r in shown if r.recurrent], [r for r in rows if r.control]


def mean(rows: Sequence[Row]) -> float:
    return sum(row.perplexity for row in rows) / len(rows)


def paired(rows: Sequence[Row], others: Sequence[Row]) -> list[float]:
    """Relative differences of perplexities from others, for every seed that both have."""
    by_seed = {row.seed: row.perplexity for row in others}
    return [row.perplexity / by_seed[row.seed] - 1 for row in rows if row.seed in by_seed]


def perplexity_text(rows: Sequence[Row]) -> str:
    """A perplexity; of several seeds the mean and half the distance between the lowest and the highest."""
    if not rows:
        return "–"
    values = [row.perplexity for row in rows]
    spread = f" ± {(max(values) - min(values)) / 2:,.2f}" if len(values) > 1 else ""
    return f"{mean(rows):,.2f}{spread}" if math.isfinite(mean(rows)) else "not finite"


def change_text(rows: Sequence[Row], others: Sequence[Row]) -> str:
    """The mean relative difference over the seeds that both have."""
    pairs = paired(rows, others)
    return f"{100 * sum(pairs) / len(pairs):+.1f} %" if pairs else ""


def flops_text(rows: Sequence[Row]) -> str:
    return report.flops_text(rows[0].flops) if rows else "–"


def searches(runs: dict[str, dict[str, Any]]) -> str:
    """A table of the learning rates that were tried and chosen; empty if no run had several to choose from."""
    lines = [["cell", "learning rate", "of the recurrence", "validation word perplexity", ""]]
    for name, run in runs.items():
        chosen = run.get("chosen", {})
        for trial in run["search"]:
            base, new = trial["rates"]
            best = (base, new) == (chosen.get("learning_rate"), chosen.get("recurrence_learning_rate"))
            rate = f"{new:g}" if run["settings"]["recurrence"] else ""
            perplexity = "not finite" if trial["word_perplexity"] is None else f"{trial['word_perplexity']:,.2f}"
            lines.append([name, f"{base:g}", rate, perplexity, "chosen" if best else ""])
    return _table(lines) if len(lines) > 1 else ""


def origin(runs: dict[str, dict[str, Any]]) -> str:
    """A sentence on where the numbers come from: models, tokens, hardware, seeds, commits."""
    records = list(runs.values())
    tokens = sorted(record["tokens"] for record in records)
    trained = " to ".join(dict.fromkeys(f"{count / 1e6:.1f} M" for count in (tokens[0], tokens[-1])))
    trials = sum(len(record["search"]) for record in records)
    hardware = sorted({record["hardware"].get("gpu") or record["hardware"]["cpu"] for record in records})
    commits = sorted({_short(record["commit"]) for record in records})
    seeds = sorted({record["settings"]["seed"] for record in records})
    minutes = sum(record["seconds"] for record in records) / 60
    return (
        f"{len(records)} models, each trained on {trained} tokens"
        + (f", after {trials} trials of learning rates" if trials else "")
        + f"; {minutes:.0f} minutes of training in all on {', '.join(hardware)}; seeds {', '.join(map(str, seeds))}; "
        f"commit {', '.join(commits)}." + " ± is half the distance between the seeds." * (len(seeds) > 1)
    )


def _short(commit: str) -> str:
    return commit[:12] + "-dirty" * commit.endswith("-dirty")


def _table(lines: Sequence[Sequence[str]]) -> str:
    return markdown_table(lines[0], lines[1:], text_columns=0)
