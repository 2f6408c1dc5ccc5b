# SPDX-License-Identifier: Apache-2.0
"""Measure one arm: perplexity, FLOPs, speed, memory, and the state's part in it."""

import gc
import math
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from arms import Arm
from transformers import AutoModelForCausalLM, PreTrainedModel

from carryforward.backbones.architectures import architecture_of
from carryforward.backbones.modes import eval_mode
from carryforward.data.documents import Documents
from carryforward.data.samples import collate, make_sample
from carryforward.evaluation.flops import flops_per_token
from carryforward.evaluation.perplexity import Perplexity, perplexity
from carryforward.evaluation.streaming import Piece, stream_documents
from carryforward.evaluation.token_losses import loss_by_depth, token_losses
from carryforward.memories.kv import KVMemoryConfig
from carryforward.memories.vector import VectorMemoryConfig
from carryforward.models.add_recurrence import add_recurrence
from carryforward.models.base import RecurrentPreTrainedModel
from carryforward.models.model_files import load_model
from carryforward.models.outputs import RecurrentOutput
from carryforward.state import State

DEPTHS = (0, 1, 2, 4, 8, 16, 32)  # in windows
ENOUGH_SECONDS = 10  # of timed passes
_DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}


@dataclass
class Bench:
    """What all arms share.

    Attributes:
        base: the plain model, on its device.
        texts: tokenised documents, by name.
        batch_size: documents whose windows run in a batch.
        repeats: timed passes, after one that is not timed; 0 measures neither speed nor memory.
        fast_path: how windows run on a GPU.
    """

    base: PreTrainedModel
    texts: dict[str, Documents]
    batch_size: int = 64
    repeats: int = 3
    fast_path: Any = "off"

    @property
    def device(self) -> str:
        return self.base.device.type


def load_base(name: str, device: str) -> PreTrainedModel:
    """Load a plain model without its tokenizer, in bfloat16 on a GPU."""
    model = load_model(AutoModelForCausalLM.from_pretrained, name, dtype=_DTYPES[device])
    return model.to(device).eval()


def measure(bench: Bench, arm: Arm) -> dict[str, Any]:
    """All results of an arm."""
    documents = bench.texts[arm.text]
    model = build(bench, arm)
    carries = arm.memory is not None

    def read() -> Perplexity:
        return perplexity(model, documents, overlap=arm.overlap, use_state=carries, batch_size=bench.batch_size)

    scores = score_books(model, documents, arm.overlap, carries)
    if not all(math.isfinite(book.nats) for book in scores):
        raise ArithmeticError(f"{arm.name}: no finite likelihoods.")
    state, window_peak = with_peak(bench.device, lambda: read_by_window(model, documents, arm))
    return {
        "window": model.config.recurrence.window,
        **ratios(scores),
        "flops": asdict(flops_per_token(model.config, overlap=arm.overlap, use_state=carries)),
        **(measure_speed(bench, read) | {"window_peak_bytes": window_peak} if bench.repeats else {}),
        "weight_bytes": sum(weight.nbytes for weight in bench.base.parameters()),
        "state_bytes": memory_bytes(state) if carries else 0,
        "removed": ratios(score_books(model, documents, arm.overlap, use_state=False)) if arm.control else None,
        "depths": measure_depths(bench, model) if arm.depths else None,
    }


def build(bench: Bench, arm: Arm) -> RecurrentPreTrainedModel:
    """The recurrent model of an arm; it shares the weights of the plain one. A plain arm is run on the same path: its
    state is never used."""
    longest = int(bench.texts[arm.text].lengths.max())
    memory = VectorMemoryConfig(insert_at=1) if arm.memory is None else KVMemoryConfig(**arm.memory)
    learned = not architecture_of(bench.base.config).rotary
    train = bench.texts["train"] if learned and arm.memory is not None else None
    model = add_recurrence(bench.base, window=min(arm.window, longest), memory=memory, documents=train)
    model.fast_path = bench.fast_path
    return model.eval()


def score_books(model: Any, documents: Documents, overlap: int, use_state: bool) -> list[Perplexity]:
    """The scores of each book, so that arms can be compared book by book."""
    rows = max(8192 // model.config.recurrence.window, 1)  # of logits there are no more at a time
    losses = token_losses(model, documents, overlap=overlap, use_state=use_state, batch_size=min(rows, 8))
    counts = zip(documents.words, documents.bytes, documents.line_ends, strict=True)
    return [
        Perplexity(float(np.nansum(nats)), len(nats) - 1, int(words), int(size), int(ends), 1)
        for nats, (words, size, ends) in zip(losses, counts, strict=True)
    ]


def ratios(scores: list[Perplexity]) -> dict[str, Any]:
    """Sums over all books, what is computed from them, and the sums of each book that comparisons need."""
    names, total = ("word_perplexity", "token_perplexity", "bits_per_byte"), sum(scores, Perplexity())
    books = {name: [getattr(score, name) for score in scores] for name in ("nats", "words")}
    return {**asdict(total), **{name: getattr(total, name) for name in names}, "books": books}


def measure_speed(bench: Bench, read: Callable[[], Perplexity]) -> dict[str, Any]:
    """Peak memory of reading the books in batches, then the seconds of each timed pass; fewer passes if they are
    long."""
    score, peak = with_peak(bench.device, read)
    seconds: list[float] = []
    while len(seconds) < bench.repeats and sum(seconds) < ENOUGH_SECONDS:
        begun = time.perf_counter()
        read()  # its sum is read from the device
        seconds.append(time.perf_counter() - begun)
    return {"seconds": seconds, "tokens_per_second": score.tokens / float(np.median(seconds)), "peak_bytes": peak}


def read_by_window(model: RecurrentPreTrainedModel, documents: Documents, arm: Arm) -> State | None:
    """Read the start of the longest document one window at a time, until all that can be carried is; returns the last
    state."""
    recurrence = model.config.recurrence
    ids = documents[int(documents.lengths.argmax())][: 4 * recurrence.extra_positions + 4 * recurrence.window]
    use_state, stride, state = arm.memory is not None, recurrence.window - arm.overlap, None

    def read(piece: Piece, state: State | None) -> RecurrentOutput:
        ((start, stop),) = piece.spans
        batch = collate([make_sample(ids, start, stop, max(start, 1))])
        return model(**batch, state=state, overlap=arm.overlap, use_state=use_state)

    with eval_mode(model), torch.inference_mode():
        for _, out in stream_documents(
            read, [len(ids)], stride=stride, overlap=arm.overlap, windows_per_call=1, batch_size=1, min_length=2
        ):
            state = out.state
    return state


def memory_bytes(state: State | None) -> int:
    """What a document's memory takes."""
    return sum(part.nbytes for part in state.memory.values()) if state is not None else 0


def measure_depths(bench: Bench, model: Any) -> dict[str, Any]:
    """Loss with a state that comes from only so many windows, as far back as the documents allow."""
    documents = bench.texts["deep"]
    windows = (int(documents.lengths.max()) - 1) // model.config.recurrence.window
    depths = [depth for depth in DEPTHS if depth < windows]
    nats, tokens = loss_by_depth(model, documents, depths, batch_size=8)
    return {"tokens": tokens, "nats": {str(depth): nats[depth] for depth in depths}}


def with_peak(device: str, run: Callable[[], Any]) -> tuple[Any, int | None]:
    """The result of a call, and the most memory in use during it: of the GPU, or of this process."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        result = run()
        return result, torch.cuda.max_memory_allocated()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    return run(), _process_peak()


def _process_peak() -> int | None:
    with suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line.split()[1] for line in lines if line.startswith("VmHWM")))
    return None
