# SPDX-License-Identifier: Apache-2.0
"""Time of finding out the structure of a model and of verifying it, as `add_recurrence` does for types that are not in
its table: at 125 million parameters, on a CPU, the median of several repeats after one that warms up.

CPU seconds count the work of all threads, whatever else the machine does; with one thread and nothing else running they
are the time itself.

    python benchmarks/verification.py                  # writes benchmarks/results/verification-cpu.json; a minute
    python benchmarks/verification.py --threads 1
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cpu_limits import parse_arguments
from measurements import RESULTS, collect_cases
from steps import SHAPES, base

from carryforward.utils.provenance import provenance

MODELS = ("gpt2-small", "smollm2-135m")


def measure(shape: str, repeats: int) -> dict[str, Any]:
    """The times of both steps for a model of a shape, with random weights."""
    import torch

    import carryforward as cf
    from carryforward.backbones.discovery import discover
    from carryforward.models.verification import verify

    torch.manual_seed(0)
    model = base(shape, "cpu").eval()
    steps: dict[str, Callable[[], Any]] = {
        "discovery": lambda: discover(model),
        "verification": lambda: verify(model, cf.RecurrentForCausalLM),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in steps}
    for _ in range(1 + repeats):
        for name, step in steps.items():
            wall, cpu = time.perf_counter(), time.process_time()
            step()
            times[name].append((time.perf_counter() - wall, time.process_time() - cpu))
    case: dict[str, Any] = {"model": shape, "parameters": model.num_parameters(), "repeats": repeats}
    for name, pairs in times.items():
        seconds, cpu_seconds = (list(values) for values in zip(*pairs[1:], strict=True))
        case[name] = {"seconds": statistics.median(seconds), "cpu_seconds": statistics.median(cpu_seconds),
                      "all_seconds": seconds, "all_cpu_seconds": cpu_seconds}  # fmt: skip
    return case


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=SHAPES, default=MODELS)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "verification-cpu.json")
    arguments = parse_arguments(parser)
    report = {"kind": "benchmark", "benchmark": "verification", **provenance("cpu"), "seed": 0}
    with collect_cases(arguments.out, report) as add:
        for shape in arguments.models:
            case = measure(shape, arguments.repeats)
            add(case)
            print(json.dumps(case), flush=True)


if __name__ == "__main__":
    main()
