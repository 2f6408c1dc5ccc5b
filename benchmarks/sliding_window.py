# SPDX-License-Identifier: Apache-2.0
"""The natural rival, for `peers.py`: the same base model with sliding-window attention over the whole text.

A model of Llama's shape is given to transformers as Mistral, which has the same layers and a sliding window. With a
window of T tokens and S carried positions, the token at place i of its window sees S + i + 1 positions, so on average
S + (T + 1) / 2. The sliding window has that width. Both then see further through their layers.

On a GPU all weights are in bfloat16, without autocast, because `flex_attention` needs queries, keys and values of one
type. Speed is timed in turns. Memory is the peak of one run beyond weights and gradients, with captured CUDA graphs; on
a CPU it is measured in a process of its own (`memory.py` explains why).
"""

import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from measurements import Report, run_case
from memory import MALLOC, QUIET, watch_peak
from steps import SHAPES, base, free, half_a_window, recurrent, time_interleaved
from torch import Tensor

SHAPE = {"cuda": "smollm2-135m", "cpu": "small-llama"}
LENGTHS = {"cuda": (4096, 16384, 65536), "cpu": (1024, 4096)}
CHUNK = 1024  # tokens of a call, where a text is read with a cache
OURS, CACHED = "ours, keys and values", "sliding window, sdpa, chunks of 1,024 with a cache"
IMPLEMENTATIONS = {
    "sliding window, sdpa": "sdpa",
    "sliding window, flex_attention": "flex_attention",
    "sliding window, flash_attention_2": "flash_attention_2",
}
SIDES = {
    "cuda": (*IMPLEMENTATIONS, CACHED, OURS),
    "cpu": ("sliding window, sdpa", CACHED, OURS),
}
SCORING, TRAINING = "scoring one text", "training step on one text"


def same_context(shape: str) -> int:
    """The sliding window whose tokens see as many positions as ours do on average."""
    memory, window = half_a_window(shape), SHAPES[shape]["window"]
    return memory.recent + memory.sinks + (window + 1) // 2


def sliding(shape: str, device: str, implementation: str) -> Any:
    """The base model of a shape, as Mistral."""
    from transformers import MistralConfig, MistralForCausalLM

    plain = base(shape, device)
    fields = {name: value for name, value in SHAPES[shape].items() if name != "window"}
    fields |= {"rms_norm_eps": plain.config.rms_norm_eps, "max_position_embeddings": 131072}
    config = MistralConfig(**fields, sliding_window=same_context(shape), attn_implementation=implementation)
    model = MistralForCausalLM(config).to(device)
    model.load_state_dict(plain.state_dict())
    return model


def build(side: str, shape: str, device: str) -> Any:
    if side == OURS:
        model = recurrent(shape, device, memory=half_a_window(shape))
        model.fast_path = "compiled" if device == "cuda" else "off"
    else:
        model = sliding(shape, device, IMPLEMENTATIONS.get(side, "sdpa"))
    return model.to(torch.bfloat16) if device == "cuda" else model


def make_job(side: str, what: str, model: Any, ids: Tensor) -> Callable[[], float]:
    """The function that is timed. Returns the loss."""
    if what == TRAINING:
        return partial(train, model, ids)
    if side == OURS:
        return partial(score_recurrent, model, ids[0].cpu().numpy())
    return partial(score_chunks if side == CACHED else score_whole, model, ids)


def train(model: Any, ids: Tensor) -> float:
    model.train()
    model.zero_grad(set_to_none=False)  # they stay allocated, and are not counted
    more = {} if hasattr(model, "memory") else {"use_cache": False}
    loss = model(ids, labels=ids, **more).loss
    loss.backward()
    return float(loss.detach())


@torch.inference_mode()
def score_whole(model: Any, ids: Tensor) -> float:
    return float(model.eval()(ids, labels=ids, use_cache=False).loss)


@torch.inference_mode()
def score_chunks(model: Any, ids: Tensor) -> float:
    """The text in chunks, with a cache that holds the sliding window."""
    from transformers import DynamicCache

    model.eval()
    cache, total = DynamicCache(config=model.config), torch.zeros((), device=ids.device)
    for begin in range(0, ids.shape[1] - 1, CHUNK):
        targets = ids[0, begin + 1 : begin + CHUNK + 1]
        x = ids[:, begin : begin + len(targets)]
        logits = model(x, past_key_values=cache, use_cache=True).logits[0].float()
        total += F.cross_entropy(logits, targets, reduction="sum")
    return float(total) / (ids.shape[1] - 1)


def score_recurrent(model: Any, document: Any) -> float:
    from carryforward import perplexity

    result = perplexity(model.eval(), [document], batch_size=1)
    return result.nats / result.tokens


# --- measuring -------------------------------------------------------------------------------------------------------


def measure(report: Report, device: str, what: str, length: int, models: dict[str, Any], held: dict[str, int]) -> None:
    """One row: a text of some length, all sides.

    Args:
        held: bytes that a side's earlier runs have left allocated: captured CUDA graphs, which belong to its peak.
    """
    shape = SHAPE[device]
    ids = torch.randint(SHAPES[shape]["vocab_size"], (1, length), device=device)
    jobs, results = {}, {}
    for side, model in models.items():
        job = make_job(side, what, model, ids)
        try:
            before = in_use(device)
            for _ in range(3):
                loss = job()
            free(device)
            held[side] = held.get(side, 0) + in_use(device) - before
            results[side] = {"loss": loss, "peak_bytes": _peak(side, what, device, length, job) + held[side]}
            jobs[side] = job
        except Exception as error:  # out of memory, or the kernel cannot be built
            results[side] = {"unavailable": _reason(error)}
        free(device)
    for side, times in time_interleaved(jobs, 3, length, device).items():
        results[side] |= times
    context = {"sliding_window": same_context(shape), "precision": "bfloat16" if device == "cuda" else "float32"}
    row = {"row": f"peer: {what}, {length:,} tokens", "shape": shape, "batch": 1, "windows": None, **context}
    report.add(row | {"sides": results})


def in_use(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


def _peak(side: str, what: str, device: str, length: int, job: Callable[[], object]) -> int:
    """The peak of one more run."""
    if device == "cpu":
        return run_case(__file__, side, what, str(length), env=MALLOC | QUIET)
    peak_above = watch_peak(device)
    job()
    return peak_above()


def cpu_peak(side: str, what: str, length: int) -> int:
    """The peak of a run in this process, after one on the same text."""
    torch.manual_seed(0)
    shape = SHAPE["cpu"]
    ids = torch.randint(SHAPES[shape]["vocab_size"], (1, length))
    job = make_job(side, what, build(side, shape, "cpu"), ids)
    job()
    free("cpu")
    peak_above = watch_peak("cpu")
    job()
    return peak_above()


def _reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def compare(report: Report, device: str, lengths: Sequence[int] | None = None) -> None:
    """All rows: scoring and training at several lengths."""
    models: dict[str, Any] = {}
    for side in SIDES[device]:
        try:
            models[side] = build(side, SHAPE[device], device)
        except (ImportError, ValueError) as error:  # flash attention is a package of its own
            print(f"{side}: {_reason(error)}", file=sys.stderr, flush=True)
    held: dict[str, int] = {}
    for length in lengths or LENGTHS[device]:
        measure(report, device, SCORING, length, models, held)
    models.pop(CACHED, None)  # cannot train
    for model in models.values():
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    for length in lengths or LENGTHS[device]:
        measure(report, device, TRAINING, length, models, held)


if __name__ == "__main__":  # one measurement of memory
    print(cpu_peak(sys.argv[1], sys.argv[2], int(sys.argv[3])))
