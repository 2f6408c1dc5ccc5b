# SPDX-License-Identifier: Apache-2.0
"""Write SPEED.md and the figures from the results of `speed.py`, `scoring.py`, `attention.py`, `peers.py` and
`answering.py`.

python benchmarks/speed_report.py
"""

import json
from pathlib import Path
from typing import Any

import answering

HERE = Path(__file__).parent
# row; side; the side it is compared with; the target for the ratio, by device
TARGETS: list[tuple[str, str, str, dict[str, float]]] = [
    ("training", "recurrent, recomputed", "plain", {"cuda": 0.75, "cpu": 0.72}),
    ("training", "recurrent, kept", "plain", {"cuda": 0.95, "cpu": 0.93}),
    ("training", "recurrent, 6 windows kept", "plain", {}),
    ("training", "recurrent, recomputed", "recurrent, recomputed, eager", {"cuda": 2.5}),
    ("state's cost", "with state", "state removed", {}),
    ("48 slots' cost", "with state", "state removed", {}),
    ("keys and values, one block", "with state", "state removed", {"cuda": 0.85}),
    ("keys and values, four blocks recomputed", "with state", "state removed", {"cuda": 0.70}),
    ("keys and values, window by window", "with state", "state removed", {}),
    ("evaluation, overlap 0", "recurrent", "plain forward", {"cuda": 0.95, "cpu": 0.95}),
    ("evaluation, overlap 0", "recurrent", "plain forward, compiled and graphed", {}),
    ("evaluation, overlap 50 %", "recurrent", "Hugging Face's strided loop", {"cuda": 8.0}),
    *(
        (f"generation, {memory}", side, against, targets)
        for memory in ("vector", "keys and values")
        for side, against, targets in (
            ("recurrent", "Hugging Face, static cache, compiled", {"cuda": 1.0}),
            ("recurrent", "Hugging Face", {"cpu": 0.95}),
            ("recurrent, from token 50,000", "recurrent", {}),
        )
    ),
]
SCORING: list[tuple[str, str, str, dict[str, float]]] = [
    ("scoring, document", "with a state", "with a state, earlier commit", {"cuda": 5.0}),
    ("scoring, document", "with a state", "with a state, window by window", {}),
    ("scoring, document", "with a state", "without a state", {}),
    ("scoring, books", "with a state", "without a state", {"cuda": 0.8}),
]
TITLE = """# Speed

Written by `python benchmarks/speed_report.py`. [NOTES.md](NOTES.md) explains the rows and what limits them.
"""


def tables(record: dict[str, Any]) -> str:
    """Markdown of one machine's results."""
    versions = record["versions"]
    lines = [f"## {_where(record)}", ""]
    lines += [f"{_commits(record)}; torch {versions['torch']}, transformers {versions['transformers']}."]
    lines += ["Tokens per second: the median and, in brackets, the slowest and the fastest round.", ""]
    lines += ratios(record, TARGETS)
    for row in record["rows"]:
        lines += _more(row)
    return "\n".join(lines) + "\n"


def scoring_table(record: dict[str, Any]) -> str:
    """Markdown of the speed of scoring whole documents."""
    (earlier,) = {row["earlier_commit"][:7] for row in record["rows"] if "earlier_commit" in row} or {""}
    against = f" The earlier commit is {earlier}." if earlier else ""
    text = "One document of 100,000 tokens, and a hundred books of different lengths."
    lines = [f"## Scoring whole documents, on {_where(record)}", "", f"{text} {_commits(record)}.{against}", ""]
    return "\n".join([*lines, *ratios(record, SCORING)]) + "\n"


def attention_table(record: dict[str, Any]) -> str:
    """Markdown of kernel times of attention over carried keys and values."""
    lines = [f"## Attention over carried positions, on {_where(record)}", ""]
    lines += [f"Kernel time in microseconds, forward / forward and backward, `attention.py`. {_commits(record)}.", ""]
    for row in record["rows"]:
        lines += [f"{row['shape']}, {row['batch']} windows, {row['row']}:", "", "| | forward | both |"]
        lines += ["| --- | ---: | ---: |"]
        for case in row["cases"]:
            if "both_us" in case:
                lines.append(f"| {case['name']} | {case['forward_us']:,.0f} | {case['both_us']:,.0f} |")
        missing = [case["name"] for case in row["cases"] if "both_us" not in case]
        lines += ["", *([f"Not available: {'; '.join(missing)}.", ""] if missing else [])]
    return "\n".join(lines)


def ratios(record: dict[str, Any], targets: list[tuple[str, str, str, dict[str, float]]]) -> list[str]:
    """A Markdown table of the comparisons that a record has."""
    device = record["hardware"]["device"]
    lines = ["| row | shape, batch | this | against | ratio | target |", "| --- | --- | --- | --- | ---: | ---: |"]
    for name, side, against, goals in targets:
        goal = f"≥ {goals[device]:g}" if device in goals else ""
        for row in record["rows"]:
            if row["row"] == name and {side, against} <= row["sides"].keys():
                ours, theirs = row["sides"][side], row["sides"][against]
                ratio = ours["tokens_per_second"] / theirs["tokens_per_second"]
                what = f"{name} | {row['shape']}, {row['batch']} | {side}: {_rate(ours)} | {against}: {_rate(theirs)}"
                shown = f"{ratio:.2f}" if round(ratio, 2) != goals.get(device) else f"{ratio:.3f}"
                lines.append(f"| {what} | {shown} | {goal} |")  # three digits where two would hide a miss
    return lines


def _more(row: dict[str, Any]) -> list[str]:
    """The parts of a row that are not a comparison of two speeds."""
    lines = []
    if row["row"] == "length":
        lines += ["", "| windows | tokens | tokens per second | peak beyond weights, gradients, states |"]
        lines += ["| ---: | ---: | ---: | ---: |"]
        for point in row["points"]:
            peak = "not measured here"
            if "peak_bytes" in point:
                ratio = point["peak_bytes"] / row["points"][0]["peak_bytes"]
                peak = f"{point['peak_bytes'] / 1e6:,.0f} MB ({ratio:.3f})"
            speed = f"{point['tokens_per_second']:,.0f}"
            lines.append(f"| {point['windows']:,} | {point['tokens']:,} | {speed} | {peak} |")
    if "nats_per_token" in row:
        losses = row["nats_per_token"]
        loop, ours = losses["strided loop"], losses["ours"]
        lines += ["", f"Overlap 50 %, nats per token: the loop {loop:.7f}, ours {ours:.7f}."]
    if row["row"] == "data":
        lines += ["", f"Batches are made at {_rate(row['sides']['batches of 8'])} tokens per second, on one core."]
    return lines


def peer_table(record: dict[str, Any]) -> str:
    """Markdown of other packages' speed and ours."""
    lines = [f"## Other packages, on {_where(record)}", "", f"The same shapes. {_commits(record)}.", ""]
    lines += ["| row | what | tokens per second | peak memory |", "| --- | --- | ---: | ---: |"]
    for row in record["rows"]:
        name = row["row"].removeprefix("peer: ")
        for package, side in row["sides"].items():
            speed = _rate(side) if "slowest" in side else f"not available: {side['unavailable']}"
            peak = f"{side['peak_bytes'] / 1e6:,.0f} MB" if "peak_bytes" in side else ""
            lines.append(f"| {name} | {package} | {speed} | {peak} |")
    return "\n".join(lines) + "\n"


def _where(record: dict[str, Any]) -> str:
    hardware = record["hardware"]
    return hardware.get("gpu") or f"{hardware['cpu']}, {hardware['cores']} cores"


def _commits(record: dict[str, Any]) -> str:
    """The commit of the rows, or the rows of each commit."""
    rows: dict[str, list[str]] = {}
    for row in record["rows"]:
        rows.setdefault(row["commit"][:12], []).append(row["row"].removeprefix("peer: "))
    if len(rows) == 1:
        return f"Commit {next(iter(rows))}"
    return "Commits: " + "; ".join(f"{commit} ({', '.join(dict.fromkeys(names))})" for commit, names in rows.items())


def _rate(side: dict[str, float]) -> str:
    """Tokens per second, and the time lost to a quota on the processor."""
    lost = side.get("throttled_seconds", 0.0) / side["rounds"]
    throttled = f", {1e3 * lost:,.0f} ms a round throttled" if lost else ""
    return f"{side['tokens_per_second']:,.0f} ({side['slowest']:,.0f} to {side['fastest']:,.0f}){throttled}"


def draw(points: list[dict[str, Any]], path: Path) -> None:
    """Draw speed and, where it was measured, memory against length."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shown = {"Tokens per second of a training step": [point["tokens_per_second"] for point in points]}
    if "peak_bytes" in points[0]:
        shown["Peak memory beyond weights and states (MB)"] = [point["peak_bytes"] / 1e6 for point in points]
    figure, axes = plt.subplots(1, len(shown), figsize=(4.4 * len(shown), 3.4), squeeze=False, layout="constrained")
    for axis, (title, values), colour in zip(axes.flat, shown.items(), ("#0b6e4f", "#c8553d"), strict=False):
        axis.semilogx([point["tokens"] for point in points], values, "o-", color=colour, linewidth=2)
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_ylim(0, 1.25 * max(values))
        axis.set_xlabel("tokens of the document")
        axis.grid(True, color="#e3e3e3")
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=160)


def main() -> None:
    parts = [TITLE]
    for path in sorted(HERE.glob("results/speed-*.json")):
        record = json.loads(path.read_text())
        parts.append(tables(record))
        for row in record["rows"]:
            if row["row"] == "length":
                draw(row["points"], path.with_suffix(".png"))
                parts.append(f"![against length](results/{path.stem}.png)\n")
    for name, table in (("scoring", scoring_table), ("attention", attention_table), ("peers", peer_table)):
        parts += [table(json.loads(path.read_text())) for path in sorted(HERE.glob(f"results/{name}-*.json"))]
    for path in sorted(HERE.glob("results/answering-*.json")):
        record = json.loads(path.read_text())
        answering.draw(record, path.with_suffix(".png"))
        parts.append(f"{answering.section(record)}\n![against words](results/{path.stem}.png)\n")
    (HERE / "SPEED.md").write_text("\n".join(parts))


if __name__ == "__main__":
    main()
