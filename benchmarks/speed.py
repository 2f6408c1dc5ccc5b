# SPDX-License-Identifier: Apache-2.0
"""Speed of recurrent models against the plain model in the same run: training, evaluation, generation.

Every comparison times its sides in turns and reports the median, the slowest and the fastest of several rounds. The
plain model is as fast as possible: compiled as a whole, captured as CUDA graphs, without attention masks.

    python benchmarks/speed.py --device cuda            # everything, about twelve minutes on one H200
    python benchmarks/speed.py --device cpu
    python benchmarks/speed.py --only training --device cuda
    python benchmarks/speed_report.py                   # SPEED.md and the figures, from the JSON files
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from cpu_limits import parse_arguments
from measurements import RESULTS, Report
from steps import (
    SHAPES,
    autocast,
    base,
    captured,
    free,
    half_a_window,
    plain_step,
    recurrent,
    recurrent_step,
    synchronize,
    time_interleaved,
)
from torch import Tensor

# --- training ------------------------------------------------------------------------------------------------------


def training(device: str, report: Report) -> None:
    """Forward and backward pass of a training step, without an optimizer."""
    on_gpu, on_cpu = [("gpt2-small", 8, 32), ("gpt2-small", 32, 32)], [("tiny", 8, 16), ("bundled", 4, 8)]
    rounds = 4 if device == "cuda" else 9
    for shape, batch, windows in on_gpu if device == "cuda" else on_cpu:
        tokens = batch * windows * SHAPES[shape]["window"]
        row = {"row": "training", "shape": shape, "batch": batch, "windows": windows}
        fast = "compiled" if device == "cuda" else "off"
        sides = {"plain": plain_step(shape, device, batch, windows, graphed=device == "cuda")}
        sides["recurrent, recomputed"] = recurrent_step(shape, device, batch, windows, fast, 0)
        fits = device == "cpu" or batch * windows <= 256
        if fits:
            sides["recurrent, kept"] = recurrent_step(shape, device, batch, windows, fast, windows)
        else:
            sides["recurrent, 6 windows kept"] = recurrent_step(shape, device, batch, windows, fast, 6)
        if device == "cuda" and batch == 8:
            sides["plain, eager"] = plain_step(shape, device, batch, windows, graphed=False)
            sides["recurrent, recomputed, eager"] = recurrent_step(shape, device, batch, windows, "off", 0)
        report.add({**row, "sides": time_interleaved(sides, rounds, tokens, device)})
        sides.clear()
        free(device)


def cost(device: str, report: Report) -> None:
    """Cost of a pooled state in a step that keeps all activations: one slot, and many at every layer."""
    from carryforward import VectorMemoryConfig

    shape_sizes = [("gpt2-small", 8, 32)] if device == "cuda" else [("tiny", 8, 16), ("bundled", 4, 8)]
    for shape, batch, windows in shape_sizes:
        fast, tokens = "compiled" if device == "cuda" else "off", batch * windows * SHAPES[shape]["window"]
        step = partial(recurrent_step, shape, device, batch, windows, fast, windows)
        many = {"memory": VectorMemoryConfig(slots=48, insert_at="all")}
        for row, fields in (("state's cost", {}), ("48 slots' cost", many)):
            sides = {"with state": step(**fields), "state removed": step(use_state=False, **fields)}
            times = time_interleaved(sides, 6 if device == "cuda" else 11, tokens, device)
            report.add({"row": row, "shape": shape, "batch": batch, "windows": windows, "sides": times})
            sides.clear()
            free(device)


def blocks(device: str, report: Report, sizes: Sequence[tuple[str, int, int]] | None = None) -> None:
    """Carried keys and values of half a window: a sample in one block, in four that are recomputed, window by window.

    Against the same model without its state, all windows of a sample side by side. Each is timed in turns with that
    one alone: together, what they keep for the backward pass would not fit a GPU.
    """
    on_gpu, on_cpu = [("gpt2-small", 8, 32), ("smollm2-135m", 8, 20)], [("tiny", 8, 16), ("bundled", 4, 8)]
    for shape, batch, windows in sizes or (on_gpu if device == "cuda" else on_cpu):
        tokens, fast = batch * windows * SHAPES[shape]["window"], "compiled" if device == "cuda" else "off"
        step = partial(recurrent_step, shape, device, batch, windows, fast, memory=half_a_window(shape))
        removed = step(windows, use_state=False)
        report.drop("half a window of keys and values", shape)  # what was measured before there were blocks
        rows = {
            "keys and values, one block": (windows, {"block_windows": windows}),
            "keys and values, four blocks recomputed": (0, {"block_windows": windows // 4}),
            "keys and values, window by window": (windows, {"block_windows": 1}),
        }
        for row, (keep, fields) in rows.items():
            sides = {"with state": step(keep, **fields), "state removed": removed}
            times = time_interleaved(sides, 6 if device == "cuda" else 11, tokens, device)
            report.add({"row": row, "shape": shape, "batch": batch, "windows": windows, "sides": times})
            sides.clear()
            free(device)
        del removed
        free(device)


# --- evaluation ------------------------------------------------------------------------------------------------------


def strided(model: Any, ids: Tensor, window: int, stride: int) -> tuple[float, int]:
    """The loop of Hugging Face's guide to perplexity, batch 1: overlapping windows whose new tokens are scored.

    Each piece has one token more than the window, because its first token is never scored; then the same tokens are
    scored as by `perplexity`. Returns the summed loss and the number of scored tokens.
    """
    total, scored, before = 0.0, 0, 0
    for begin in range(0, ids.shape[1], stride):
        end = min(begin + window + 1, ids.shape[1])
        new = end - before
        x = ids[:, begin:end]
        labels = x.clone()
        labels[:, :-new] = -100
        with torch.no_grad():
            count = int((labels[:, 1:] != -100).sum())
            total += float(model(x, labels=labels).loss) * count
        scored += count
        before = end
        if end == ids.shape[1]:
            break
    return total, scored


def evaluation(device: str, report: Report) -> None:
    from carryforward import perplexity

    shape, batch, windows = ("gpt2-small", 32, 64) if device == "cuda" else ("bundled", 8, 12)
    window = SHAPES[shape]["window"]
    model = recurrent(shape, device).eval()
    plain = model.base
    ids = torch.randint(SHAPES[shape]["vocab_size"], (batch, windows * window + 1))
    documents = [row.numpy() for row in ids]
    tokens = batch * windows * window
    if device == "cuda":
        model.fast_path = "compiled"
    on_device = ids.to(device)

    @torch.inference_mode()
    def forward() -> None:
        """The plain model's loss, window by window, with the same batch."""
        total = torch.zeros((), device=device)
        for w in range(windows):
            x = on_device[:, w * window : (w + 1) * window + 1]
            with autocast(device):
                logits = plain(input_ids=x[:, :-1], use_cache=False).logits
            total += F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten(), reduction="sum")
        float(total)

    def ours(overlap: int, use_state: bool = True) -> Any:
        with autocast(device):
            return perplexity(model, documents, overlap=overlap, use_state=use_state, batch_size=batch)

    sides = {"plain forward": forward, "recurrent": lambda: ours(0)}
    if device == "cuda":
        sides["plain forward, compiled and graphed"] = graphed_forward(plain, on_device, window, windows)
    for side in sides.values():
        side()
    times = time_interleaved(sides, 5, tokens, device)
    report.add({"row": "evaluation, overlap 0", "shape": shape, "batch": batch, "windows": windows, "sides": times})

    few, count = ids[:1].to(device), windows * window  # one document for the loop at batch 1
    half = window // 2

    def guide() -> tuple[float, int]:
        with autocast(device):
            parts = [strided(plain, row[None], window, window - half) for row in few]
        return sum(part[0] for part in parts), sum(part[1] for part in parts)

    guide(), ours(half), ours(half, use_state=False)
    loop = time_interleaved({"Hugging Face's strided loop": guide}, 3, count, device)
    times = loop | time_interleaved(
        {"recurrent": lambda: ours(half), "plain, batched": lambda: ours(half, use_state=False)}, 3, tokens, device
    )
    # both give the same perplexity: in float32, on the same document
    nats, scored = strided(plain, few[:1], window, window - half)
    same = perplexity(plain, documents[:1], window=window, overlap=half, batch_size=batch)
    agreement = {"strided loop": nats / scored, "ours": same.nats / same.tokens, "tokens": [scored, same.tokens]}
    report.add({"row": "evaluation, overlap 50 %", "shape": shape, "batch": batch, "windows": windows, "sides": times,
                "nats_per_token": agreement})  # fmt: skip


def graphed_forward(model: Any, ids: Tensor, window: int, windows: int) -> Callable[[], object]:
    """The plain model's forward pass over windows, compiled and captured as a CUDA graph."""

    def loss(x: Tensor) -> Tensor:
        logits = model(input_ids=x[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten(), reduction="sum")

    compiled = torch.compile(loss, dynamic=False)
    buffer, total = ids[:, : window + 1].clone(), torch.zeros((), device=ids.device)

    def one_window() -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            total.add_(compiled(buffer))

    with torch.no_grad():
        replay = captured(one_window)

    def replayed() -> None:
        for w in range(windows):
            buffer.copy_(ids[:, w * window : (w + 1) * window + 1])
            replay()
        float(total)

    return replayed


# --- generation ----------------------------------------------------------------------------------------------------


def generation(device: str, report: Report) -> None:
    """Greedy generation, in bfloat16 on a GPU, with Hugging Face's loop. Tokens per second of the whole batch.

    Both memories take turns with Hugging Face's cache; a row for each.
    """
    shape, new = ("gpt2-small", 400) if device == "cuda" else ("bundled", 200)
    window, vocabulary = SHAPES[shape]["window"], SHAPES[shape]["vocab_size"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    plain = base(shape, device, n_positions=1024).to(dtype).eval()
    memories = {"vector": {}, "keys and values": {"memory": half_a_window(shape)}}
    models = {memory: recurrent(shape, device, **fields).to(dtype).eval() for memory, fields in memories.items()}
    report.drop("generation", shape)  # of the vector alone
    greedy = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    static = {"cache_implementation": "static"} if device == "cuda" else {}
    name = "Hugging Face, static cache, compiled" if static else "Hugging Face"
    for batch in (1, 16) if device == "cuda" else (1, 4):
        ids = torch.randint(vocabulary, (batch, 16), device=device)
        long = torch.randint(vocabulary, (batch, 50_000 // window * window + 16), device=device)
        sides = {(name, ""): partial(plain.generate, ids, **greedy, **static)}
        for memory, model in models.items():
            sides["recurrent", memory] = partial(model.generate, ids, **greedy)
            far = model.advance_state(long)
            sides["recurrent, from token 50,000", memory] = partial(model.generate, state=far, **greedy)
        for side in sides.values():
            side()
        times = time_interleaved(sides, 3 if device == "cuda" else 7, batch * new, device)
        for memory in models:
            of_row = {side: taken for (side, of), taken in times.items() if of in ("", memory)}
            row = {"row": f"generation, {memory}", "shape": shape, "batch": batch, "windows": None}
            report.add({**row, "sides": of_row})


# --- length --------------------------------------------------------------------------------------------------------


BLOCK = 8  # windows of a block in the measurement of length


def length(device: str, report: Report, counts: Sequence[int] | None = None) -> None:
    """One document of increasing length, keys and values carried, in blocks that are recomputed: speed of a training
    step and, on a GPU, its peak memory.

    The peak includes captured CUDA graphs, and excludes weights, gradients and the states between blocks, which are
    reported beside it. On a CPU, see `memory.py`.
    """
    shape, all_counts = ("gpt2-small", (8, 32, 320, 3400)) if device == "cuda" else ("bundled", (8, 16, 64))
    window, vocabulary = SHAPES[shape]["window"], SHAPES[shape]["vocab_size"]
    model = recurrent(shape, device, memory=half_a_window(shape), keep_windows=0, block_windows=BLOCK).train()
    model.fast_path = "compiled" if device == "cuda" else "off"
    fixed = 2 * sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())

    def step(windows: int) -> None:
        ids = torch.randint(vocabulary, (1, windows * window + 1), device=device)
        with autocast(device):
            loss = model(ids, labels=ids).loss
        loss.backward()
        synchronize(device)

    counts = counts or all_counts
    warm_up(lambda: step(counts[1]), device)  # all graphs belong to every peak
    points = []
    for windows in counts:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        taken = []
        for _ in range(3 if windows < 1000 else 1):
            begin = time.perf_counter()
            step(windows)
            taken.append(time.perf_counter() - begin)
        point: dict[str, Any] = {"windows": windows, "tokens": windows * window}
        point["tokens_per_second"] = windows * window / statistics.median(taken)
        point["states_bytes"] = -(-windows // BLOCK) * model.memory.state_bytes  # one for each block
        if device == "cuda":
            point["peak_bytes"] = torch.cuda.max_memory_allocated() - fixed - point["states_bytes"]
        points.append(point)
    report.add({"row": "length", "shape": shape, "batch": 1, "windows": None, "points": points, "block_windows": BLOCK})


def warm_up(step: Callable[[], object], device: str, most: int = 24) -> None:
    """Repeat a step until it no longer captures graphs: until three steps in a row leave as much memory reserved. At
    most so many times: a peak that grows later shows in the results."""
    unchanged, in_use = 0, -1
    for _ in range(most):
        step()
        now = torch.cuda.memory_reserved() if device == "cuda" else 0
        unchanged, in_use = (unchanged + 1 if now == in_use else 0), now
        if unchanged == 2:
            return


# --- data ----------------------------------------------------------------------------------------------------------


def data(device: str, report: Report) -> None:
    """Speed of making batches of samples, on one core: it must exceed that of the fastest step."""
    from carryforward.data.samples import Samples, collate

    documents = [torch.randint(50_000, (100_000,)).numpy() for _ in range(40)]
    samples = Samples(documents, 300, 0, 32)
    loader = torch.utils.data.DataLoader(samples, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]

    def once() -> None:
        for _ in loader:
            pass

    times = time_interleaved({"batches of 8": once}, 3, sum(map(len, documents)), "cpu")
    report.add({"row": "data", "shape": None, "batch": 8, "windows": 32, "sides": times})


# --- all parts ---------------------------------------------------------------------------------------------------


# Expected on one H200, mostly compiling: training 3 minutes, cost 2, blocks 4, length 1, evaluation 1, generation 1.
PARTS = {
    "training": training,
    "cost": cost,
    "blocks": blocks,
    "length": length,
    "evaluation": evaluation,
    "generation": generation,
    "data": data,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=PARTS, action="append", help="measure these rows only")
    parser.add_argument("--out", type=Path, help="JSON to write (benchmarks/results/speed-DEVICE.json)")
    arguments = parse_arguments(parser)
    parts = arguments.only or list(PARTS)
    out = arguments.out or RESULTS / f"speed-{arguments.device}.json"
    with Report(out, arguments.device, SHAPES, whole=PARTS.keys() <= {*parts}) as report:
        for name in parts:
            begin = time.perf_counter()
            PARTS[name](arguments.device, report)
            free(arguments.device)
            print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
