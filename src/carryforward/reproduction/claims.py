# SPDX-License-Identifier: Apache-2.0
"""The paper's claims, each held against the results: whether it holds here, and by how much.

C6 (continuations) and C7 (question answering) are not about perplexity and are measured elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from .figures import curves, frontier
from .tables import Row, change, flops, mean, split, told

LATE, ALIKE = "late", 1.0  # what a recipe calls a late insertion; per cent that count for nothing


@dataclass(frozen=True)
class Results:
    """One setting's rows: `overlaps` is table 2, `windows` figures 4 and 5, `variants` the alternatives."""

    overlaps: Sequence[Row]
    windows: Sequence[Row]
    variants: Sequence[Row]


@dataclass(frozen=True)
class Verdict:
    """`holds` is None where nothing was measured."""

    holds: bool | None
    told: str


def at(rows: Sequence[Row], overlap: int, recurrent: bool) -> list[Row]:
    """The plain model at an overlap, or the recurrent one that was trained there."""
    plain, kept, _ = split(rows)
    return [row for row in (kept if recurrent else plain) if row.overlap == overlap and row.trained in (None, overlap)]


def _versus(rows: Sequence[Row], recurrent: int, plain: int) -> tuple[list[Row], list[Row], str]:
    one, other = at(rows, recurrent, True), at(rows, plain, False)
    text = f"recurrent at {recurrent}: {told(one)}; plain at {plain}: {told(other)} ({change(one, other)})"
    return one, other, text


def c1(found: Results) -> Verdict:
    overlaps = sorted({row.overlap for row in found.overlaps if row.recurrent and row.trained == row.overlap})
    pairs = [(o, at(found.overlaps, o, True), at(found.overlaps, o, False)) for o in overlaps]
    pairs = [pair for pair in pairs if pair[1] and pair[2]]
    if not pairs:
        return _UNKNOWN
    parts = [f"{overlap}: {change(one, other)}" for overlap, one, other in pairs]
    return Verdict(all(mean(one) < mean(other) for _, one, other in pairs), "by overlap, " + ", ".join(parts))


def c2(found: Results) -> Verdict:
    return _lower(found.overlaps, 0, 30)


def c3(found: Results) -> Verdict:
    return _lower(found.overlaps, 5, 50)


def c4(found: Results) -> Verdict:
    one, other, text = _versus(found.overlaps, 50, 200)
    if not one or not other:
        return _UNKNOWN
    cheaper = one[0].flops < other[0].flops / 2
    cost = f"{text}, for {flops(one[0].flops)} against {flops(other[0].flops)} FLOPs per token"
    return Verdict(mean(one) < mean(other) and cheaper, cost)


def c5(found: Results) -> Verdict:
    lines = curves(found.windows)
    plain, recurrent = lines.get("plain, overlap 0", []), lines.get("recurrent, overlap 0", [])
    shared = sorted({row.window for row in plain} & {row.window for row in recurrent})
    if len(shared) < 2:
        return _UNKNOWN
    by_window = {w: [next(r for r in line if r.window == w) for line in (plain, recurrent)] for w in shared}
    gaps = {window: 100 * (1 - one.perplexity / other.perplexity) for window, (other, one) in by_window.items()}
    edge = frontier([(row.flops, row.perplexity) for line in lines.values() for row in line])
    on = sum((row.flops, row.perplexity) in edge for row in recurrent)
    parts = ", ".join(f"{window}: {gap:.1f} %" for window, gap in gaps.items())
    widens = all(gaps[a] > gaps[b] for a, b in pairwise(shared))
    text = f"gap by window, {parts}; {on} of {len(recurrent)} recurrent points on the Pareto frontier"
    return Verdict(widens and on == len(recurrent), text)


def c8(books: Results, articles: Results) -> Verdict:
    """The gain on long documents against that on short ones."""
    gains = []
    for found in (books, articles):
        one, other, _ = _versus(found.overlaps, 0, 0)
        if not one or not other:
            return _UNKNOWN
        gains.append(100 * (1 - mean(one) / mean(other)))
    return Verdict(gains[0] > gains[1], f"at overlap 0, books {gains[0]:.1f} %, WikiText {gains[1]:.1f} %")


def c9(found: Results) -> Verdict:
    pairs = []
    for row in found.overlaps:
        if row.use_state and row.trained != row.overlap:
            there = at(found.overlaps, row.overlap, True)
            if there:
                pairs.append((row, there))
    if not pairs:
        return _UNKNOWN
    parts = [f"trained at {row.trained}, run at {row.overlap}: {change([row], there)}" for row, there in pairs]
    little = all(abs(row.perplexity / mean(there) - 1) < 0.05 for row, there in pairs)
    return Verdict(little, "; ".join(dict.fromkeys(parts)))


def c10(found: Results) -> Verdict:
    late = [row for row in found.variants if row.label.startswith(LATE) and row.use_state]
    usual = [row for row in found.variants if row.label == "paper" and row.use_state]
    if not late or not usual:
        return _UNKNOWN
    return Verdict(mean(late) > mean(usual), f"late {told(late)}, layer 2 {told(usual)} ({change(late, usual)})")


def c11(found: Results) -> Verdict:
    usual = [row for row in found.variants if row.label == "paper" and row.use_state]
    labels = [r.label for r in found.variants if r.use_state and r.label != "paper" and not r.label.startswith(LATE)]
    if not usual or not labels:
        return _UNKNOWN
    others = {label: [r for r in found.variants if r.label == label and r.use_state] for label in dict.fromkeys(labels)}
    parts = [f"{label} {change(rows, usual)}" for label, rows in others.items()]
    none = all(mean(rows) > mean(usual) * (1 - ALIKE / 100) for rows in others.values())
    return Verdict(none, "against the paper's module, " + ", ".join(parts))


_UNKNOWN = Verdict(None, "not measured yet")

CLAIMS: dict[str, tuple[str, Callable[..., Verdict]]] = {
    "C1": ("recurrent beats plain at every overlap", c1),
    "C2": ("recurrent at overlap 0 is as good as plain at 30", c2),
    "C3": ("recurrent at 5 beats plain at 50", c3),
    "C4": ("recurrent at 50 beats plain at 200, for under half the FLOPs", c4),
    "C5": ("the gap widens as the window shrinks, and every recurrent point is on the Pareto frontier", c5),
    "C8": ("gains are larger on long documents", c8),
    "C9": ("another overlap at test than in training costs little (here: under 5 %)", c9),
    "C10": ("a late layer is slightly worse", c10),
    "C11": (f"the alternatives bring no gain (here: of {ALIKE:.0f} % or more)", c11),
}


def _lower(rows: Sequence[Row], recurrent: int, plain: int) -> Verdict:
    one, other, text = _versus(rows, recurrent, plain)
    return Verdict(mean(one) <= mean(other), text) if one and other else _UNKNOWN


def page(settings: dict[str, dict[str, Results]]) -> str:
    """A table: a line for each claim, a column for each setting.

    Args:
        settings: for each setting its results on "books" and, if there are some, on "wikitext".
    """
    words: dict[Any, str] = {True: "**holds**", False: "**does not hold**", None: "–"}
    lines = [f"| claim | {' | '.join(settings)} |", "| --- |" + " --- |" * len(settings)]
    for number, (claim, judge) in CLAIMS.items():
        cells = []
        for found in settings.values():
            nothing = Results([], [], [])
            verdict = judge(found["books"], found.get("wikitext", nothing)) if number == "C8" else judge(found["books"])
            cells.append(f"{words[verdict.holds]}: {verdict.told}" if verdict.holds is not None else verdict.told)
        lines.append(f"| {number}: {claim} | {' | '.join(cells)} |")
    return "\n".join(lines)
