# SPDX-License-Identifier: Apache-2.0
"""What a recipe's results show, as Markdown: perplexity against overlap, against window, or of one variant after the
other. Several seeds are told as their mean and how far they are apart."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..evaluation.report import flops_text
from ..utils.markdown import markdown_table
from .recipes import Cell, Recipe
from .results import differing, record_of, result_of

BESIDE = "wikitext"  # how the names of texts begin that are scored beside the books


@dataclass(frozen=True)
class Row:
    """One perplexity.

    Attributes:
        label, seed: the cell.
        text: what was scored, by the recipe's name for it; `title` says what that is.
        trained: the overlap a recurrent model was trained at; None for a plain one.
        overlap: the one it was scored at.
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
        """Scored at the overlap it was trained at, if it was trained at one."""
        return self.trained in (None, self.overlap)


@dataclass(frozen=True)
class Found:
    """What there is of a recipe's results.

    Attributes:
        runs: the record of each cell's training, by its name.
        unfinished: cells that lack something of validation text, or have results of other settings.
        untested: cells that lack something of a test split.
    """

    rows: list[Row]
    runs: dict[str, dict[str, Any]]
    unfinished: list[str]
    untested: list[str]


def find(recipe: Recipe) -> Found:
    """Read a recipe's results. Refuses to set models of different origin side by side."""
    rows, runs, unfinished, untested = [], {}, [], []
    origins: dict[str, set[str]] = {}
    for cell in recipe.cells:
        record = record_of(cell)
        if record is None or differing(cell, record):
            unfinished.append(cell.name)
            untested.append(cell.name)
            continue
        runs[cell.name] = record
        circumstances = record["circumstances"]
        origins.setdefault("base models", set()).add(str(circumstances["base"]))
        origins.setdefault("training texts", set()).add(str(circumstances["data"]))
        for text in cell.texts:
            result = result_of(cell, text, record)
            if result is None:
                (untested if cell.texts[text]["split"] == "test" else unfinished).append(cell.name)
                continue
            origins.setdefault(f"texts for {text}", set()).add(result["data"]["key"])
            rows += [row for row in _rows(cell, text, result) if row.overlap in cell.overlaps]
    for what, several in origins.items():
        if len(several) > 1:
            raise ValueError(f"results with different {what} are side by side. Move those away that do not belong.")
    return Found(rows, runs, list(dict.fromkeys(unfinished)), list(dict.fromkeys(untested)))


def _rows(cell: Cell, text: str, result: dict[str, Any]) -> list[Row]:
    about, data = result["model"], result["data"]
    title = f"{data['name']}, {data['split']}: {data['documents']:,} documents"
    if data["max_tokens"] is not None:
        title += f", the first {data['max_tokens']:,} tokens of each"
    return [
        Row(
            label=cell.label, seed=result["seed"], text=text, title=f"{title}, {data['words']:,} words",
            window=about["window"], trained=about["trained_overlap"], overlap=row["overlap"],
            use_state=row["use_state"], perplexity=row["word_perplexity"] or math.inf,
            flops=row["flops"]["base"] + row["flops"]["recurrence"], split=data["split"],
        )
        for row in result["rows"]
    ]  # fmt: skip


def markdown(kind: str, rows: Sequence[Row]) -> str:
    """A table for each text."""
    parts = []
    for text in dict.fromkeys(row.text for row in rows):
        some = [row for row in rows if row.text == text]
        parts += [f"**{text}** ({some[0].title})", "", _KINDS[kind](some), ""]
    return "\n".join(parts)


def overlaps(rows: Sequence[Row]) -> str:
    """As table 2: the plain model trained once, a recurrent one for each overlap; then overlaps not trained at."""
    lines = [["overlap", "plain", "FLOPs/token", "recurrent", "FLOPs/token", "", "state removed"]]
    matched = [row for row in rows if row.matched]
    for overlap in sorted({row.overlap for row in matched}):
        here = [row for row in matched if row.overlap == overlap]
        plain, recurrent, removed = split(here)
        shown = told(plain), flops(plain), told(recurrent), flops(recurrent)
        lines.append([f"{overlap}", *shown, change(recurrent, plain), told(removed)])
    other = [row for row in rows if row.use_state and not row.matched]
    if not other:
        return _table(lines)
    more = [["trained at", "scored at", "recurrent", "against one trained there"]]
    for trained, overlap in sorted({(row.trained or 0, row.overlap) for row in other}):
        here = [row for row in other if (row.trained, row.overlap) == (trained, overlap)]
        there = [row for row in matched if row.recurrent and row.use_state and row.overlap == overlap]
        more.append([f"{trained}", f"{overlap}", told(here), change(here, there)])
    return f"{_table(lines)}\n\n{_table(more)}"


def windows(rows: Sequence[Row]) -> str:
    """As figures 4 and 5: for each window the plain model at its overlaps, and the recurrent one."""
    plain_at = sorted({row.overlap for row in rows if not row.recurrent})
    head = ["window", *(f"plain, overlap {overlap}" for overlap in plain_at), "recurrent", "", "state removed"]
    lines = [head]
    for window in sorted({row.window for row in rows}):
        here = [row for row in rows if row.window == window and row.matched]
        plain, recurrent, removed = split(here)
        at = {overlap: [row for row in plain if row.overlap == overlap] for overlap in plain_at}
        cells = [f"{told(some)} ({flops(some)})" for some in (*at.values(), recurrent)]
        lines.append([f"{window}", *cells, change(recurrent, at.get(0, [])), told(removed)])
    return f"{_table(lines)}\n\nIn brackets: FLOPs per token."


def variants(rows: Sequence[Row]) -> str:
    """One line a cell, against the plain model at the same overlap and, if it is scored at several, at the greatest."""
    first = next((row.label for row in rows if not row.recurrent), None)
    plain = {row.overlap: [r for r in rows if (r.label, r.overlap) == (first, row.overlap)] for row in rows}
    most = max((row.overlap for row in rows if row.label == first), default=0)
    dearest = [f"against plain at {most}"] * (most > 0)
    lines = [["variant", "overlap", "FLOPs/token", "word perplexity", "against plain", *dearest, "state removed"]]
    for label, overlap in dict.fromkeys((row.label, row.overlap) for row in rows):
        here = [row for row in rows if (row.label, row.overlap) == (label, overlap)]
        kept = [row for row in here if not row.control]
        beside = [change(kept, plain[at]) if label != first else "" for at in (overlap, *[most] * (most > 0))]
        removed = told([row for row in here if row.control])
        lines.append([label, f"{overlap}", flops(kept), told(kept), *beside, removed])
    return _table(lines)


_KINDS: dict[str, Callable[[Sequence[Row]], str]] = {"overlaps": overlaps, "windows": windows, "variants": variants}


def split(rows: Iterable[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    """Plain, recurrent, recurrent with the state removed."""
    rows = list(rows)
    kept = [row for row in rows if not row.control]
    return [r for r in kept if not r.recurrent], [r for r in kept if r.recurrent], [r for r in rows if r.control]


def mean(rows: Sequence[Row]) -> float:
    return sum(row.perplexity for row in rows) / len(rows)


def paired(rows: Sequence[Row], others: Sequence[Row]) -> list[float]:
    """By how much of them some perplexities differ from others, seed by seed, for the seeds that both have."""
    by_seed = {row.seed: row.perplexity for row in others}
    return [row.perplexity / by_seed[row.seed] - 1 for row in rows if row.seed in by_seed]


def told(rows: Sequence[Row]) -> str:
    """A perplexity; of several seeds their mean and half of what lies between the least and the most."""
    if not rows:
        return "–"
    values = [row.perplexity for row in rows]
    spread = f" ± {(max(values) - min(values)) / 2:,.2f}" if len(values) > 1 else ""
    return f"{mean(rows):,.2f}{spread}" if math.isfinite(mean(rows)) else "not finite"


def change(rows: Sequence[Row], others: Sequence[Row]) -> str:
    """The mean difference of seeds that both have."""
    pairs = paired(rows, others)
    return f"{100 * sum(pairs) / len(pairs):+.1f} %" if pairs else ""


def flops(rows: Sequence[Row]) -> str:
    return flops_text(rows[0].flops) if rows else "–"


def searches(runs: dict[str, dict[str, Any]]) -> str:
    """The learning rates that were tried, and those that were chosen; empty where there was nothing to choose."""
    lines = [["cell", "learning rate", "of the recurrence", "validation word perplexity", ""]]
    for name, run in runs.items():
        chosen = run.get("chosen", {})
        for trial in run["search"]:
            base, new = trial["rates"]
            best = (base, new) == (chosen.get("learning_rate"), chosen.get("recurrence_learning_rate"))
            rate = f"{new:g}" if run["settings"]["recurrence"] else ""
            found = "not finite" if trial["word_perplexity"] is None else f"{trial['word_perplexity']:,.2f}"
            lines.append([name, f"{base:g}", rate, found, "chosen" if best else ""])
    return _table(lines) if len(lines) > 1 else ""


def origin(runs: dict[str, dict[str, Any]]) -> str:
    """Where numbers come from, in a sentence."""
    records = list(runs.values())
    tokens = sorted(record["tokens"] for record in records)
    trained = " to ".join(dict.fromkeys(f"{some / 1e6:.1f} M" for some in (tokens[0], tokens[-1])))
    trials = sum(len(record["search"]) for record in records)
    hardware = sorted({record["hardware"].get("gpu") or record["hardware"]["cpu"] for record in records})
    commits = sorted({_short(record["commit"]) for record in records})
    seeds = sorted({record["settings"]["seed"] for record in records})
    minutes = sum(record["seconds"] for record in records) / 60
    return (
        f"{len(records)} models, each trained on {trained} tokens"
        + (f", and {trials} trials before them" if trials else "")
        + f"; {minutes:.0f} minutes of training in all on {', '.join(hardware)}; seeds {', '.join(map(str, seeds))}; "
        f"commit {', '.join(commits)}." + " ± is half of what lies between the seeds." * (len(seeds) > 1)
    )


def _short(commit: str) -> str:
    return commit[:12] + "-dirty" * commit.endswith("-dirty")


def _table(lines: Sequence[Sequence[str]]) -> str:
    return markdown_table(lines[0], lines[1:], words=0)
