# SPDX-License-Identifier: Apache-2.0
"""The best arm of each kind at a bounded cost, and whether it reaches what was aimed at: from the JSON alone."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from arms import SELECTIONS, Setting
from comparisons import Estimate, Result, change, cost, share_of_the_way

from carryforward.evaluation.report import flops_text
from carryforward.utils.markdown import markdown_table

BUDGET = 1.25  # of the FLOPs of plain windows without overlap, all that a memory computes included
KINDS = ("plain", "recent", *SELECTIONS)


def title(result: dict[str, Any]) -> str:
    """An arm without its window: "overlap 50", "296 + 300 attention + 4"."""
    arm = result["arm"]
    if arm["memory"] is None:
        return f"overlap {arm['overlap']}"
    memory = arm["memory"]
    far = f" + {memory['far']} {arm['kind']}" if memory.get("far") else ""
    more = [f"{key} {value}" for key, value in memory.items() if key not in ("recent", "far", "sinks", "selection")]
    return f"{memory['recent']}{far} + {memory['sinks']}" + "".join(f", {text}" for text in more)


def within_budget(setting: Setting, results: list[Result]) -> list[Result]:
    """Results that cost at most `BUDGET` times as much as plain windows without overlap; none if these are missing."""
    baseline = f"plain-{setting.start.split('-')[1]}-0"
    most = [BUDGET * cost(result) for result in results if result["arm"]["name"] == baseline]
    return [result for result in results if most and cost(result) <= most[0]]


def best(results: list[Result], *kinds: str) -> Result | None:
    """The result of these kinds with the lowest perplexity."""
    return min((r for r in results if r["arm"]["kind"] in kinds), key=lambda r: r["word_perplexity"], default=None)


def plain_rival(result: Result, results: list[Result]) -> Result | None:
    """For an arm that carries something: the best plain windows that cost at most as much."""
    if result["arm"]["memory"] is None:
        return None
    return best([other for other in results if cost(other) <= cost(result)], "plain")


def best_table(setting: Setting, results: list[Result]) -> str:
    """The best arm of each kind within the budget, compared with the start, with recent positions and plain windows."""
    affordable, by_name = within_budget(setting, results), {result["arm"]["name"]: result for result in results}
    start, goal = by_name.get(setting.start), by_name.get(setting.goal)
    rivals = [best(affordable, kind) for kind in ("recent", "plain")]
    lines = []
    for kind in KINDS:
        result = best(affordable, kind)
        if result is None:
            continue
        way = share_of_the_way(result, start, goal).percent("", 0) if start and goal else "–"
        changes = [change(result, rival).percent() if rival not in (None, result) else "–" for rival in rivals]
        lines.append([kind, f"{result['window']}", title(result), flops_text(cost(result)),
                      f"{result['word_perplexity']:.2f}", way, *changes])  # fmt: skip
    head = ["kind", "window", "overlap or carried", "FLOPs/token", "word perplexity", "way", "against recent",
            "against plain"]  # fmt: skip
    return markdown_table(head, lines, text_columns=3)


# --- what was aimed at -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Answer:
    """The best arm that an aim is about, the arm it is compared with, the result, and in words whether it is met."""

    result: Result
    rival: Result | None
    estimate: Estimate
    verdict: str


Judge = Callable[[Setting, list[Result]], Answer | None]  # None: an arm is missing


def far_against_recent(setting: Setting, results: list[Result], least_gain: float = 0.0) -> Answer | None:
    """The best arm with far positions against the best with recent ones alone that costs at most as much."""
    far = best(within_budget(setting, results), *SELECTIONS)
    return _compare(far, best([r for r in results if far and cost(r) <= cost(far)], "recent"), least_gain)


def far_against_all_that_fit(setting: Setting, results: list[Result]) -> Answer | None:
    """The best arm with far positions against as many recent ones as fit beside its window."""
    far = best(within_budget(setting, results), *SELECTIONS)
    own = [r for r in results if far and r["arm"]["kind"] == "recent" and r["window"] == far["window"]]
    return _compare(far, max(own, key=lambda r: r["arm"]["memory"]["recent"], default=None), 0.0)


def way_of(
    setting: Setting, results: list[Result], kinds: tuple[str, ...], least: float | None = None
) -> Answer | None:
    """How far the best arm of some kinds gets."""
    by_name = {result["arm"]["name"]: result for result in results}
    start, goal = by_name.get(setting.start), by_name.get(setting.goal)
    result = best(within_budget(setting, results), *kinds)
    if result is None or start is None or goal is None:
        return None
    share = share_of_the_way(result, start, goal)
    verdict = "reported" if least is None else _verdict(share.low >= least, share.high < least)
    return Answer(result, None, share, verdict)


AIMS: dict[str, dict[str, Judge]] = {
    "smollm2": {
        "recent positions alone (two thirds of the way were expected)": partial(way_of, kinds=("recent",)),
        "far and recent positions beat recent ones that cost at most as much": far_against_recent,
        "they do so by 2 %": partial(far_against_recent, least_gain=0.02),
        "70 % of the way": partial(way_of, kinds=("recent", *SELECTIONS), least=0.70),
    },
    "bundled": {
        "far and recent positions beat as many recent ones as fit": far_against_all_that_fit,
        "far and recent positions beat recent ones that cost at most as much": far_against_recent,
    },
}


def aims_table(name: str, setting: Setting, results: list[Result]) -> str:
    """A line for each aim. It is met, or not, if the whole interval is on that side."""
    lines = []
    for aim, judge in AIMS[name].items():
        answer = judge(setting, results)
        if answer is None:
            lines.append([aim, "", "", "", "not measured yet"])
            continue
        rival, estimate = answer.rival, answer.estimate
        against = f"{rival['window']}: {title(rival)}" if rival else ""
        shown = estimate.percent() if rival else estimate.percent("", 0)
        lines.append([aim, f"{answer.result['window']}: {title(answer.result)}", against, shown, answer.verdict])
    return markdown_table(["aim", "best arm", "against", "result", ""], lines, text_columns=3)


def _compare(far: Result | None, rival: Result | None, least_gain: float) -> Answer | None:
    if far is None or rival is None:
        return None
    difference = change(far, rival)
    verdict = _verdict(difference.high < -least_gain, difference.low >= -least_gain)
    return Answer(far, rival, difference, verdict)


def _verdict(met: bool, missed: bool) -> str:
    return "met" if met else "not met" if missed else "undecided"
