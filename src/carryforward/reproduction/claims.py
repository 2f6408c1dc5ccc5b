# SPDX-License-Identifier: Apache-2.0
"""Check the paper's claims against the results: whether each holds here, and by how much.

Differences are taken seed by seed. A difference smaller than the spread between seeds, or than `MIN_DIFFERENCE`,
decides nothing. Claims about the state are not judged where removing it costs nothing. C6 (continuations) and C7
(question answering) are not about perplexity and are measured elsewhere.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean as average

from ..utils.markdown import markdown_table
from .figures import curves, pareto_frontier
from .tables import Row, change_text, flops_text, paired, perplexity_text, split

MIN_DIFFERENCE = 0.002  # of a perplexity, relative: smaller ones cannot be told from one seed
SMALL_COST = 0.05  # what "costs little" is taken to mean
LATE, LAYER, PAPER = "late", "layer", "paper"  # labels in recipes: a late layer, other layers, the paper's module


@dataclass(frozen=True)
class ExperimentRows:
    """One experiment's rows on one text, and whether every cell is there."""

    rows: Sequence[Row] = ()
    complete: bool = False


@dataclass(frozen=True)
class SettingResults:
    """All rows of one setting: table 2, table 2 on WikiText, figures 4 and 5, the alternatives."""

    overlaps: ExperimentRows = field(default_factory=ExperimentRows)
    wikitext: ExperimentRows = field(default_factory=ExperimentRows)
    windows: ExperimentRows = field(default_factory=ExperimentRows)
    variants: ExperimentRows = field(default_factory=ExperimentRows)


@dataclass(frozen=True)
class Verdict:
    """`holds` is None if undecided; `reason` has the numbers."""

    holds: bool | None
    reason: str


NOT_MEASURED = Verdict(None, "not measured yet")


def is_lower(rows: Sequence[Row], others: Sequence[Row]) -> bool | None:
    """Whether perplexities are lower than others; None if the difference is noise, or no seed has both."""
    differences = paired(rows, others)
    if not differences:
        return None
    noise = max(MIN_DIFFERENCE, (max(differences) - min(differences)) / 2)
    return None if abs(average(differences)) < noise else average(differences) < 0


def all_of(answers: Iterable[bool | None]) -> bool | None:
    """Three-valued `all`: False if any is, else None if any is, else True."""
    known = list(answers)
    return False if False in known else None if None in known else True


def rows_at(rows: Sequence[Row], overlap: int, recurrent: bool) -> list[Row]:
    """The plain model at an overlap, or the recurrent one that was trained at it."""
    plain, with_state, _ = split(row for row in rows if row.matched)
    return [row for row in (with_state if recurrent else plain) if row.overlap == overlap]


def removed_at(rows: Sequence[Row], overlap: int) -> list[Row]:
    """The recurrent model that was trained at an overlap, with its state removed."""
    return [row for row in rows if row.control and row.matched and row.overlap == overlap]


def unused_state(recurrent: Sequence[Row], removed: Sequence[Row], plain: Sequence[Row]) -> Verdict | None:
    """Undecided if the state does not lower perplexity: then no claim about the state can be judged. Else None."""
    if is_lower(recurrent, removed) and is_lower(recurrent, plain):
        return None
    numbers = f"{change_text(recurrent, removed)} against its removal, {change_text(recurrent, plain)} against plain"
    return Verdict(None, f"the state does not help yet ({numbers})")


# --- table 2 ---------------------------------------------------------------------------------------------------------


def c1(results: SettingResults) -> Verdict:
    rows = results.overlaps.rows
    overlaps = sorted({row.overlap for row in rows if row.recurrent and row.matched})
    pairs = {o: (rows_at(rows, o, True), rows_at(rows, o, False)) for o in overlaps if rows_at(rows, o, False)}
    if not pairs:
        return NOT_MEASURED
    changes = [f"{overlap}: {change_text(recurrent, plain)}" for overlap, (recurrent, plain) in pairs.items()]
    controls = [f"{overlap}: {change_text(removed_at(rows, overlap), plain)}" for overlap, (_, plain) in pairs.items()]
    reason = f"by overlap, {', '.join(changes)}; with the state removed, {', '.join(controls)}"
    return Verdict(all_of(is_lower(*pair) for pair in pairs.values()), reason)


def c2(results: SettingResults) -> Verdict:
    return _recurrent_against_plain(results.overlaps.rows, 0, 30, as_good=True)


def c3(results: SettingResults) -> Verdict:
    return _recurrent_against_plain(results.overlaps.rows, 5, 50)


def c4(results: SettingResults) -> Verdict:
    verdict = _recurrent_against_plain(results.overlaps.rows, 50, 200)
    recurrent, plain = rows_at(results.overlaps.rows, 50, True), rows_at(results.overlaps.rows, 200, False)
    if not recurrent or not plain:
        return NOT_MEASURED
    cheaper = recurrent[0].flops < plain[0].flops / 2
    cost = f"for {flops_text(recurrent)} against {flops_text(plain)} FLOPs"
    return Verdict(all_of([verdict.holds, cheaper]), f"{verdict.reason}, {cost}")


def c8(results: SettingResults) -> Verdict:
    """Compare the gain on books with that on the shorter articles of WikiText."""
    rows, gains = results.overlaps.rows, []
    for text_rows in (rows, results.wikitext.rows):
        differences = paired(rows_at(text_rows, 0, True), rows_at(text_rows, 0, False))
        if not differences:
            return NOT_MEASURED
        gains.append(-average(differences))
    unused = unused_state(rows_at(rows, 0, True), removed_at(rows, 0), rows_at(rows, 0, False))
    if unused is not None:
        return unused
    books, articles = gains
    reason = (
        f"at overlap 0, books {100 * books:.1f} %, WikiText, which is also another kind of text, {100 * articles:.1f} %"
    )
    return Verdict(None if abs(books - articles) < MIN_DIFFERENCE else books > articles, reason)


def c9(results: SettingResults) -> Verdict:
    rows = results.overlaps.rows
    unmatched = [row for row in rows if row.use_state and not row.matched]
    judged = []
    for trained, overlap in sorted({(row.trained or 0, row.overlap) for row in unmatched}):
        own = [row for row in unmatched if (row.trained, row.overlap) == (trained, overlap)]
        matched = rows_at(rows, overlap, True)
        if not paired(own, matched):
            continue
        unused = unused_state(matched, removed_at(rows, overlap), rows_at(rows, overlap, False))
        if unused is not None:
            return unused
        cost = average(paired(own, matched))
        judged.append((cost < SMALL_COST, f"trained at {trained}, run at {overlap}: {change_text(own, matched)}"))
    if not judged:
        return NOT_MEASURED
    return Verdict(all_of(small for small, _ in judged), "; ".join(text for _, text in judged))


# --- figures 4 and 5 -------------------------------------------------------------------------------------------------


def c5(results: SettingResults) -> Verdict:
    lines = curves(results.windows.rows)
    plain, recurrent = lines.get("plain, overlap 0", []), lines.get("recurrent, overlap 0", [])
    windows = sorted({row.window for row in plain} & {row.window for row in recurrent})
    if len(windows) < 2:
        return NOT_MEASURED
    shown = [row for row in results.windows.rows if not row.control and row.matched and row.overlap == 0]
    gaps = {}
    for window in windows:
        own = [row for row in shown if row.window == window]
        differences = paired([row for row in own if row.recurrent], [row for row in own if not row.recurrent])
        if not differences:
            return NOT_MEASURED
        gaps[window] = -average(differences)
    frontier = pareto_frontier([(row.flops, row.perplexity) for line in lines.values() for row in line])
    on_frontier = sum((row.flops, row.perplexity) in frontier for row in recurrent)
    gap_texts = ", ".join(f"{window}: {100 * gap:.1f} %" for window, gap in gaps.items())
    widens = all_of(
        None if abs(gaps[a] - gaps[b]) < MIN_DIFFERENCE else gaps[a] > gaps[b] for a, b in pairwise(windows)
    )
    reason = f"gap by window, {gap_texts}; {on_frontier} of {len(recurrent)} recurrent points on the Pareto frontier"
    return Verdict(all_of([widens, on_frontier == len(recurrent)]), reason)


# --- alternatives ----------------------------------------------------------------------------------------------------


def c10(results: SettingResults) -> Verdict:
    paper, others = _variants(results.variants.rows)
    late = [row for label, rows in others.items() if label.startswith(LATE) for row in rows]
    if not paper or not late:
        return NOT_MEASURED
    better = is_lower(late, paper)
    reason = f"late {perplexity_text(late)}, layer 2 {perplexity_text(paper)} ({change_text(late, paper)})"
    return _unused_module(results.variants.rows, paper) or Verdict(None if better is None else not better, reason)


def c11(results: SettingResults) -> Verdict:
    paper, others = _variants(results.variants.rows)
    others = {label: rows for label, rows in others.items() if not label.startswith((LATE, LAYER))}
    plain, _, _ = split(results.variants.rows)
    if not paper or not others or not paired(paper, plain):
        return NOT_MEASURED
    changes = [f"{label} {change_text(rows, paper)}" for label, rows in others.items()]
    gains = [-average(paired(rows, paper)) for rows in others.values() if paired(rows, paper)]
    own = -average(paired(paper, plain))
    reason = f"against the paper's module, which gains {100 * own:.1f} %: {', '.join(changes)}"
    return _unused_module(results.variants.rows, paper) or Verdict(max(gains, default=0) < own, reason)


def _variants(rows: Sequence[Row]) -> tuple[list[Row], dict[str, list[Row]]]:
    """The rows of the paper's module, and those of the alternatives by label."""
    labels = [row.label for row in rows if row.use_state and row.label != PAPER]
    others = {label: [row for row in rows if row.label == label and row.use_state] for label in dict.fromkeys(labels)}
    return [row for row in rows if row.label == PAPER and row.use_state], others


def _unused_module(rows: Sequence[Row], paper: Sequence[Row]) -> Verdict | None:
    """Undecided if the state of the paper's module does not help, with the change of each alternative. Else None."""
    plain, _, _ = split(rows)
    verdict = unused_state(paper, [row for row in rows if row.label == PAPER and row.control], plain)
    if verdict is None:
        return None
    others = [f"{label} {change_text(own, plain)}" for label, own in _variants(rows)[1].items()]
    return Verdict(None, f"{verdict.reason}; against plain, {', '.join(others)}")


# --- the page --------------------------------------------------------------------------------------------------------

CLAIMS: dict[str, tuple[str, str, Callable[[SettingResults], Verdict]]] = {
    "C1": ("recurrent beats plain at every overlap", "overlaps", c1),
    "C2": ("recurrent at overlap 0 is as good as plain at 30", "overlaps", c2),
    "C3": ("recurrent at 5 beats plain at 50", "overlaps", c3),
    "C4": ("recurrent at 50 beats plain at 200, for under half the FLOPs", "overlaps", c4),
    "C5": ("the gap widens as the window shrinks, and every recurrent point is on the Pareto frontier", "windows", c5),
    "C8": ("gains are larger on long documents", "wikitext", c8),
    "C9": (f"another overlap at test than in training costs little (under {SMALL_COST:.0%})", "overlaps", c9),
    "C10": ("a late layer is slightly worse", "variants", c10),
    "C11": ("the alternatives bring no significant gain (as large as the module's own)", "variants", c11),
}


def _recurrent_against_plain(rows: Sequence[Row], recurrent: int, plain: int, as_good: bool = False) -> Verdict:
    """Whether the recurrent model at one overlap beats, or `as_good`, matches the plain one at another."""
    ours, theirs = rows_at(rows, recurrent, True), rows_at(rows, plain, False)
    if not paired(ours, theirs):
        return NOT_MEASURED
    lower = is_lower(ours, theirs)
    reason = (
        f"recurrent at {recurrent}: {perplexity_text(ours)}; plain at {plain}: {perplexity_text(theirs)} "
        f"({change_text(ours, theirs)})"
    )
    return Verdict(True if as_good and lower is None else lower, reason)


def page(settings: dict[str, SettingResults]) -> str:
    """A Markdown table with a line for each claim and a column for each setting."""
    words = {True: "**holds**", False: "**does not hold**", None: "**undecided**"}
    lines = []
    for number, (claim, part, judge) in CLAIMS.items():
        cells = []
        for results in settings.values():
            verdict = judge(results)
            if verdict is NOT_MEASURED:
                cells.append(verdict.reason)
            elif not getattr(results, part).complete:
                cells.append(f"incomplete; so far, {verdict.reason}")
            else:
                cells.append(f"{words[verdict.holds]}: {verdict.reason}")
        lines.append([f"{number}: {claim}", *cells])
    return markdown_table(["claim", *settings], lines, text_columns=1 + len(settings))
