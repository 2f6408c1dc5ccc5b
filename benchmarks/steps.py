# SPDX-License-Identifier: Apache-2.0
"""What `speed.py` and `peers.py` time: models of several shapes, plain and recurrent training steps; and the timing."""

import contextlib
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from cpu_limits import throttled_since, throttling
from torch import Tensor

SHAPES: dict[str, dict[str, Any]] = {
    "gpt2-small": {"vocab_size": 50257, "n_embd": 768, "n_layer": 12, "n_head": 12, "window": 300},
    "smollm2-135m": {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30,
                     "num_attention_heads": 9, "num_key_value_heads": 3, "tie_word_embeddings": True, "window": 300},
    "small-llama": {"vocab_size": 4096, "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6,
                    "num_attention_heads": 8, "num_key_value_heads": 8, "tie_word_embeddings": True, "window": 300},
    "bundled": {"vocab_size": 4096, "n_embd": 256, "n_layer": 7, "n_head": 8, "window": 300},
    "tiny": {"vocab_size": 1000, "n_embd": 64, "n_layer": 4, "n_head": 4, "window": 64},
}  # fmt: skip


def base(shape: str, device: str, **config: Any) -> Any:
    """A plain model of a shape, without dropout and with random weights, which do not change the speed."""
    from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    fields = {name: value for name, value in SHAPES[shape].items() if name != "window"}
    if "hidden_size" in fields:
        return LlamaForCausalLM(LlamaConfig(**fields, **config)).to(device)
    fields |= {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0}
    return GPT2LMHeadModel(GPT2Config(**fields, **config)).to(device)


def recurrent(shape: str, device: str, **fields: Any) -> Any:
    """A recurrent model of a shape: the paper's, unless the fields say otherwise."""
    from carryforward import add_recurrence

    documents = [torch.randint(SHAPES[shape]["vocab_size"], (2048,)).tolist()]  # for position offsets, if it needs them
    return add_recurrence(
        base(shape, device), window=SHAPES[shape]["window"], documents=documents, **{"preset": "paper", **fields}
    )


def half_a_window(shape: str) -> Any:
    """Keys and values of half a window, the recommended memory."""
    from carryforward import KVMemoryConfig

    return KVMemoryConfig(recent=SHAPES[shape]["window"] // 2 - 4, sinks=4)


def autocast(device: str) -> Any:
    return torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext()


# --- timing --------------------------------------------------------------------------------------------------------


def time_interleaved(sides: dict[Any, Callable[[], object]], rounds: int, tokens: int, device: str) -> dict[Any, Any]:
    """Time the sides in turns, several rounds. Returns tokens per second of each: median, slowest and fastest; and how
    long it was stopped in all rounds for a quota on the processor, if the kernel counts that."""
    times: dict[Any, list[float]] = {name: [] for name in sides}
    stopped: dict[Any, float] = {}
    for _ in range(rounds):
        for name, side in sides.items():
            synchronize(device)
            before, begin = throttling(), time.perf_counter()
            side()
            synchronize(device)
            times[name].append(time.perf_counter() - begin)
            if before:
                stopped[name] = stopped.get(name, 0.0) + throttled_since(before)["throttled_seconds"]
    return {
        name: {
            "tokens_per_second": tokens / statistics.median(taken),
            "slowest": tokens / max(taken), "fastest": tokens / min(taken), "rounds": rounds,
            **({"throttled_seconds": stopped[name]} if name in stopped else {}),
        }
        for name, taken in times.items()
    }  # fmt: skip


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# --- the plain model ---------------------------------------------------------------------------------------------


def plain_step(shape: str, device: str, batch: int, windows: int, graphed: bool) -> Callable[[], object]:
    """Forward and backward pass of the plain model over separate windows; gradients are accumulated."""
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
    buffer = ids[0].clone()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def one_window() -> None:
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            value = compiled(buffer)
        value.backward()

    replay = captured(one_window)
    gradients = [parameter.grad for parameter in model.parameters()]

    def replayed() -> None:
        torch._foreach_zero_(gradients)
        for x in ids:
            buffer.copy_(x)
            replay()

    return replayed


def captured(function: Callable[[], object]) -> Callable[[], object]:
    """Capture a function as a CUDA graph, without the explicit attention masks that transformers adds under capture."""
    from carryforward.backbones.hooks import maskless_attention

    with maskless_attention():
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


def recurrent_step(
    shape: str, device: str, batch: int, windows: int, path: str, keep: int, use_state: bool = True, **fields: Any
) -> Callable[[], object]:
    """Forward and backward pass of a recurrent model over documents of so many windows, after three warm-up steps.

    `fields` are those of `RecurrenceConfig`: a memory, the windows of a block.
    """
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


def free(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
