# SPDX-License-Identifier: Apache-2.0
"""How fast windows are read, against the plain model in the same run: training, evaluation, generation.

Every comparison interleaves its sides, takes the median of several rounds and reports how far they were apart. The
plain model's sides are the strongest there are: compiled as a whole, captured as CUDA graphs, without attention masks.

    python benchmarks/speed.py --device cuda            # everything; about ten minutes on one H200
    python benchmarks/speed.py --device cpu
    python benchmarks/speed.py --only training --device cuda
    python benchmarks/speed_report.py                   # SPEED.md and the figures, from the JSON files
"""

import argparse
import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import Report
from torch import Tensor

HERE = Path(__file__).parent

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2-small": {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "window": 300},
    "smollm2-135m": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                     "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "window": 300},
    "bundled": {"vocab_size": 4096, "n_embd": 256, "n_layer": 7, "n_head": 8, "window": 300},
    "tiny": {"vocab_size": 1000, "n_embd": 64, "n_layer": 4, "n_head": 4, "window": 64},
}  # fmt: skip


MANY: dict[str, Any] = {"slots": 48, "insert_at": "all"}  # a large state


def base(shape: str, device: str, **more: Any) -> Any:
    """A model of some shape, without dropout and with random weights: speed does not depend on them."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    fields = {name: value for name, value in SHAPES[shape].items() if name != "window"}
    if "hidden_size" in fields:
        return LlamaForCausalLM(LlamaConfig(**fields, **more)).to(device)
    config = GPT2Config(**fields, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0, bos_token_id=0, eos_token_id=0, **more)
    return GPT2LMHeadModel(config).to(device)


def recurrent(shape: str, device: str, **fields: Any) -> Any:
    from carryforward import add_recurrence

    return add_recurrence(base(shape, device), window=SHAPES[shape]["window"], **fields)


def autocast(device: str) -> Any:
    return torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


# --- timing --------------------------------------------------------------------------------------------------------


def interleaved(sides: dict[str, Callable[[], object]], rounds: int, tokens: int, device: str) -> dict[str, Any]:
    """Tokens per second of each side: the median of the rounds, and the slowest and fastest."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, side in sides.items():
            synchronize(device)
            begin = time.perf_counter()
            side()
            synchronize(device)
            times[name].append(time.perf_counter() - begin)
    return {
        name: {
            "tokens_per_second": tokens / statistics.median(taken),
            "slowest": tokens / max(taken), "fastest": tokens / min(taken), "rounds": rounds,
        }
        for name, taken in times.items()
    }  # fmt: skip


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# --- the plain model ---------------------------------------------------------------------------------------------


def plain_step(shape: str, device: str, batch: int, windows: int, graphed: bool) -> Callable[[], object]:
    """Forward and backward over separate windows; gradients add up."""
    model = base(shape, device)
    window = SHAPES[shape]["window"]
    ids = torch.randint(SHAPES[shape]["vocab_size"], (windows, batch, window + 1), device=device)

    def loss(x: Tensor) -> Tensor:
        logits = model(input_ids=x[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten(), reduction="sum")

    if not graphed:

        def eager() -> None:
            model.zero_grad()
            for x in ids:
                with autocast(device):
                    value = loss(x)
                value.backward()

        return eager

    compiled = torch.compile(loss, dynamic=False)
    here = ids[0].clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def one() -> None:
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            value = compiled(here)
        value.backward()

    replay = captured(one)
    gradients = [parameter.grad for parameter in model.parameters()]

    def replayed() -> None:
        torch._foreach_zero_(gradients)
        for x in ids:
            here.copy_(x)
            replay()

    return replayed


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """A function as a CUDA graph, with nothing that transformers adds while a stream is captured."""
    from carryforward.backbones.hooks import plain_masks

    with plain_masks():
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                function()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            function()
    return graph.replay


# --- training ------------------------------------------------------------------------------------------------------


def recurrent_step(
    shape: str, device: str, batch: int, windows: int, path: str, keep: int, use_state: bool = True, **fields: Any
) -> Callable[[], object]:
    model = recurrent(shape, device, keep_windows=keep, **fields).train()
    model.fast_path = path
    ids = torch.randint(SHAPES[shape]["vocab_size"], (batch, windows * SHAPES[shape]["window"] + 1), device=device)

    def step() -> None:
        model.zero_grad()
        with autocast(device):
            loss = model(ids, labels=ids, use_state=use_state).loss
        loss.backward()

    for _ in range(3):
        step()
    return step


def training(device: str, report: Report) -> None:
    """A step's forward and backward pass; no optimizer."""
    on_gpu, on_cpu = [("gpt2-small", 8, 32), ("gpt2-small", 32, 32)], [("tiny", 8, 16), ("bundled", 4, 8)]
    rounds = 4 if device == "cuda" else 9
    for shape, batch, windows in on_gpu if device == "cuda" else on_cpu:
        tokens = batch * windows * SHAPES[shape]["window"]
        about = {"row": "training", "shape": shape, "batch": batch, "windows": windows}
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
        report.add({**about, "sides": interleaved(sides, rounds, tokens, device)})
        sides.clear()
        free(device)


def cost(device: str, report: Report) -> None:
    """What the state costs a step whose graph is kept: one slot, many at every layer, keys and values that are kept."""
    on_gpu, on_cpu = [("gpt2-small", 8, 32), ("smollm2-135m", 8, 20)], [("tiny", 8, 16), ("bundled", 4, 8)]
    for shape, batch, windows in on_gpu if device == "cuda" else on_cpu:
        fast, tokens = "compiled" if device == "cuda" else "off", batch * windows * SHAPES[shape]["window"]
        about = {"shape": shape, "batch": batch, "windows": windows}
        one = partial(recurrent_step, shape, device, batch, windows, fast, windows)
        half: dict[str, Any] = {"slots": 0, "kept": SHAPES[shape]["window"] // 2 - 4, "sinks": 4}
        for row, more in (("state's cost", {}), ("48 slots' cost", MANY), ("half a window kept", half)):
            sides = {"with state": one(**more), "state removed": one(use_state=False, **more)}
            report.add(
                {"row": row, **about, "sides": interleaved(sides, 6 if device == "cuda" else 11, tokens, device)}
            )
            sides.clear()
            free(device)


# --- evaluation ------------------------------------------------------------------------------------------------------


def strided(model: Any, ids: Tensor, window: int, stride: int) -> tuple[float, int]:
    """The loop of Hugging Face's guide to perplexity, batch 1: windows that overlap, and the new tokens are scored. One
    token more than the model reads, since the first is never scored: then it scores what `perplexity` does."""
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
        """The plain model's loss, window by window, at that batch."""
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
    found = interleaved(sides, 5, tokens, device)
    report.add({"row": "evaluation, overlap 0", "shape": shape, "batch": batch, "windows": windows, "sides": found})

    some = 1  # documents for the loop at batch 1
    few, count = ids[:some].to(device), some * windows * window
    half = window // 2

    def guide() -> tuple[float, int]:
        with autocast(device):
            parts = [strided(plain, row[None], window, window - half) for row in few]
        return sum(part[0] for part in parts), sum(part[1] for part in parts)

    guide(), ours(half), ours(half, use_state=False)
    loop = interleaved({"Hugging Face's strided loop": guide}, 3, count, device)
    found = loop | interleaved(
        {"recurrent": lambda: ours(half), "plain, batched": lambda: ours(half, use_state=False)}, 3, tokens, device
    )
    # the same perplexity: in float32, on the same documents
    nats, scored = strided(plain, few[:1], window, window - half)
    same = perplexity(plain, documents[:1], window=window, overlap=half, batch_size=batch)
    agreement = {"strided loop": nats / scored, "ours": same.nats / same.tokens, "tokens": [scored, same.tokens]}
    report.add({"row": "evaluation, overlap 50 %", "shape": shape, "batch": batch, "windows": windows, "sides": found,
                "nats_per_token": agreement})  # fmt: skip


def graphed_forward(model: Any, ids: Tensor, window: int, windows: int) -> Callable[[], object]:
    def loss(x: Tensor) -> Tensor:
        logits = model(input_ids=x[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), x[:, 1:].flatten(), reduction="sum")

    compiled = torch.compile(loss, dynamic=False)
    here, total = ids[:, : window + 1].clone(), torch.zeros((), device=ids.device)

    def one() -> None:
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            total.add_(compiled(here))

    with torch.no_grad():
        replay = captured(one)

    def replayed() -> None:
        for w in range(windows):
            here.copy_(ids[:, w * window : (w + 1) * window + 1])
            replay()
        float(total)

    return replayed


# --- generation ----------------------------------------------------------------------------------------------------


def generation(device: str, report: Report) -> None:
    """Greedy, in bfloat16 on a GPU; Hugging Face's own loop drives both. Tokens per second of all rows together."""
    shape, new = ("gpt2-small", 400) if device == "cuda" else ("bundled", 200)
    window, vocabulary = SHAPES[shape]["window"], SHAPES[shape]["vocab_size"]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    plain = base(shape, device, n_positions=1024).to(dtype).eval()
    model = recurrent(shape, device).to(dtype).eval()
    greedy = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    static = {"cache_implementation": "static"} if device == "cuda" else {}
    name = "Hugging Face, static cache, compiled" if static else "Hugging Face"
    for batch in (1, 16) if device == "cuda" else (1,):
        ids = torch.randint(vocabulary, (batch, 16), device=device)
        far = model.advance_state(torch.randint(vocabulary, (batch, 50_000 // window * window + 16), device=device))
        sides = {
            name: partial(plain.generate, ids, **greedy, **static),
            "recurrent": partial(model.generate, ids, **greedy),
            "recurrent, from token 50,000": partial(model.generate, state=far, **greedy),
        }
        for side in sides.values():
            side()
        found = interleaved(sides, 3 if device == "cuda" else 5, batch * new, device)
        report.add({"row": "generation", "shape": shape, "batch": batch, "windows": None, "sides": found})


# --- length --------------------------------------------------------------------------------------------------------


def length(device: str, report: Report) -> None:
    """One document, longer and longer: speed of a training step and, on a GPU, its peak memory, weights, gradients and
    states not counted; recordings are. (On a CPU `memory.py` measures that.)"""
    shape, counts = ("gpt2-small", (8, 32, 320, 3400)) if device == "cuda" else ("bundled", (4, 16, 64))
    window, vocabulary = SHAPES[shape]["window"], SHAPES[shape]["vocab_size"]
    model = recurrent(shape, device, keep_windows=0).train()
    model.fast_path = "compiled" if device == "cuda" else "off"
    fixed = 2 * sum(parameter.numel() * parameter.itemsize for parameter in model.parameters())
    state = model.fresh_state(1).carried

    def step(windows: int) -> None:
        ids = torch.randint(vocabulary, (1, windows * window + 1), device=device)
        with autocast(device):
            loss = model(ids, labels=ids).loss
        loss.backward()
        synchronize(device)

    step(counts[0]), step(counts[0])
    points = []
    for windows in counts:
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        taken = []
        for _ in range(3 if windows < 1000 else 1):
            begin = time.perf_counter()
            step(windows)
            taken.append(time.perf_counter() - begin)
        point = {"windows": windows, "tokens": windows * window}
        point["tokens_per_second"] = windows * window / statistics.median(taken)
        if device == "cuda":
            states = windows * state.numel() * state.itemsize
            point["peak_bytes"] = torch.cuda.max_memory_allocated() - fixed - states
        points.append(point)
    report.add({"row": "length", "shape": shape, "batch": 1, "windows": None, "points": points})


# --- data ----------------------------------------------------------------------------------------------------------


def data(device: str, report: Report) -> None:
    """How fast batches of samples are made, on one core, beside the fastest step there is."""
    from carryforward.data.samples import Samples, collate

    documents = [torch.randint(50_000, (100_000,)).numpy() for _ in range(40)]
    samples = Samples(documents, 300, 0, 32)
    loader = torch.utils.data.DataLoader(samples, batch_size=8, collate_fn=collate)  # type: ignore[arg-type]

    def once() -> None:
        for _ in loader:
            pass

    found = interleaved({"batches of 8": once}, 3, sum(map(len, documents)), "cpu")
    report.add({"row": "data", "shape": None, "batch": 8, "windows": 32, "sides": found})


# --- all parts ---------------------------------------------------------------------------------------------------


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


PARTS = {
    "training": training,
    "cost": cost,
    "length": length,
    "evaluation": evaluation,
    "generation": generation,
    "data": data,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--only", choices=PARTS, action="append", help="some of the rows; all by default")
    parser.add_argument("--out", type=Path, help="JSON to write (benchmarks/results/speed-DEVICE.json)")
    arguments = parser.parse_args()
    parts = arguments.only or list(PARTS)
    out = arguments.out or HERE / "results" / f"speed-{arguments.device}.json"
    with Report(out, arguments.device, SHAPES, whole=PARTS.keys() <= {*parts}) as report:
        for name in parts:
            PARTS[name](arguments.device, report)
            free(arguments.device)


if __name__ == "__main__":
    main()
