# SPDX-License-Identifier: Apache-2.0
"""The paper's claims, each held against the results: whether it holds here, and by how much.

Differences are taken seed by seed. One that is smaller than what lies between seeds, or than `SLIGHT`, decides nothing;
and what is claimed about a state is not judged where taking the state away costs nothing. C6 (continuations) and C7
(question answering) are not about perplexity and are measured elsewhere.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean as average

from ..utils.markdown import markdown_table
from .figures import curves, frontier
from .tables import Row, change, flops, paired, split, told

SLIGHT = 0.002  # of a perplexity: what one seed alone cannot tell
LITTLE = 0.05  # what "costs little" is taken to mean
LATE, LAYER, PAPER = "late", "layer", "paper"  # how recipes call a late layer, other layers, and the paper's module


@dataclass(frozen=True)
class Part:
    """One experiment's rows, of one text; whether nothing of it is missing."""

    rows: Sequence[Row] = ()
    complete: bool = False


@dataclass(frozen=True)
class Results:
    """One setting's: table 2, the same on WikiText, figures 4 and 5, the alternatives."""

    overlaps: Part = field(default_factory=Part)
    beside: Part = field(default_factory=Part)
    windows: Part = field(default_factory=Part)
    variants: Part = field(default_factory=Part)


@dataclass(frozen=True)
class Verdict:
    """`holds` is None where it cannot be said; `told` says why, or by how much."""

    holds: bool | None
    told: str


UNKNOWN = Verdict(None, "not measured yet")


def lower(one: Sequence[Row], other: Sequence[Row]) -> bool | None:
    """Whether some perplexities are below others; None if that is within the noise, or no seed has both."""
    differences = paired(one, other)
    if not differences:
        return None
    noise = max(SLIGHT, (max(differences) - min(differences)) / 2)
    return None if abs(average(differences)) < noise else average(differences) < 0


def all_of(answers: Iterable[bool | None]) -> bool | None:
    found = list(answers)
    return False if False in found else None if None in found else True


def at(rows: Sequence[Row], overlap: int, recurrent: bool) -> list[Row]:
    """The plain model at an overlap, or the recurrent one that was trained there."""
    plain, kept, _ = split(row for row in rows if row.matched)
    return [row for row in (kept if recurrent else plain) if row.overlap == overlap]


def removed_at(rows: Sequence[Row], overlap: int) -> list[Row]:
    return [row for row in rows if row.control and row.matched and row.overlap == overlap]


def unused(recurrent: Sequence[Row], removed: Sequence[Row], plain: Sequence[Row]) -> Verdict | None:
    """No verdict where the state does nothing: then nothing about it can be slightly worse or bring no gain."""
    if lower(recurrent, removed) and lower(recurrent, plain):
        return None
    beside = f"{change(recurrent, removed)} against its removal, {change(recurrent, plain)} against plain"
    return Verdict(None, f"cannot be said, the state is of no use yet ({beside})")


# --- table 2 ---------------------------------------------------------------------------------------------------------


def c1(found: Results) -> Verdict:
    rows = found.overlaps.rows
    overlaps = sorted({row.overlap for row in rows if row.recurrent and row.matched})
    pairs = {o: (at(rows, o, True), at(rows, o, False)) for o in overlaps if at(rows, o, False)}
    if not pairs:
        return UNKNOWN
    parts = [f"{overlap}: {change(one, other)}" for overlap, (one, other) in pairs.items()]
    controls = [f"{overlap}: {change(removed_at(rows, overlap), other)}" for overlap, (_, other) in pairs.items()]
    text = f"by overlap, {', '.join(parts)}; with the state removed, {', '.join(controls)}"
    return Verdict(all_of(lower(*pair) for pair in pairs.values()), text)


def c2(found: Results) -> Verdict:
    return _against(found.overlaps.rows, 0, 30, as_good=True)


def c3(found: Results) -> Verdict:
    return _against(found.overlaps.rows, 5, 50)


def c4(found: Results) -> Verdict:
    verdict = _against(found.overlaps.rows, 50, 200)
    one, other = at(found.overlaps.rows, 50, True), at(found.overlaps.rows, 200, False)
    if not one or not other:
        return UNKNOWN
    cheaper = one[0].flops < other[0].flops / 2
    return Verdict(all_of([verdict.holds, cheaper]), f"{verdict.told}, for {flops(one)} against {flops(other)} FLOPs")


def c8(found: Results) -> Verdict:
    """The gain on long documents against that on short ones."""
    rows, gains = found.overlaps.rows, []
    for some in (rows, found.beside.rows):
        differences = paired(at(some, 0, True), at(some, 0, False))
        if not differences:
            return UNKNOWN
        gains.append(-average(differences))
    useless = unused(at(rows, 0, True), removed_at(rows, 0), at(rows, 0, False))
    if useless is not None:
        return useless
    text = f"at overlap 0, books {100 * gains[0]:.1f} %, WikiText, which is also another kind, {100 * gains[1]:.1f} %"
    return Verdict(None if abs(gains[0] - gains[1]) < SLIGHT else gains[0] > gains[1], text)


def c9(found: Results) -> Verdict:
    rows = found.overlaps.rows
    other = [row for row in rows if row.use_state and not row.matched]
    judged = []
    for trained, overlap in sorted({(row.trained or 0, row.overlap) for row in other}):
        here = [row for row in other if (row.trained, row.overlap) == (trained, overlap)]
        there = at(rows, overlap, True)
        if not paired(here, there):
            continue
        useless = unused(there, removed_at(rows, overlap), at(rows, overlap, False))
        if useless is not None:
            return useless
        worse = average(paired(here, there))
        judged.append((worse < LITTLE, f"trained at {trained}, run at {overlap}: {change(here, there)}"))
    return Verdict(all_of(good for good, _ in judged), "; ".join(text for _, text in judged)) if judged else UNKNOWN


# --- figures 4 and 5 -------------------------------------------------------------------------------------------------


def c5(found: Results) -> Verdict:
    lines = curves(found.windows.rows)
    plain, recurrent = lines.get("plain, overlap 0", []), lines.get("recurrent, overlap 0", [])
    windows = sorted({row.window for row in plain} & {row.window for row in recurrent})
    if len(windows) < 2:
        return UNKNOWN
    kept = [row for row in found.windows.rows if not row.control and row.matched and row.overlap == 0]
    gaps = {}
    for window in windows:
        here = [row for row in kept if row.window == window]
        differences = paired([row for row in here if row.recurrent], [row for row in here if not row.recurrent])
        if not differences:
            return UNKNOWN
        gaps[window] = -average(differences)
    edge = frontier([(row.flops, row.perplexity) for line in lines.values() for row in line])
    on = sum((row.flops, row.perplexity) in edge for row in recurrent)
    parts = ", ".join(f"{window}: {100 * gap:.1f} %" for window, gap in gaps.items())
    widens = all_of(None if abs(gaps[a] - gaps[b]) < SLIGHT else gaps[a] > gaps[b] for a, b in pairwise(windows))
    text = f"gap by window, {parts}; {on} of {len(recurrent)} recurrent points on the Pareto frontier"
    return Verdict(all_of([widens, on == len(recurrent)]), text)


# --- alternatives ----------------------------------------------------------------------------------------------------


def c10(found: Results) -> Verdict:
    usual, others = _variants(found.variants.rows)
    late = [row for label, rows in others.items() if label.startswith(LATE) for row in rows]
    if not usual or not late:
        return UNKNOWN
    better = lower(late, usual)
    text = f"late {told(late)}, layer 2 {told(usual)} ({change(late, usual)})"
    return _useless_variants(found.variants.rows, usual) or Verdict(None if better is None else not better, text)


def c11(found: Results) -> Verdict:
    usual, others = _variants(found.variants.rows)
    others = {label: rows for label, rows in others.items() if not label.startswith((LATE, LAYER))}
    plain, _, _ = split(found.variants.rows)
    if not usual or not others or not paired(usual, plain):
        return UNKNOWN
    parts = [f"{label} {change(rows, usual)}" for label, rows in others.items()]
    gains = [-average(paired(rows, usual)) for rows in others.values() if paired(rows, usual)]
    own = -average(paired(usual, plain))
    text = f"against the paper's module, which gains {100 * own:.1f} %: {', '.join(parts)}"
    return _useless_variants(found.variants.rows, usual) or Verdict(max(gains, default=0) < own, text)


def _variants(rows: Sequence[Row]) -> tuple[list[Row], dict[str, list[Row]]]:
    """The paper's module, and the others by name."""
    labels = [row.label for row in rows if row.use_state and row.label != PAPER]
    others = {label: [row for row in rows if row.label == label and row.use_state] for label in dict.fromkeys(labels)}
    return [row for row in rows if row.label == PAPER and row.use_state], others


def _useless_variants(rows: Sequence[Row], usual: Sequence[Row]) -> Verdict | None:
    """Where even the paper's module does nothing, that others do no more says little; that some do is told."""
    plain, _, _ = split(rows)
    verdict = unused(usual, [row for row in rows if row.label == PAPER and row.control], plain)
    if verdict is None:
        return None
    others = [f"{label} {change(found, plain)}" for label, found in _variants(rows)[1].items()]
    return Verdict(None, f"{verdict.told}; against plain, {', '.join(others)}")


# --- the page --------------------------------------------------------------------------------------------------------

CLAIMS: dict[str, tuple[str, str, Callable[[Results], Verdict]]] = {
    "C1": ("recurrent beats plain at every overlap", "overlaps", c1),
    "C2": ("recurrent at overlap 0 is as good as plain at 30", "overlaps", c2),
    "C3": ("recurrent at 5 beats plain at 50", "overlaps", c3),
    "C4": ("recurrent at 50 beats plain at 200, for under half the FLOPs", "overlaps", c4),
    "C5": ("the gap widens as the window shrinks, and every recurrent point is on the Pareto frontier", "windows", c5),
    "C8": ("gains are larger on long documents", "beside", c8),
    "C9": (f"another overlap at test than in training costs little (under {LITTLE:.0%})", "overlaps", c9),
    "C10": ("a late layer is slightly worse", "variants", c10),
    "C11": ("the alternatives bring no significant gain (as large as the module's own)", "variants", c11),
}


def _against(rows: Sequence[Row], recurrent: int, plain: int, as_good: bool = False) -> Verdict:
    one, other = at(rows, recurrent, True), at(rows, plain, False)
    if not paired(one, other):
        return UNKNOWN
    below = lower(one, other)
    text = f"recurrent at {recurrent}: {told(one)}; plain at {plain}: {told(other)} ({change(one, other)})"
    return Verdict(True if as_good and below is None else below, text)


def page(settings: dict[str, Results]) -> str:
    """A table: a line for each claim, a column for each setting."""
    words = {True: "**holds**", False: "**does not hold**", None: "**undecided**"}
    lines = []
    for number, (claim, part, judge) in CLAIMS.items():
        cells = []
        for found in settings.values():
            verdict = judge(found)
            if verdict is UNKNOWN:
                cells.append(verdict.told)
            elif not getattr(found, part).complete:
                cells.append(f"not all of it measured yet; so far, {verdict.told}")
            else:
                cells.append(f"{words[verdict.holds]}: {verdict.told}")
        lines.append([f"{number}: {claim}", *cells])
    return markdown_table(["claim", *settings], lines, words=1 + len(settings))
