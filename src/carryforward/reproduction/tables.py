# SPDX-License-Identifier: Apache-2.0
"""What a recipe's results show, as Markdown: perplexity against overlap, against window, or of one variant after the
other. Several seeds are told as their mean and how far they are apart."""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..loading import RUN_FILE
from ..report import load

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

    @property
    def recurrent(self) -> bool:
        return self.trained is not None

    @property
    def control(self) -> bool:
        return self.recurrent and not self.use_state


def rows_of(folder: Path) -> list[Row]:
    """Every perplexity in a folder of results, cell by cell."""
    found = []
    for cell in sorted(path for path in folder.iterdir() if (path / RUN_FILE).exists()) if folder.is_dir() else []:
        for file in sorted(cell.glob("*.json")):
            if file.name == RUN_FILE:
                continue
            (result,) = load(file)
            about, data = result["model"], result["data"]
            title = f"{data['name']}, {data['split']}: {data['documents']:,} documents"
            if data["max_tokens"] is not None:
                title += f", the first {data['max_tokens']:,} tokens of each"
            for row in result["rows"]:
                cost = row["flops"]["base"] + row["flops"]["recurrence"]
                found.append(
                    Row(
                        about["name"], result["seed"], file.stem, f"{title}, {data['words']:,} words", about["window"],
                        about["trained_overlap"], row["overlap"], row["use_state"], row["word_perplexity"], cost,
                    )
                )  # fmt: skip
    return found


def markdown(kind: str, rows: Sequence[Row]) -> str:
    """A table for each text."""
    parts = []
    for text in dict.fromkeys(row.text for row in rows):
        some = [row for row in rows if row.text == text]
        titles = list(dict.fromkeys(row.title for row in some))
        if len(titles) > 1:
            raise ValueError(f"results for {text!r} are of different texts: {'; '.join(titles)}. Run one of them anew.")
        parts += [f"**{text}** ({titles[0]})", "", _KINDS[kind](some), ""]
    return "\n".join(parts)


def overlaps(rows: Sequence[Row]) -> str:
    """As table 2: the plain model trained once, a recurrent one for each overlap; then overlaps not trained at."""
    lines = [["overlap", "FLOPs/token", "plain", "recurrent", "", "state removed"]]
    matched = [row for row in rows if not row.recurrent or row.trained == row.overlap]
    for overlap in sorted({row.overlap for row in matched}):
        here = [row for row in matched if row.overlap == overlap]
        plain, recurrent, removed = split(here)
        cost = (recurrent or plain)[0].flops
        lines.append([f"{overlap}", flops(cost), told(plain), told(recurrent), change(recurrent, plain), told(removed)])
    other = [row for row in rows if row.recurrent and row.use_state and row.trained != row.overlap]
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
        here = [row for row in rows if row.window == window]
        plain, recurrent, removed = split(here)
        at = {overlap: [row for row in plain if row.overlap == overlap] for overlap in plain_at}
        cells = [f"{told(some)} ({flops(some[0].flops)})" if some else "–" for some in at.values()]
        cost = f" ({flops(recurrent[0].flops)})" if recurrent else ""
        beside = change(recurrent, at.get(0, []))
        lines.append([f"{window}", *cells, told(recurrent) + cost, beside, told(removed)])
    return f"{_table(lines)}\n\nIn brackets: FLOPs per token."


def variants(rows: Sequence[Row]) -> str:
    """One line a cell, against the plain model."""
    lines = [["variant", "overlap", "FLOPs/token", "word perplexity", "against plain", "state removed"]]
    plain = {row.overlap: [r for r in rows if not r.recurrent and r.overlap == row.overlap] for row in rows}
    for label, overlap in dict.fromkeys((row.label, row.overlap) for row in rows):
        here = [row for row in rows if (row.label, row.overlap) == (label, overlap)]
        kept = [row for row in here if not row.control]
        beside = change(kept, plain[overlap]) if kept[0].recurrent else ""
        removed = told([row for row in here if row.control])
        lines.append([label, f"{overlap}", flops(kept[0].flops), told(kept), beside, removed])
    return _table(lines)


_KINDS: dict[str, Callable[[Sequence[Row]], str]] = {"overlaps": overlaps, "windows": windows, "variants": variants}


def split(rows: Iterable[Row]) -> tuple[list[Row], list[Row], list[Row]]:
    """Plain, recurrent, recurrent with the state removed."""
    rows = list(rows)
    kept = [row for row in rows if not row.control]
    return [r for r in kept if not r.recurrent], [r for r in kept if r.recurrent], [r for r in rows if r.control]


def mean(rows: Sequence[Row]) -> float:
    return sum(row.perplexity for row in rows) / len(rows)


def told(rows: Sequence[Row]) -> str:
    """A perplexity; of several seeds their mean and half of what lies between the least and the most."""
    if not rows:
        return "–"
    values = [row.perplexity for row in rows]
    spread = f" ± {(max(values) - min(values)) / 2:,.2f}" if len(values) > 1 else ""
    return f"{mean(rows):,.2f}{spread}"


def change(rows: Sequence[Row], others: Sequence[Row]) -> str:
    return f"{100 * (mean(rows) / mean(others) - 1):+.1f} %" if rows and others else ""


def flops(value: float) -> str:
    return f"{value:.2e}".replace("e+0", "e")


def searches(folder: Path) -> str:
    """The learning rates that were tried, and those that were chosen; empty where there was nothing to choose."""
    lines = [["cell", "learning rate", "of the recurrence", "validation word perplexity", ""]]
    for name, run in _runs(folder).items():
        chosen = run.get("chosen", {})
        for trial in run["search"]:
            base, new = trial["rates"]
            best = (base, new) == (chosen.get("learning_rate"), chosen.get("recurrence_learning_rate"))
            rate = f"{new:g}" if run["settings"]["recurrence"] else ""
            found = "not finite" if trial["word_perplexity"] is None else f"{trial['word_perplexity']:,.2f}"
            lines.append([name, f"{base:g}", rate, found, "chosen" if best else ""])
    return _table(lines) if len(lines) > 1 else ""


def origin(folder: Path) -> str:
    """Where a folder's numbers come from, in a sentence."""
    runs = list(_runs(folder).values())
    tokens = sorted({run["tokens"] for run in runs})
    trained = f"{tokens[0] / 1e6:.1f} M" + (f" to {tokens[-1] / 1e6:.1f} M" if len(tokens) > 1 else "")
    hardware = sorted({run["hardware"].get("gpu") or run["hardware"]["cpu"] for run in runs})
    commits = sorted({run["commit"][:12] + "-dirty" * run["commit"].endswith("-dirty") for run in runs})
    seeds = sorted({run["settings"]["seed"] for run in runs})
    minutes = sum(run["seconds"] for run in runs) / 60
    return (
        f"{len(runs)} models, each trained on {trained} tokens, {minutes:.0f} minutes in all on {', '.join(hardware)}; "
        f"seeds {', '.join(map(str, seeds))}; commit {', '.join(commits)}. JSON: `{folder.parent.name}/{folder.name}`."
    )


def _runs(folder: Path) -> dict[str, dict[str, Any]]:
    """The record of each cell's training."""
    return {file.parent.name: json.loads(file.read_text()) for file in sorted(folder.glob(f"*/{RUN_FILE}"))}


def _table(lines: Sequence[Sequence[str]]) -> str:
    head, *rest = lines
    ruled = [head, ["---:"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(line)} |" for line in ruled)
