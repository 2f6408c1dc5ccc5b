# SPDX-License-Identifier: Apache-2.0
"""Speed of scoring whole documents with carried keys and values, and against an earlier commit of the library.

"document": one document of 100,000 tokens, with a state, without, and with a state but blocks of one window: one after
the other. "books": a hundred documents of different lengths, eight at once.

Every commit runs in a process of its own, which imports only the library and `steps`. Their sides are timed in turns,
so that the speed of the machine is the same for both. The earlier one's API may be older: `add_memory` knows both.

    mkdir earlier && git archive 198079f src | tar x -C earlier
    python benchmarks/scoring.py --device cuda --earlier earlier/src 198079f       # about four minutes on one H200
    python benchmarks/scoring.py --device cuda --only books                        # about two
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cpu_limits import parse_arguments
from steps import SHAPES, autocast, base, synchronize

SEED, TOKENS, BOOKS = 0, 100_000, 100
BATCH, SCALE = {"document": 1, "books": 8}, {"document": 1.0, "books": 0.25}
STATE, LOOP, ALONE = "with a state", "with a state, window by window", "without a state"
EARLIER = "with a state, earlier commit"


# --- one commit, in its own process ------------------------------------------------------------------------------


def add_memory(shape: str, device: str) -> Any:
    """A model that carries keys and values of half a window: 4 sinks and the rest recent."""
    import carryforward as cf

    window, documents = SHAPES[shape]["window"], list(make_documents(shape, [20_000]))
    sinks, recent = 4, SHAPES[shape]["window"] // 2 - 4
    try:
        memory = cf.KVMemoryConfig(recent=recent, sinks=sinks)
    except AttributeError:  # before memories had configs of their own
        model = cf.add_recurrence(base(shape, device), window=window, slots=0, kept=recent, sinks=sinks)
        cf.measure_places(model, documents)
        return model
    return cf.add_recurrence(base(shape, device), window=window, memory=memory, documents=documents)


def make_documents(shape: str, lengths: list[int]) -> list[np.ndarray]:
    """Random tokens: they do not change the speed."""
    draw = np.random.default_rng(SEED)
    return [draw.integers(SHAPES[shape]["vocab_size"], size=length) for length in lengths]


def book_lengths(scale: float, count: int = BOOKS) -> list[int]:
    """Lengths of books, 20,000 to 150,000 tokens, times a scale."""
    lengths = np.random.default_rng(SEED).lognormal(np.log(55_000), 0.6, count).clip(20_000, 150_000)
    return [int(length * scale) for length in lengths]


class Scorer:
    """Scores the same documents in several ways, each by name."""

    def __init__(self, shape: str, device: str, part: str, path: str, scale: float):
        self.model, self.device = add_memory(shape, device).eval(), device
        self.model.fast_path = path if device == "cuda" else "off"
        lengths = [int(TOKENS * scale)] if part == "document" else book_lengths(scale)
        self.documents, self.batch = make_documents(shape, lengths), BATCH[part]

    def score(self, side: str) -> dict[str, float]:
        """Seconds, tokens and mean loss of scoring all documents."""
        synchronize(self.device)
        begin = time.perf_counter()
        with autocast(self.device):
            result = self._perplexity(side)
        synchronize(self.device)
        seconds = time.perf_counter() - begin
        return {"seconds": seconds, "tokens": result.tokens, "nats_per_token": result.nats / result.tokens}

    def _perplexity(self, side: str) -> Any:
        import carryforward as cf

        if side != LOOP:
            return cf.perplexity(self.model, self.documents, use_state=side != ALONE, batch_size=self.batch)
        from carryforward.engine.block_size import BLOCK_TOKENS

        tokens = BLOCK_TOKENS[self.device]
        BLOCK_TOKENS[self.device] = 1  # one window
        try:
            return cf.perplexity(self.model, self.documents, batch_size=self.batch)
        finally:
            BLOCK_TOKENS[self.device] = tokens


def serve(shape: str, device: str, part: str, path: str, scale: str) -> None:
    """Score once for each line of input, which names the side."""
    answer, sys.stdout = sys.stdout, sys.stderr
    scorer = Scorer(shape, device, part, path, float(scale))
    for line in sys.stdin:
        print(json.dumps(scorer.score(line.strip())), file=answer, flush=True)


class Process:
    """A process that runs `serve` with the library of some folder."""

    def __init__(self, source: Path | None, *arguments: str):
        path = os.pathsep.join([str(source), *([os.environ["PYTHONPATH"]] if "PYTHONPATH" in os.environ else [])])
        env = os.environ | ({} if source is None else {"PYTHONPATH": path}) | {"TRANSFORMERS_VERBOSITY": "error"}
        command = [sys.executable, __file__, "--serve", *arguments]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def score(self, side: str) -> dict[str, float]:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(side, file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"scoring {side} failed, with exit status {self.process.wait()}")
        return json.loads(line)

    def __enter__(self) -> "Process":
        return self

    def __exit__(self, *exception: Any) -> None:
        self.process.stdin.close()  # type: ignore[union-attr]
        self.process.wait()


# --- all commits in turns ----------------------------------------------------------------------------------------


def time_in_turns(sides: dict[str, Callable[[str], dict[str, float]]], rounds: int, warm_up: int) -> dict[str, Any]:
    """Tokens per second of each side: median, slowest and fastest of some rounds."""
    results: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
    for number in range(warm_up + rounds):
        for side, score in sides.items():
            result = score(STATE if side == EARLIER else side)
            if number >= warm_up:
                results[side].append(result)
    times: dict[str, Any] = {}
    for side, taken in results.items():
        tokens, seconds = taken[0]["tokens"], [result["seconds"] for result in taken]
        times[side] = {
            "tokens_per_second": tokens / statistics.median(seconds), "slowest": tokens / max(seconds),
            "fastest": tokens / min(seconds), "rounds": rounds, "tokens": tokens,
            "nats_per_token": taken[0]["nats_per_token"],
        }  # fmt: skip
    return times


def measure(args: argparse.Namespace, part: str, shape: str) -> dict[str, Any]:
    """One row: a part for a shape, with the earlier commit where one is given."""
    scale = args.scale or SCALE[part]
    arguments = shape, args.device, part, args.path, str(scale)
    row: dict[str, Any] = {"row": f"scoring, {part}", "shape": shape, "batch": BATCH[part]}
    row |= {"windows": None, "fast_path": args.path if args.device == "cuda" else "off", "scale": scale}
    with Process(None, *arguments) as ours:
        sides = dict.fromkeys((STATE, LOOP, ALONE) if part == "document" else (STATE, ALONE), ours.score)
        if args.earlier is None or part != "document":
            return row | {"sides": time_in_turns(sides, args.rounds, args.warm_up)}
        with Process(Path(args.earlier[0]), *arguments) as earlier:
            times = time_in_turns(sides | {EARLIER: earlier.score}, args.rounds, args.warm_up)
    return row | {"sides": times, "earlier_commit": args.earlier[1]}


def main() -> None:
    if sys.argv[1:2] == ["--serve"]:  # before anything of the library's present layout is imported
        return serve(*sys.argv[2:])
    from measurements import RESULTS, Report

    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", nargs="+", choices=["document", "books"], default=["document", "books"])
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, help="(those of GPT-2 small and SmolLM2; tiny on a CPU)")
    parser.add_argument("--earlier", nargs=2, metavar=("SRC", "COMMIT"), help="src of an earlier commit, and its name")
    parser.add_argument("--path", default="compiled", help="fast_path on a GPU (compiled)")
    parser.add_argument("--scale", type=float, help="length of the documents (1; of books 0.25)")
    parser.add_argument("--rounds", type=int, default=5)
    # The end of a document is a small block, whose graph is captured after some rounds.
    parser.add_argument("--warm-up", type=int, default=6)
    parser.add_argument("--out", type=Path, help="JSON to write (benchmarks/results/scoring-DEVICE.json)")
    args = parse_arguments(parser)
    shapes = args.shapes or (["gpt2-small", "smollm2-135m"] if args.device == "cuda" else ["tiny"])
    with Report(args.out or RESULTS / f"scoring-{args.device}.json", args.device, SHAPES, whole=False) as report:
        for part in args.only:
            for shape in shapes:
                begin = time.perf_counter()
                report.add(measure(args, part, shape))
                print(f"{part}, {shape}: {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
