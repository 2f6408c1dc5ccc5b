# SPDX-License-Identifier: Apache-2.0
"""The page and the figures, from the JSON."""

import json
from pathlib import Path
from typing import Any

from aims import BUDGET, aims_table, best_table, plain_rival, title
from arms import BOOKS, LONG, SETTINGS, Setting
from comparisons import change, cost, share_of_the_way
from harness import paragraph, write_page
from reach_figure import draw

from carryforward.evaluation.report import flops_text
from carryforward.utils.markdown import markdown_table

HERE = Path(__file__).parent
RESULTS = HERE / "results"
ABOUT = """
How far back can a state reach without any training, and what do plain models with larger windows reach at the same
cost? Every arm reads the same tokens: the first ones of each validation book. A name says what is carried: "146 + 4"
are the 146 most recent positions and 4 attention sinks, "296 + 300 attention + 4" also has 300 far positions that this
selection chose.
"""
COLUMNS = """
FLOPs per token: layers and recurrence, without the vocabulary projection. Way: the share of the way from {start} to
{goal}, in nats per word (the logarithm of word perplexity). Against plain: the change of word perplexity from the best
plain windows that cost at most as much. Removed: word perplexity with the state removed. State: what is carried for one
book. In brackets: 95 % intervals of comparisons book by book, books drawn with replacement.
"""
SPEED = """
Memory: the most that was in use, weights included, while windows of many books were read side by side, and while one
book was read window by window.
"""
BEST = f"""
The best of each kind at {BUDGET} times the FLOPs of plain windows without overlap, or less, and what was aimed at.
"""
STREAM = """
One long book ({tokens:,} tokens), as in StreamingLLM: carried positions with and without attention sinks.
"""
DEPTHS = """
How far back the state helps: by how much the loss falls, in nats per token, with a state that comes from only so many
windows before. Measured on windows that have at least {most} before them.
"""


def write_pages() -> None:
    lines = ["# Reach", "", paragraph(ABOUT)]
    for name, setting in SETTINGS.items():
        order = [arm.name for arm in setting.arms]
        results = sorted(load(RESULTS / name), key=lambda result: order.index(result["arm"]["name"]))
        lines += section(name, setting, results) if results else ["", f"Not measured yet: {setting.title}."]
    write_page(HERE, lines)


def load(folder: Path) -> list[dict[str, Any]]:
    """The results in a folder. Those on different texts are refused: they cannot be compared."""
    results = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    for text in (BOOKS, LONG):
        data = {json.dumps(result["data"], sort_keys=True) for result in results if result["arm"]["text"] == text}
        if len(data) > 1:
            raise SystemExit(f"{folder}: results on different texts ({text}). Measure all arms on the same.")
    return results


def section(name: str, setting: Setting, results: list[dict[str, Any]]) -> list[str]:
    """A base model's tables and figure."""
    books = [result for result in results if result["arm"]["text"] == BOOKS]
    stream = [result for result in results if result["arm"]["text"] == LONG]
    lines = ["", f"## {setting.title[0].upper()}{setting.title[1:]}", ""]
    if books:
        figure = f"{name}.png"
        draw(books, HERE / figure)
        start, goal = setting.start.removeprefix("recent-").replace("+", " + "), setting.goal_title
        window, carried = start.split("-")
        columns = COLUMNS.format(start=f"{carried} carried by windows of {window}", goal=goal)
        columns += SPEED if has_speed(books) else "Speed and memory were not measured: the machine was in use."
        lines += [f"{measured_on(books)} {paragraph(columns)}", "", table(setting, books), "", f"![reach]({figure})"]
        lines += ["", paragraph(BEST), "", best_table(setting, books), "", aims_table(name, setting, books)]
    missing = {arm.name for arm in setting.arms} - {result["arm"]["name"] for result in results}
    lines += ["", f"Not measured yet: {', '.join(sorted(missing))}."] if missing else []
    deep = [result for result in books if result["depths"]]
    if deep:
        most = max(int(depth) for result in deep for depth in result["depths"]["nats"])
        lines += ["", paragraph(DEPTHS.format(most=most)), "", depth_table(deep)]
    if stream:
        tokens = stream[0]["data"]["tokens"]
        lines += ["", paragraph(STREAM.format(tokens=tokens)), "", stream_table(stream)]
    return lines


def measured_on(results: list[dict[str, Any]]) -> str:
    """One sentence: texts, hardware and commits."""
    data = results[0]["data"]
    hardware = ", ".join(sorted({r["hardware"].get("gpu") or r["hardware"]["cpu"] for r in results}))
    commits = ", ".join(sorted({r["commit"][:12] for r in results}))
    texts = f"{data['documents']} documents of {data['name']} ({data['split']})"
    return f"{texts}, the first {data['max_tokens']:,} tokens of each, on {hardware}, at commit {commits}."


def table(setting: Setting, results: list[dict[str, Any]]) -> str:
    """A line per arm, sorted by FLOPs."""
    head = ["window", "overlap or carried", "FLOPs/token", "word perplexity", "way", "against plain", "removed",
            "token perplexity", "bits/byte", "state, MB"]  # fmt: skip
    speed = has_speed(results)
    head += ["tokens/s", "memory, GB", "window by window"] if speed else []
    by_name, lines = {result["arm"]["name"]: result for result in results}, []
    start, goal = by_name.get(setting.start), by_name.get(setting.goal)
    for result in sorted(results, key=cost):
        removed, rival = result["removed"], plain_rival(result, results)
        lines.append([
            f"{result['window']}", title(result), flops_text(cost(result)), f"{result['word_perplexity']:.2f}",
            share_of_the_way(result, start, goal).percent("", 0) if start and goal else "–",
            change(result, rival).percent() if rival else "–", f"{removed['word_perplexity']:.2f}" if removed else "–",
            f"{result['token_perplexity']:.3f}", f"{result['bits_per_byte']:.4f}",
            f"{result['state_bytes'] / 1e6:.1f}" if result["state_bytes"] else "–",
            *(speed_cells(result) if speed else ()),
        ])  # fmt: skip
    return markdown_table(head, lines, text_columns=2)


def has_speed(results: list[dict[str, Any]]) -> bool:
    """Whether speed and memory of every arm were measured."""
    return all("seconds" in result for result in results)


def speed_cells(result: dict[str, Any]) -> list[str]:
    return [f"{result['tokens_per_second']:,.0f}", gigabytes(result["peak_bytes"]),
            gigabytes(result["window_peak_bytes"])]  # fmt: skip


def gigabytes(count: int | None) -> str:
    return "–" if count is None else f"{count / 1e9:.2f}"


def depth_table(results: list[dict[str, Any]]) -> str:
    """Gains by depth, a line per arm."""
    depths = sorted({int(depth) for result in results for depth in result["depths"]["nats"]} - {0})
    lines = []
    for result in results:
        nats = result["depths"]["nats"]
        gains = [f"{nats['0'] - nats[str(depth)]:.3f}" if str(depth) in nats else "–" for depth in depths]
        lines.append([f"{result['window']}", title(result), *gains])
    return markdown_table(["window", "carried", *(f"{depth} back" for depth in depths)], lines, text_columns=2)


def stream_table(results: list[dict[str, Any]]) -> str:
    lines = [
        [f"{result['window']}", title(result), f"{result['word_perplexity']:.2f}", f"{result['token_perplexity']:.3f}"]
        for result in results
    ]
    return markdown_table(["window", "overlap or carried", "word perplexity", "token perplexity"], lines, 2)
