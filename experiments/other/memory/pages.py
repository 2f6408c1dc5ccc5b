# SPDX-License-Identifier: Apache-2.0
"""The page and the figures, from the JSON."""

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from arms import GROUPS
from estimates import together
from harness import paragraph, write_page
from measuring import RESULTS
from memory_figures import draw_depths, draw_distances, draw_lengths, title_in_words
from targets import TARGETS, verdict

from carryforward.tasks.report import accuracy
from carryforward.utils.markdown import markdown_table

HERE = Path(__file__).parent
Result = dict[str, Any]
ABOUT = """
Which memory remembers what, and over how many windows? Models are trained on tasks that cannot be done without a
memory ([the tasks](../../../docs/memory-tasks.md)). All but those of the last section are small and start from
scratch. Only what was asked for is scored, by greedy exact match. Two controls, of the same trained models: "reset",
the memory is reset at every window, and "none", there is no memory and no memory position, which is the base model.
"""
RETRIEVAL = """
Keys and values: a pair fills a window, the question is the last one. *rewrite*: 16 keys, of which the latest value
counts. *remember*: unique keys of three symbols. Trained on up to 50 pairs by curriculum, tested on up to 500. Each
number: answers that are right, in per cent, the mean of all seeds (and the lowest and highest). "Learnt": the
curriculum's last stage at which validation answers were right, of the seed that came furthest.
"""
DISTANCES = """
How many windows back is remembered? kv carries the whole window before, so every layer reaches one window further
back, and there are {layers} layers.
"""
COPY = """
A sequence of symbols and its repetition, or its reverse, over a number of windows. Each number: symbols that are
right, in per cent, the mean of all seeds (and the lowest and highest); m is the number of memory tokens. The last
rows are the package recurrent-memory-transformer-pytorch with the same sizes, data and steps.
"""
DEPTH = """
Gradients that flow through so many windows (`bptt_windows`), on {task} with memory tokens. In this task, what is
repeated was read {windows} windows before.
"""
FACTS = """
People move between places, in sentences that are strewn in order among those of a text; the question where one of
them is stands last (the rules of bAbI's task 1). Trained on up to 4,096 tokens, tested on up to 128 k. Each number:
answers that are right, in per cent.
"""
PUBLISHED = """
Published for the same question on other texts and models (BABILong, task QA1, fine-tuned models; arXiv 2406.10149),
quoted, not measured here: RMT with GPT-2 137M 99.6 % at 64 k and 94.2 % at 1 M tokens, ARMT 100 % and 98.5 %.
"""
COMMANDS = """
## How to measure

On one large GPU, with NVIDIA's Multi-Process Service if it is there (`nvidia-cuda-mps-control -d`), and in any number
of calls; each group's time is an estimate for an H200 from steps, windows and parameters ([estimates.py](estimates.py)
has the assumptions), if no arm ends early:

```
{commands}
```

`--minutes` stops in time; the same command goes on. Several groups may be given: every arm of seed 0 then comes before
those of seed 1. `--plan` shows what is missing. $CARRYFORWARD_COMMIT names the commit where there is no repository. The
package of `peer` is installed with `pip install --no-deps --target FOLDER recurrent-memory-transformer-pytorch==0.7.0
hyper-connections einops`, and FOLDER put on PYTHONPATH. What is to be shown was fixed before anything was measured
([targets.py](targets.py)).
"""
JOBS = 16


def write_pages() -> None:
    results = load(RESULTS)
    lines = ["# Memory", "", paragraph(ABOUT), "", *targets(results)]
    for group, section in SECTIONS.items():
        some = [result for result in results if result["arm"]["group"] in group.split()]
        lines += ["", f"## {TITLES[group]}", ""]
        lines += section(some) if some else ["Not measured yet."]
    write_page(HERE, [*lines, *commands().rstrip().splitlines()])


def commands() -> str:
    """How to measure, with the time that each group should take."""
    lines = []
    for group, make in GROUPS.items():
        base = " --base path/to/smollm2 --data path/to/books" * (group == "facts")
        minutes = together(make(), JOBS)
        lines.append(f"{f'python run.py {group}{base} --jobs {JOBS} --minutes 9':88} # {minutes:.0f} minutes")
    return COMMANDS.format(commands="\n".join(lines))


def load(folder: Path) -> list[Result]:
    """All results, in the order of the arms; those with nothing to show are left out."""
    order = {arm.name: number for number, arm in enumerate(arm for group in GROUPS.values() for arm in group())}
    results = [json.loads(path.read_text()) for path in folder.glob("*.json")]
    unknown = [result["arm"]["name"] for result in results if result["arm"]["name"] not in order]
    if unknown:
        raise SystemExit(f"{folder}: {', '.join(sorted(unknown))} are not arms of this experiment. Remove their files.")
    return sorted((one for one in results if one["scores"]), key=lambda result: order[result["arm"]["name"]])


def targets(results: list[Result]) -> list[str]:
    """What was to be shown, and whether it is."""
    rows = [[target.text, *verdict(target, results)] for target in TARGETS]
    return [markdown_table(["target", "verdict", "measured"], rows, text_columns=3)]


def measured_on(results: Sequence[Result]) -> str:
    """One sentence: hardware, commits, seeds, and what is not finished."""
    hardware = ", ".join(sorted({one["hardware"].get("gpu") or one["hardware"]["cpu"] for one in results}))
    commits = ", ".join(sorted({one["commit"][:12] for one in results}))
    seeds = ", ".join(map(str, sorted({one["seed"] for one in results})))
    names = [one["arm"]["name"] for one in results if not one["finished"]]
    unfinished = f" Stopped before their end: {', '.join(names)}." if names else ""
    return f"Measured on {hardware}, at commit {commits}; seeds: {seeds}.{unfinished}"


def by(results: Iterable[Result], key: Callable[[Result], Any]) -> dict[Any, list[Result]]:
    """Results by a key, in their order."""
    groups: dict[Any, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result), []).append(result)
    return groups


def setting(result: Result) -> str:
    return result["arm"]["setting"]


def label(result: Result) -> str:
    return result["arm"]["label"]


def score_at(result: Result, size: int) -> dict[str, Any] | None:
    return next((score for score in result["scores"] if score["size"] == size), None)


def at(results: Sequence[Result], size: int, control: str | None = None) -> list[float]:
    """The accuracies of results at a size, in per cent, of those that have it."""
    scores = [(score_at(one, size), one["whole_answers"]) for one in results]
    chosen = [(score if control is None else score["controls"].get(control), whole) for score, whole in scores if score]
    return [100 * accuracy(score, whole) for score, whole in chosen if score is not None]


def cell(values: Sequence[float]) -> str:
    """The mean; and the lowest and the highest, if there are several that differ."""
    if not values:
        return "–"
    mean, low, high = sum(values) / len(values), min(values), max(values)
    spread = f" ({low:.1f} to {high:.1f})" if f"{low:.1f}" != f"{high:.1f}" else ""
    return f"{mean:.1f}{spread}"


def controls(results: Sequence[Result], size: int) -> list[str]:
    return [cell(at(results, size, name)) for name in ("memory reset", "no memory")]


def learnt(results: Sequence[Result]) -> str:
    """The last size that was learnt in training, of the seed that came furthest."""
    return f"{max((s['size'] for one in results for s in one['training']['stages'] if s['learnt']), default='–')}"


def most_steps(results: Sequence[Result]) -> str:
    return f"{max(one['training']['steps'] for one in results):,}"


def sizes_of(results: Iterable[Result]) -> list[int]:
    return sorted({score["size"] for result in results for score in result["scores"]})


def retrieval(results: list[Result]) -> list[str]:
    """A table of accuracy by pairs for each mode, and what is remembered at which distance."""
    lines = [f"{paragraph(RETRIEVAL)} {measured_on(results)}"]
    for name, some in by(results, setting).items():
        sizes = sizes_of(some)
        rows = [line(kind, ones, sizes) for kind, ones in by(some, label).items()]
        head = ["memory", "carries", "learnt", *map(str, sizes), f"reset, {sizes[-1]}", f"none, {sizes[-1]}"]
        lines += ["", f"### {name.removeprefix('retrieval-')}", "", markdown_table(head, rows, text_columns=2)]
    draw_lengths(results, HERE / "retrieval.png", "pairs")
    lines += ["", "![accuracy by pairs](retrieval.png)"]
    if any(result["distances"] for result in results):
        layers = results[0]["arm"]["model"]["layers"]
        draw_distances(results, HERE / "distances.png", layers)
        lines += ["", paragraph(DISTANCES.format(layers=layers)), "", "![accuracy by distance](distances.png)"]
    return lines


def line(title: str, results: Sequence[Result], sizes: Sequence[int]) -> list[str]:
    """A model's accuracies by size."""
    each = [cell(at(results, size)) for size in sizes]
    return [title, carries(results), learnt(results), *each, *controls(results, sizes[-1])]


def carries(results: Sequence[Result]) -> str:
    model = results[0]["model"]
    return f"{model['carries']} ({model['state_numbers']:,} numbers)"


def copy(results: list[Result]) -> list[str]:
    """A line for each task and kind."""
    rows = []
    for name, some in by(results, setting).items():
        for kind, ones in by(some, label).items():
            task, symbols, windows = name.split("-")
            size = int(symbols)
            memory = ones[0]["arm"]["recurrence"]["memory"].get("memory_tokens")
            rows.append([task, f"{symbols} symbols, {windows} windows", kind, f"{memory or '–'}", cell(at(ones, size)),
                         *controls(ones, size), most_steps(ones), f"{ones[0]['model']['parameters']:,}"])  # fmt: skip
    head = ["task", "size", "memory", "m", "symbols right", "reset", "none", "steps", "parameters"]
    return [f"{paragraph(COPY)} {measured_on(results)}", "", markdown_table(head, rows, text_columns=3)]


def depth(results: list[Result]) -> list[str]:
    """A line for each depth."""
    task, symbols, windows = setting(results[0]).split("-")
    size, about = int(symbols), f"{task} of {symbols} symbols over {windows} windows"
    rows = [
        [name.removeprefix("depth-"), cell(at(ones, size)), *controls(ones, size), learnt(ones), most_steps(ones)]
        for name, ones in by(results, label).items()
    ]
    text = DEPTH.format(task=about, windows=f"{int(windows) / 2:.1f}".replace(".0", ""))
    draw_depths(results, HERE / "depth.png", about)
    head = ["bptt_windows", "symbols right", "reset", "none", "learnt", "steps"]
    table = markdown_table(head, rows)
    return [f"{paragraph(text)} {measured_on(results)}", "", table, "", "![training by BPTT depth](depth.png)"]


def facts(results: list[Result]) -> list[str]:
    """Accuracy by length, a line for each model."""
    sizes = sizes_of(results)
    rows = [line(title_in_words(ones[0]), ones, sizes) for ones in by(results, label).values()]
    head = ["model", "carries", "learnt", *(f"{size // 1024} k" for size in sizes), "reset", "none"]
    draw_lengths(results, HERE / "facts.png", "tokens")
    return [f"{paragraph(FACTS)} {measured_on(results)}", "", markdown_table(head, rows, text_columns=2), "",
            "![accuracy by length](facts.png)", "", paragraph(PUBLISHED)]  # fmt: skip


SECTIONS = {"retrieval": retrieval, "copy peer": copy, "depth": depth, "facts": facts}
TITLES = {
    "retrieval": "Retrieval",
    "copy peer": "Copy and reverse",
    "depth": "What depth is for",
    "facts": "Facts in books",
}
