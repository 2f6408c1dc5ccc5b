# SPDX-License-Identifier: Apache-2.0
"""Time and memory of one more token, against how many were written before it.

A recurrent model writes one long text; beside it, on the same base model, Hugging Face's own `generate` up to the last
position, and what there is beyond it without recurrence: reading the last T tokens again for every new one (overlap
T - 1, the state removed). Greedy, one sequence, one thread, float32, weights drawn at random: none of it matters to
the time.

At each point the tokens of two windows around it are timed, in processor time of the thread, which does not count
what other programs take. A machine may be slower in one minute than in another all the same. So a second text is begun
at each point, and the two take turns, token by token: "against a new text" is the quotient of their times and free of
that drift. Times are medians over single tokens; `mean_ms` has the tokens at which a window ends in it, `wall_ms` is by
the clock. Memory is the resident set of the process. Every case has a process of its own.

    python benchmarks/generation.py
    python benchmarks/generation.py --figure benchmarks/results/generation-cpu.json
"""

import argparse
import array
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import record
from memory import resident

from carryforward.utils.provenance import provenance

HERE = Path(__file__).parent
SEED = 0
RECURRENT, PLAIN, AGAIN = MODES = "recurrent", "Hugging Face", "window read again"
# of the base model, of the recurrence, where to measure, and how many tokens are read again
SHAPES: dict[str, dict[str, Any]] = {
    "7M": {
        "base": {"vocab_size": 8192, "n_positions": 512, "n_embd": 256, "n_layer": 6, "n_head": 4},
        "window": 256, "overlaps": [0, 32], "points": [100, 1_000, 10_000, 100_000], "again": 40,
    },
    "GPT-2 small": {
        "base": {"vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12},
        "window": 256, "overlaps": [0], "points": [100, 1_000, 5_000], "again": 6,
    },
}  # fmt: skip
QUIET = {"TRANSFORMERS_VERBOSITY": "error", "OMP_NUM_THREADS": "1"}


# --- one case, in a process of its own ---------------------------------------------------------------------------


class Clock:
    """A stopping criterion that stops nothing: it notes what each token took, and calls back."""

    def __init__(self, then: Callable[[int], None]):
        self.then = then
        self.wall, self.processor = array.array("d", [0.0]), array.array("d", [0.0])
        self.begun = time.perf_counter(), time.thread_time()

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        self.wall.append(time.perf_counter() - self.begun[0])
        self.processor.append(time.thread_time() - self.begun[1])
        self.then(len(self.wall) - 1)
        self.begun = time.perf_counter(), time.thread_time()
        return input_ids.new_zeros(len(input_ids)).bool()

    def told(self, first: int, last: int) -> dict[str, Any]:
        """What tokens `first` to `last` took, counted from 1."""
        wall, processor = self.wall[first : last + 1], self.processor[first : last + 1]
        return {
            "timed": len(wall),
            "ms": statistics.median(processor) * 1e3,
            "mean_ms": statistics.mean(processor) * 1e3,
            "wall_ms": statistics.median(wall) * 1e3,
        }


class SecondText:
    """Another text by the same model, in a thread of its own that waits for its turn before every token."""

    def __init__(self, model: Any, tokens: int, more: dict[str, Any]):
        self.clock = Clock(lambda written: self._hand_over())
        self.mine, self.yours = threading.Semaphore(0), threading.Semaphore(0)
        threading.Thread(target=self._run, args=(model, tokens, more), daemon=True).start()

    def _run(self, model: Any, tokens: int, more: dict[str, Any]) -> None:
        self.mine.acquire()
        write(model, tokens, self.clock, **more)

    def _hand_over(self) -> None:
        self.yours.release()
        self.mine.acquire()

    def write_a_token(self) -> None:
        self.mine.release()
        self.yours.acquire()


def measure(shape: str, mode: str, overlap: int) -> list[dict[str, Any]]:
    """Write a text; what one more token took at each point."""
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(SEED)
    settings = SHAPES[shape]
    window, positions = settings["window"], settings["base"]["n_positions"]
    model = build(shape, mode)
    if mode == AGAIN:
        clock = Clock(lambda written: None)
        prompt = torch.randint(settings["base"]["vocab_size"], (1, 2 * window))
        write(model, settings["again"], clock, prompt, overlap=window - 1, use_state=False)
        return [{"token": 2 * window} | clock.told(2, settings["again"])]  # the first one is the prompt's
    points, size, more = settings["points"], 2 * window, {"overlap": overlap}
    if mode == PLAIN:
        points, size, more = [100, positions - 100], 180, {}
    ends = [max(point + size // 2, size) for point in points]
    figures: list[dict[str, Any]] = []
    second: list[SecondText] = []

    def then(written: int) -> None:
        point, end = points[len(figures)], ends[len(figures)]
        if written == end - size + 1:
            second[:] = [SecondText(model, size, more)]
        if written > end - size:
            second[0].write_a_token()
        if written == end:
            anew = second[0].clock.told(2, size)["ms"]
            here = clock.told(end - size + 2, end)
            figures.append({"token": point, "resident_bytes": resident(), "begun_anew_ms": anew} | here)

    clock = Clock(then)
    write(model, max(ends), clock, **more)
    return figures


def build(shape: str, mode: str) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    from carryforward import add_recurrence

    base = GPT2LMHeadModel(GPT2Config(**SHAPES[shape]["base"], bos_token_id=0, eos_token_id=0)).eval()
    return base if mode == PLAIN else add_recurrence(base, window=SHAPES[shape]["window"])


def write(model: Any, tokens: int, clock: Clock, prompt: Any = None, **more: Any) -> None:
    """Exactly so many tokens, whatever they are."""
    import torch

    prompt = torch.ones(1, 1, dtype=torch.long) if prompt is None else prompt
    settings = {"max_new_tokens": tokens, "eos_token_id": None, "do_sample": False, "pad_token_id": 0}
    model.generate(prompt, stopping_criteria=[clock], **settings, **more)


# --- all cases ---------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """Run every case."""
    report: dict[str, Any] = provenance("cpu") | {"seed": SEED, "threads": 1, "precision": "float32", "jobs": args.jobs}
    report["kind"] = "generation benchmark"
    cases = [
        {"shape": shape, "mode": mode, "overlap": overlap, "config": SHAPES[shape]}
        for shape in args.shapes
        for mode, overlap in [(PLAIN, 0), (AGAIN, 0), *((RECURRENT, overlap) for overlap in SHAPES[shape]["overlaps"])]
    ]
    out = args.out or HERE / "results" / "generation-cpu.json"
    with ThreadPoolExecutor(args.jobs) as pool, record.cases(out, report) as add:
        for case, figures in zip(cases, pool.map(in_a_process, cases), strict=True):
            add(case | {"figures": figures})


def in_a_process(case: dict[str, Any]) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--case", case["shape"], case["mode"], str(case["overlap"])]
    done = subprocess.run(command, env=os.environ | QUIET, stdout=subprocess.PIPE, text=True, check=True)
    figures = json.loads(done.stdout.splitlines()[-1])
    for figure in figures:
        told = f"{case['shape']}, {name(case)}, token {figure['token']:,}: {figure['ms']:.2f} ms"
        print(told, file=sys.stderr, flush=True)
    return figures


# --- table and figure --------------------------------------------------------------------------------------------


def name(case: dict[str, Any]) -> str:
    return f"{case['mode']}, overlap {case['overlap']}" if case["mode"] == RECURRENT else case["mode"]


def table(report: dict[str, Any]) -> str:
    """Markdown: one row for each point; the quotient is to a text begun anew there."""
    rows = [["model", "", "token", "ms/token", "mean", "against a new text", "process"], ["---", "---", *["---:"] * 5]]
    for case in report["cases"]:
        for figure in case["figures"]:
            anew = f"{figure['ms'] / figure['begun_anew_ms']:.3f}" if "begun_anew_ms" in figure else "–"
            memory = f"{figure['resident_bytes'] / 1e6:,.0f} MB" if "resident_bytes" in figure else "–"
            cells = [f"{figure['token']:,}", f"{figure['ms']:.2f}", f"{figure['mean_ms']:.2f}", anew, memory]
            rows.append([case["shape"], name(case), *cells])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shapes = list(dict.fromkeys(case["shape"] for case in report["cases"]))
    figure, panels = plt.subplots(1, len(shapes), figsize=(3.8 * len(shapes) + 0.6, 3.9), layout="constrained")
    for axes, shape in zip(panels if len(shapes) > 1 else [panels], shapes, strict=True):
        cases = [case for case in report["cases"] if case["shape"] == shape]
        furthest = max(figure["token"] for case in cases for figure in case["figures"])
        limit = cases[0]["config"]["base"]["n_positions"]
        greens = iter(("#0b6e4f", "#6bbf59"))
        for case in cases:
            tokens = [f["token"] for f in case["figures"]]
            times = [f["ms"] for f in case["figures"]]
            if case["mode"] == AGAIN:
                axes.plot([limit, furthest], times * 2, "--", color="#c8553d", label=name(case), linewidth=2)
            else:
                colour, marker = ("#6c757d", "^") if case["mode"] == PLAIN else (next(greens), "o")
                axes.plot(tokens, times, color=colour, marker=marker, label=name(case), linewidth=2)
        axes.axvline(limit, color="#6c757d", linewidth=1, linestyle=":")
        label = {"rotation": 90, "ha": "right", "va": "top", "fontsize": 8, "color": "#6c757d"}
        axes.annotate(f"{limit} positions", (limit, 0.98), (-3, 0), ("data", "axes fraction"), "offset points", **label)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_formatter(lambda x, _: f"{x:,.0f}")
        axes.yaxis.set_major_formatter(lambda y, _: f"{y:g}")
        axes.yaxis.set_minor_formatter(lambda y, _: f"{y:g}" if f"{y:e}"[0] in "25" else "")
        axes.set_title(f"GPT-2 shape, {shape}" if shape == "7M" else shape, loc="left", fontsize=11)
        axes.set_xlabel("tokens written")
        axes.grid(True, which="major", color="#e3e3e3")
        axes.set_axisbelow(True)
        axes.margins(y=0.15)
        axes.spines[["top", "right"]].set_visible(False)
    axes = figure.axes[0]
    axes.set_ylabel("ms for one more token")
    axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description="Time and memory of one more token.")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES), help="some need --out")
    parser.add_argument("--jobs", type=int, default=1, help="cases that run side by side")
    parser.add_argument("--out", type=Path, help="JSON to write (benchmarks/results/generation-cpu.json)")
    parser.add_argument("--figure", type=Path, metavar="JSON", help="draw a PNG beside it and print a table")
    parser.add_argument("--case", nargs=3, metavar=("SHAPE", "MODE", "OVERLAP"), help="one case, as a JSON line")
    args = parser.parse_args()
    if args.figure:
        report = json.loads(args.figure.read_text())
        print(table(report))
        draw(report, args.figure.with_suffix(".png"))
    elif args.case:
        print(json.dumps(measure(args.case[0], args.case[1], int(args.case[2]))))
    else:
        if args.shapes != list(SHAPES) and not args.out:
            parser.error("--shapes needs --out, or a run of some would replace the results of all")
        run(args)


if __name__ == "__main__":
    main()
