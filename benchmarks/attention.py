# SPDX-License-Identifier: Apache-2.0
"""Kernel time of attention over carried keys and values and a window, in the ways that torch offers.

Parts: "attention" (the keys and values lie ready), "preparation" (finding, moving and concatenating them), "totals"
(preparation and attention, one function, eager and compiled, for the fastest variants). Every call is captured as a
CUDA graph of several calls, so that launches do not count; times are medians of many replays. Variants that are not
available are listed with the reason. A variant's output is compared with a reference in float32. Preparation and
totals are measured for the largest number of windows only, because they compile.

    python benchmarks/attention.py --device cuda                       # about five minutes on one H200
    python benchmarks/attention.py --only attention --shapes gpt2-small --windows 248 --seconds 60
    python benchmarks/attention.py --device cpu --shapes tiny --windows 4 --out /tmp/attention.json
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from attention_variants import BACKENDS, Buffers, Preparation, Variant, _sdpa, padded, variants
from cpu_limits import parse_arguments
from measurements import RESULTS, Report
from torch import Tensor

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2-small": {"heads": 12, "kv_heads": 12, "size": 64, "window": 300, "past": 150, "rotary": False},
    "smollm2-135m": {"heads": 9, "kv_heads": 3, "size": 64, "window": 300, "past": 150, "rotary": True},
    "tiny": {"heads": 6, "kv_heads": 2, "size": 16, "window": 12, "past": 6, "rotary": True},
}
WINDOWS = (8, 64, 248)
ROWS = 8  # of the batch: a window's predecessor is so many windows earlier
ITSELF: dict[str, tuple[str, ...]] = {
    "full": ("q", "keys", "values"), "window": ("q", "k", "v"), "pieces": ("q", "past_k", "past_v", "k", "v"),
}  # fmt: skip


# --- timing ----------------------------------------------------------------------------------------------------------


def both(function: Callable[..., Any], inputs: tuple[Tensor, ...], leaves: tuple[Tensor, ...]) -> Callable[[], Any]:
    """Forward and backward pass: the gradient of `leaves` for an output gradient of ones."""
    with torch.enable_grad():
        outputs = tuples(function(*inputs))
        ones = [torch.ones_like(output) for output in outputs]

    def call() -> Any:
        with torch.enable_grad():
            return torch.autograd.grad(tuples(function(*inputs)), leaves, ones)

    return call


def tuples(output: Any) -> tuple[Tensor, ...]:
    return output if isinstance(output, tuple) else (output,)


def microseconds(call: Callable[[], Any], device: str) -> float:
    """Time of one call, warm."""
    if device != "cuda":
        call()
        return statistics.median(_elapsed(call) for _ in range(3)) * 1e6
    inner, replay = 10, _captured(call, 10)
    begin, taken = time.perf_counter(), []
    while len(taken) < 5 or (len(taken) < 30 and time.perf_counter() - begin < 0.2):
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        replay()
        last.record()
        last.synchronize()
        taken.append(first.elapsed_time(last) * 1e3 / inner)
    return statistics.median(taken)


def _elapsed(call: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def _captured(call: Callable[[], Any], count: int) -> Callable[[], Any]:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            for _ in range(count):
                call()
    except Exception:
        with torch.cuda.graph(torch.cuda.CUDAGraph()):  # a capture that failed leaves the random generator claimed
            pass
        raise
    return graph.replay


class Table:
    """The cases of one row of the report, printed as they are measured; after the time limit they are skipped."""

    def __init__(self, title: str, device: str, deadline: float):
        self.device, self.deadline, self.cases = device, deadline, []  # type: ignore[var-annotated]
        print(f"\n{title}\n{'':62} forward     both   error", flush=True)

    def add(self, name: str, function: Callable[..., Any], inputs: tuple[Tensor, ...], leaves: tuple[Tensor, ...],
            reference: Any = None, **more: Any) -> None:  # fmt: skip
        """Time a function of `inputs`, forward and with the gradient of `leaves`, or say why that is not possible."""
        case: dict[str, Any] = {"name": name, **more}
        try:
            if time.perf_counter() > self.deadline:
                raise TimeoutError("not measured: the time limit was reached")
            with torch.no_grad():
                if reference is not None:
                    case["error"] = worst(function(*inputs), reference)
                case["forward_us"] = microseconds(lambda: function(*inputs), self.device)
            case["both_us"] = microseconds(both(function, inputs, leaves), self.device)
        except Exception as error:  # other variants can still be measured
            case["unavailable"] = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        self.cases.append(case)
        cells = [f"{case[key]:8.1f}" if key in case else "       –" for key in ("forward_us", "both_us")]
        error = f"{case['error']:.0e}" if "error" in case else ""
        print(f"{name:61} {' '.join(cells)} {error} {case.get('unavailable', '')[:90]}", flush=True)


def worst(outputs: Any, references: Any) -> float:
    """Largest difference, over the first two windows."""
    pairs = zip(tuples(outputs), tuples(references), strict=True)
    return max(float((a[:2].float() - b[:2].float()).abs().max()) for a, b in pairs)


# --- parts -----------------------------------------------------------------------------------------------------------


def make_inputs(shape: str, windows: int, device: str) -> dict[str, Tensor]:
    """Random queries, keys and values, laid out as projections leave them."""
    torch.manual_seed(0)
    spec, dtype = SHAPES[shape], torch.bfloat16 if device == "cuda" else torch.float32

    def make(heads: int, length: int) -> Tensor:
        x = torch.randn(windows, length, heads, spec["size"], device=device, dtype=dtype)
        return x.transpose(1, 2).requires_grad_()

    inputs = {"q": make(spec["heads"], spec["window"])}
    inputs |= {name: make(spec["kv_heads"], spec["window"]) for name in ("k", "v")}
    inputs |= {name: make(spec["kv_heads"], spec["past"]) for name in ("past_k", "past_v")}
    for name, pieces in (("keys", ("past_k", "k")), ("values", ("past_v", "v"))):
        inputs[name] = torch.cat([inputs[piece] for piece in pieces], dim=2).detach().requires_grad_()
    return inputs


@torch.no_grad()
def reference(q: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """The first two windows' attention, in float32."""
    groups, past = q.shape[1] // keys.shape[1], keys.shape[2] - q.shape[2]
    q, keys, values = (x[:2].detach().float() for x in (q, keys, values))
    keys, values = (x.repeat_interleave(groups, dim=1) for x in (keys, values))
    mask = torch.ones(q.shape[2], keys.shape[2], dtype=torch.bool, device=q.device).tril(past)
    return F.scaled_dot_product_attention(q, keys, values, attn_mask=mask)


def attention(table: Table, inputs: dict[str, Tensor], all_variants: list[Variant], **_: Any) -> None:
    """Every variant on keys and values that lie ready."""
    expected = {takes: reference(inputs["q"], inputs["keys"], inputs["values"]) for takes in ("full", "pieces")}
    expected["window"] = reference(inputs["q"], inputs["k"], inputs["v"])
    for variant in all_variants:
        given = tuple(inputs[name] for name in ITSELF[variant.takes])
        table.add(variant.name, variant.attend, given, given, expected[variant.takes])


def preparation(table: Table, inputs: dict[str, Tensor], prepare: Preparation, compile: Callable, **_: Any) -> None:
    """The carried keys and values of each window in front of its own: by index and by slice, eager and compiled."""
    given = inputs["k"], inputs["v"]
    for takes in ("full", "pieces"):
        for gather in ("by_index", "by_slice"):
            function = partial(getattr(prepare, takes), gather)
            with torch.no_grad():
                expected = tuple(x.clone() for x in function(*given))
            name = f"{'concatenated' if takes == 'full' else 'separate'}, {gather.replace('_', ' ')}"
            table.add(f"{name}, eager", function, given, given, expected)
            table.add(f"{name}, compiled", compile(function), given, given, expected)


def totals(table: Table, inputs: dict[str, Tensor], prepare: Preparation, chosen: list[Variant], compile: Callable,
           **_: Any) -> None:  # fmt: skip
    """Preparation and attention in one function: today's eager one, into buffers, and the chosen variants."""
    given = inputs["q"], inputs["k"], inputs["v"]
    gqa = inputs["q"].shape[1] != inputs["k"].shape[1]
    past = inputs["past_k"].shape[2]

    def together(variant: Variant, gather: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return variant.attend(q, *getattr(prepare, variant.takes)(gather, k, v))

    with torch.no_grad():
        expected = reference(inputs["q"], *prepare.full("by_index", inputs["k"], inputs["v"]))
    for backend in ("default", "cuDNN"):
        attend = partial(_sdpa, BACKENDS[backend], enable_gqa=gqa)
        today = Variant("padded queries", "full", partial(padded, attend, past))
        table.add(f"padded queries, {backend}, by index, eager", partial(together, today, "by_index"), given, given,
                  expected)  # fmt: skip
        buffers = Buffers(inputs, prepare, attend)
        leaves = tuple(buffer.requires_grad_() for buffer in buffers.buffers)
        table.add(f"padded queries, {backend}, by index, buffers, eager", buffers, given, leaves, expected)
    for variant in chosen:
        for gather in ("by_index", "by_slice"):
            function, name = partial(together, variant, gather), f"{variant.name}, {gather.replace('_', ' ')}"
            table.add(f"{name}, eager", function, given, given, expected)
            table.add(f"{name}, compiled", compile(function), given, given, expected)


def fastest(cases: list[dict[str, Any]], all_variants: list[Variant], count: int = 2) -> list[Variant]:
    """The variants over carried keys that took the least time, forward and backward: one of each family."""
    times = {case["name"]: case["both_us"] for case in cases if "both_us" in case}
    usable = [variant for variant in all_variants if variant.takes != "window" and variant.name in times]
    best: dict[str, Variant] = {}
    for variant in sorted(usable, key=lambda variant: times[variant.name]):
        best.setdefault(variant.name.split(",")[0], variant)
    return list(best.values())[:count]


PARTS = {"attention": attention, "preparation": preparation, "totals": totals}


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile for fixed shapes. Too many recompilations are an error: else the function would silently run eagerly."""
    torch._dynamo.config.recompile_limit = 64
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(lambda *args, **kwargs: function(*args, **kwargs), dynamic=False)


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Rows of the report, one for each shape, number of windows and part."""
    deadline = time.perf_counter() + args.seconds
    for shape in args.shapes:
        spec = SHAPES[shape]
        torch.compiler.reset()
        compile = (lambda function: function) if args.eager else compiled
        sizes = spec["heads"], spec["kv_heads"], spec["window"], spec["past"]
        all_variants = variants(*sizes, args.device, compile)
        for windows in args.windows:
            inputs = make_inputs(shape, windows, args.device)
            prepare = Preparation(inputs, min(ROWS, windows), spec["rotary"])
            chosen = [variant for variant in all_variants if variant.name in args.variants]
            for part in args.only:
                if part != "attention" and windows != max(args.windows):
                    continue  # compiling takes longer than measuring
                table = Table(f"{part}: {shape}, {windows} windows; microseconds", args.device, deadline)
                begin = time.perf_counter()
                PARTS[part](table, inputs=inputs, all_variants=all_variants, prepare=prepare, chosen=chosen,
                            compile=compile)  # fmt: skip
                if part == "attention" and not args.variants:
                    chosen = fastest(table.cases, all_variants)
                yield {"row": part, "shape": shape, "batch": windows, "windows": None, "cases": table.cases,
                       "seconds": round(time.perf_counter() - begin, 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="parts to measure")
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=["gpt2-small", "smollm2-135m"])
    parser.add_argument("--windows", nargs="+", type=int, default=list(WINDOWS), help="windows at once")
    parser.add_argument("--variants", nargs="+", default=[], help="for totals, in place of the two fastest")
    parser.add_argument("--seconds", type=float, default=480.0, help="after so many, nothing more is measured")
    parser.add_argument("--eager", action="store_true", help="compile nothing")
    parser.add_argument("--out", type=Path, help="JSON to write (benchmarks/results/attention-DEVICE.json)")
    args = parse_arguments(parser)
    out = args.out or RESULTS / f"attention-{args.device}.json"
    begin = time.perf_counter()
    with Report(out, args.device, SHAPES, whole=False) as report:
        for row in measure(args):
            report.add(row, show=False)
    print(f"\n{time.perf_counter() - begin:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
