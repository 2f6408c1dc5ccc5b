# SPDX-License-Identifier: Apache-2.0
"""Peak memory of one training step against the length of the document.

A step is a forward call with labels and its backward pass, on one document, without an optimizer; the gradients are
already allocated. Three ways of training on the same number of tokens are compared: a recurrent model that recomputes
its windows (the default), one that keeps the graph of all windows, and the plain Hugging Face model on the whole
document at once. Attention dropout is off, so the plain model can use attention kernels whose memory is linear in the
length, which makes it harder to beat.

The peak is measured above the memory in use before the step: weights, gradients and the document. On a GPU the
allocator counts it exactly. On a CPU it is the resident set of the process; malloc is told to return freed blocks to
the system at once, which makes the number precise. Every case runs in its own process.

    python benchmarks/memory.py --device cpu
    python benchmarks/memory.py --figure benchmarks/results/memory-cpu.json
"""

import argparse
import contextlib
import gc
import json
import math
import resource
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpu_limits import parse_arguments
from measurements import RESULTS, collect_cases, run_case

from carryforward.utils.provenance import provenance

SEED = 0
RECOMPUTED, KEPT, PLAIN = MODES = "recomputed", "kept graph", "plain, full length"
WINDOWS = [4, 16, 64, 256]
SHAPES = {
    "cpu": {"window": 128, "vocab_size": 8192, "n_embd": 256, "n_layer": 6, "n_head": 4},  # 7 M parameters
    "cuda": {"window": 300, "vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12},  # GPT-2 small
}
LIMIT_GB = {"cpu": 10.0, "cuda": math.inf}  # a GPU reports when it is full; a CPU case could exhaust the machine
# Blocks of a page or more are mapped separately and leave the resident set when freed; the rest is one heap that is
# trimmed at once. Repeated measurements then differ by 0.3 % instead of 1 %.
MALLOC = {
    "MALLOC_MMAP_THRESHOLD_": "4096",
    "MALLOC_TRIM_THRESHOLD_": "0",
    "MALLOC_TOP_PAD_": "0",
    "MALLOC_ARENA_MAX": "1",
}
QUIET = {"TRANSFORMERS_VERBOSITY": "error"}


# --- one case, in its own process ---------------------------------------------------------------------------


def measure(device: str, bf16: bool, mode: str, windows: int) -> dict[str, Any]:
    """Run one step and measure it."""
    import torch

    torch.manual_seed(SEED)
    window = SHAPES[device]["window"]
    model = build(device, mode, max(windows, 2) * window)
    ids = torch.randint(SHAPES[device]["vocab_size"], (1, windows * window), device=device)

    def step(tokens: int) -> float:
        with torch.autocast(device, torch.bfloat16) if bf16 else contextlib.nullcontext():
            loss = model(ids[:, :tokens], labels=ids[:, :tokens]).loss
        loss.backward()
        return loss.item()

    case = {"mode": mode, "windows": windows, "tokens": ids.shape[1]}
    try:
        step(2 * window)  # allocates the gradients and what libraries allocate on first use
        gc.collect()
        torch.manual_seed(SEED)
        peak_above = watch_peak(device)
        begin = time.perf_counter()
        loss = step(ids.shape[1])
        seconds = time.perf_counter() - begin
        peak = peak_above()
    except torch.OutOfMemoryError:
        return case | {"skipped": "out of memory"}
    states = 0 if mode == PLAIN else windows * model.memory.state_bytes
    sizes = {"peak_bytes": peak, "states_bytes": states, "beyond_states_bytes": peak - states}
    return case | sizes | {"seconds": round(seconds, 2), "loss": loss}


def build(device: str, mode: str, length: int) -> Any:
    """The same base model for all modes; only the plain one needs a position for every token."""
    from transformers import GPT2Config, GPT2LMHeadModel

    from carryforward import add_recurrence

    shape = dict(SHAPES[device])
    window = shape.pop("window")
    positions = length if mode == PLAIN else window
    config = GPT2Config(**shape, n_positions=positions, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0)
    base = GPT2LMHeadModel(config).to(device).train()
    if mode == PLAIN:
        return base
    model = add_recurrence(base, preset="paper", window=window, keep_windows=0, keep_graph=mode == KEPT)
    model.fast_path = "off"  # captured graphs hold memory that does not depend on the length; `speed.py` counts it
    return model


def watch_peak(device: str) -> Callable[[], int]:
    """Start measuring. Returns a function that gives the peak since then, in bytes above what is in use now."""
    if device == "cuda":
        import torch

        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        return lambda: torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak: that of building the model may be higher
    before = resident()
    return lambda: peak_resident() - before


def resident() -> int:
    """The resident set of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def peak_resident() -> int:
    """The largest resident set of this process in bytes. `getrusage` would also count the process that started it."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) * 1024


# --- all cases ---------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> None:
    """Run every case that fits, and write the results."""
    import torch

    out = args.out or RESULTS / f"memory-{args.device}{'-bf16' if args.bf16 else ''}.json"
    limit = LIMIT_GB[args.device] if args.limit_gb is None else args.limit_gb
    precision = "bfloat16 autocast" if args.bf16 else "float32"
    config = SHAPES[args.device] | {"batch": 1, "attn_pdrop": 0.0, "threads": torch.get_num_threads()}
    report = {**provenance(args.device), "seed": SEED, "precision": precision, "config": config}
    with collect_cases(out, report) as add:
        for mode in MODES:
            expected = 0.0  # bytes per window in the previous case, if memory grows with their number
            for windows in sorted(args.windows):
                if expected * windows > limit * 1e9:
                    case = {"mode": mode, "windows": windows, "tokens": windows * SHAPES[args.device]["window"]}
                    case["skipped"] = f"about {expected * windows / 1e9:.2g} GB expected, the limit is {limit:g} GB"
                else:
                    case = run_case(__file__, *case_arguments(args, mode, windows), env=MALLOC | QUIET)
                    expected = 0.0 if mode == RECOMPUTED else case.get("peak_bytes", 0) / windows
                outcome = case.get("skipped") or f"{readable(case['peak_bytes'])} in {case['seconds']:.1f} s"
                print(f"{mode}, {windows} windows, {case['tokens']} tokens: {outcome}", file=sys.stderr, flush=True)
                add(case)


def case_arguments(args: argparse.Namespace, mode: str, windows: int) -> list[str]:
    return ["--device", args.device, *["--bf16"] * args.bf16, "--case", mode, str(windows)]


# --- table and figure --------------------------------------------------------------------------------------------


def readable(count: float) -> str:
    if count < 1e6:
        return f"{count / 1e3:.0f} kB"
    return f"{count / 1e6:.1f} MB" if count < 1e8 else f"{count / 1e6:,.0f} MB"


def table(report: dict[str, Any]) -> str:
    """Markdown: peaks, and the recomputed peak without the states relative to that of the shortest document."""
    cases = {(case["mode"], case["windows"]): case for case in report["cases"]}
    rows = [["windows", "tokens", *MODES, "states", "recomputed beyond states, relative"]]
    rows.append(["---:"] * len(rows[0]))
    counts = sorted({windows for _, windows in cases})
    shortest = cases[RECOMPUTED, counts[0]]["beyond_states_bytes"]
    for windows in counts:
        case = cases[RECOMPUTED, windows]
        shown = [cases.get((mode, windows), {"skipped": "not run"}) for mode in MODES]
        peaks = [readable(c["peak_bytes"]) if "peak_bytes" in c else f"({c['skipped']})" for c in shown]
        ratio = f"{case['beyond_states_bytes'] / shortest:.3f}"
        rows.append([str(windows), f"{case['tokens']:,}", *peaks, readable(case["states_bytes"]), ratio])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def draw(report: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter, NullLocator

    figure, axes = plt.subplots(figsize=(7.2, 3.9), layout="constrained")
    for mode, colour, marker in zip(MODES, ("#0b6e4f", "#c8553d", "#6c757d"), "os^", strict=True):
        cases = [case for case in report["cases"] if case["mode"] == mode and "peak_bytes" in case]
        windows, peaks = [case["windows"] for case in cases], [case["peak_bytes"] / 1e6 for case in cases]
        axes.loglog(windows, peaks, color=colour, marker=marker, label=mode, linewidth=2)
    ticks = sorted({case["windows"] for case in report["cases"]})
    size = report["config"]["window"]
    axes.set_xticks(ticks, [f"{count}\n{count * size:,} tokens" for count in ticks])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y / 1000:g} GB" if y >= 1000 else f"{y:g} MB"))
    axes.set_xlabel(f"windows of {size} tokens")
    axes.set_title("Peak memory of one training step, above weights and gradients", loc="left", fontsize=11)
    axes.margins(y=0.1)
    axes.grid(True, which="major", color="#e3e3e3")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description="Peak memory of one training step.")
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument(
        "--windows", type=int, nargs="+", default=WINDOWS, help="numbers of windows; other than the default need --out"
    )
    parser.add_argument("--bf16", action="store_true", help="under bfloat16 autocast")
    parser.add_argument(
        "--limit-gb", type=float, help="skip cases that need more (CPU: 10, GPU: no limit); needs --out"
    )
    parser.add_argument("--out", type=Path, help="JSON to write (benchmarks/results/memory-DEVICE.json)")
    parser.add_argument("--figure", type=Path, metavar="JSON", help="draw a PNG next to the JSON and print a table")
    parser.add_argument("--case", nargs=2, metavar=("MODE", "WINDOWS"), help="one case only, printed as a JSON line")
    args = parse_arguments(parser)
    if args.figure:
        report = json.loads(args.figure.read_text())
        print(table(report))
        draw(report, args.figure.with_suffix(".png"))
    elif args.case:
        print(json.dumps(measure(args.device, args.bf16, args.case[0], int(args.case[1]))))
    else:
        for flag, part in (("--windows", args.windows != WINDOWS), ("--limit-gb", args.limit_gb is not None)):
            if part and not args.out:
                parser.error(f"{flag} needs --out, or a partial run would replace the complete results")
        run(args)


if __name__ == "__main__":
    main()
