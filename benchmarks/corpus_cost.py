# SPDX-License-Identifier: Apache-2.0
"""What 100 GB of text costs to embed, to score and to train on, worked out on paper from the benchmarks' results.

    python benchmarks/corpus_cost.py

Reads scoring-cuda.json, speed-cuda.json, peers-cuda.json, tokenising-cpu.json and integrity-cpu.json, and writes the
section of docs/several-machines.md. Nothing is measured here: what is assumed stands in `Machine`, and on the page.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measurements import RESULTS, short, write_section

from carryforward.utils.markdown import markdown_table

PAGE = Path(__file__).resolve().parents[1] / "docs" / "several-machines.md"
TEXT = 100e9  # bytes
SHAPE = "gpt2-small"
PARAMETERS = 124e6  # of this shape
STEP_TOKENS = 8 * 32 * 300  # of each GPU: 8 samples of 32 windows


@dataclass(frozen=True)
class Machine:
    """A machine, as assumed."""

    gpus: int
    cores: int
    disk: float = 1e9  # bytes per second, of a network disk
    link: float = 25e9  # bytes per second between two GPUs: PCIe 4, no NVLink


MACHINES = (Machine(1, 16), Machine(8, 128))


@dataclass(frozen=True)
class Measured:
    """What the benchmarks have measured.

    Attributes:
        tokens_per_byte: of English documentation.
        tokenise, parse: bytes per second and core.
        embed, score, train: tokens per second and GPU.
        commits: those of the measurements.
    """

    tokens_per_byte: float
    tokenise: float
    parse: float
    embed: float
    score: float
    train: float
    commits: tuple[str, ...]


def read(folder: Path = RESULTS) -> Measured:
    """The rates in the result files."""
    tokenising, parsing = (_case(folder / "tokenising-cpu.json", name) for name in ("tokenise", "read JSON lines"))
    rows = [
        _row(folder / "peers-cuda.json", "peer: encoding 4,096 tokens"),
        _row(folder / "scoring-cuda.json", "scoring, books"),
        _row(folder / "speed-cuda.json", "keys and values, one block"),
    ]
    sides = ("ours, keys and values, compiled", "with a state", "with state")
    embed, score, train = (row["sides"][side]["tokens_per_second"] for row, side in zip(rows, sides, strict=True))
    commits = dict.fromkeys(short(row["commit"]) for row in (*rows, tokenising))
    return Measured(
        tokens_per_byte=tokenising["tokens"] / tokenising["bytes"], tokenise=tokenising["bytes_per_core_second"],
        parse=parsing["bytes_per_core_second"], embed=embed, score=score, train=train, commits=tuple(commits),
    )  # fmt: skip


def _row(path: Path, name: str) -> dict[str, Any]:
    rows = json.loads(path.read_text())["rows"]
    return next(row for row in rows if row["row"] == name and row["shape"] == SHAPE)


def _case(path: Path, name: str) -> dict[str, Any]:
    report = json.loads(path.read_text())
    return {"commit": report["commit"], **next(case for case in report["cases"] if case["name"] == name)}


def hours(job: str, machine: Machine, measured: Measured) -> dict[str, float]:
    """What a job takes, part by part, in hours. The parts follow each other: none overlaps another today."""
    tokens = TEXT * measured.tokens_per_byte
    rate = getattr(measured, job)
    parts = {
        "tokenising": TEXT / (measured.tokenise * machine.cores),
        # every process of `embed` reads the whole input; the others read what the first has tokenised
        "reading": TEXT / measured.parse if job == "embed" else 2 * tokens / machine.disk,
        "GPU": tokens / (rate * machine.gpus),
        "gradients": 0.0,
        "disk": TEXT / machine.disk,
    }
    if job == "train":
        steps = tokens / (STEP_TOKENS * machine.gpus)
        parts["gradients"] = steps * 4 * PARAMETERS * 2 * (machine.gpus - 1) / machine.gpus / machine.link
    return {name: seconds / 3600 for name, seconds in parts.items()}


def section(measured: Measured) -> str:
    """The section of the page."""
    lines, jobs = [], {"embed": "embed", "score": "evaluate", "train": "train, one epoch"}
    for job, title in jobs.items():
        for machine in MACHINES:
            parts = hours(job, machine, measured)
            whole = sum(parts.values())
            largest = max(parts, key=lambda name: parts[name])
            limit = f"{largest} ({parts[largest] / whole:.0%})"
            cells = [f"{value:.1f}" if value else "–" for value in parts.values()]
            lines.append([title, str(machine.gpus), *cells, f"{whole:.1f}", f"{whole * machine.gpus:,.0f}", limit])
    head = ["", "GPUs", "tokenising", "reading", "GPU", "gradients", "disk", "hours in all", "GPU-hours", "limit"]
    tokens = TEXT * measured.tokens_per_byte
    one, eight = MACHINES
    embedding = hours("embed", one, measured)
    as_long = embedding["GPU"] / embedding["reading"]
    return f"""Hours, worked out from measurements, not measured as a whole:

{markdown_table(head, lines)}

GPT-2 small with carried keys and values, windows of 300 tokens, bfloat16, on NVIDIA H200 GPUs. 100 GB are
{tokens / 1e9:.1f} billion tokens. Measured (commits {", ".join(measured.commits)}), per GPU: embedding
{measured.embed:,.0f} tokens/s, scoring {measured.score:,.0f}, training {measured.train:,.0f}; per core: tokenising
{measured.tokenise / 1e6:.1f} MB/s, reading JSON lines {measured.parse / 1e6:,.0f} MB/s.

Assumed, not measured:

* {one.cores} cores for one GPU and {eight.cores} for eight; all cores tokenise equally fast.
* A disk of {one.disk / 1e9:.0f} GB/s that all processes share; text is read once, tokens take two bytes each. Vectors
  ({4 * 768 / 1e3:.0f} kB a document) are not counted.
* Eight GPUs are eight times as fast as one. Gradients of {PARAMETERS / 1e6:.0f} million parameters in float32 pass over
  links of {one.link / 1e9:.0f} GB/s after every step of {STEP_TOKENS:,} tokens a GPU, and do not overlap with it.
* Nothing else overlaps either. `embed` tokenises a group of documents before the GPU reads it; `evaluate` and `train`
  tokenise the corpus first, and later calls find it in the cache.
* Each process of `embed` reads and parses the whole input. With {as_long:,.0f} GPUs this would take as long as the
  GPUs' work."""


def main() -> None:
    write_section(PAGE, "corpus_cost", section(read()))


if __name__ == "__main__":
    main()
