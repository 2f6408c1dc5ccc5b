# SPDX-License-Identifier: Apache-2.0
"""`make demo`: the core at work on real text, in about two minutes on two CPU cores, with nothing downloaded.

A small GPT-2 over bytes is trained on the spot on the language reference that every Python installation carries, then
trained on with and without recurrence, on the same bytes in the same order. So short a training teaches the paper's
single vector little; four slots that enter every layer learn faster, and the demo uses those. The model is far too
small to write sense: it shows that the state carries something, and that what is computed is exact.
"""

import argparse
import copy
import dataclasses
import math
from collections.abc import Iterator, Sequence
from pydoc_data import topics  # type: ignore[import-untyped]
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress, TextColumn
from rich.table import Table
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from .adding import add_recurrence
from .modeling import RecurrentPreTrainedModel

WINDOW, WINDOWS_PER_SAMPLE, BATCH = 16, 16, 8
SAMPLE = WINDOW * WINDOWS_PER_SAMPLE + 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="carryforward.demo", description="The core at work on real text.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=240, help="before recurrence is added; half as many after")
    parser.add_argument("--short", action="store_true", help="a few steps only, to see that everything runs")
    arguments = parser.parse_args()
    steps = 6 if arguments.short else arguments.steps
    logging.set_verbosity_error()
    torch.set_num_threads(1)  # so small a model is slower on two
    console = Console()
    log = Console(stderr=True)

    torch.manual_seed(arguments.seed)
    train, held_out = documents()
    log.print(
        f"A GPT-2 with {WINDOW} positions learns {sum(map(len, train)):,} bytes of Python's language reference,\n"
        "is then trained on, with and without recurrence, on the same bytes,\n"
        f"and compared on {len(held_out)} documents of {len(held_out[0]):,} bytes that it has not seen.\n"
    )
    config = GPT2Config(
        vocab_size=256, n_positions=WINDOW, n_embd=96, n_layer=3, n_head=4, bos_token_id=None, eos_token_id=None,
        attn_pdrop=0.0, resid_pdrop=0.0, embd_pdrop=0.0,
    )  # fmt: skip
    start = add_recurrence(GPT2LMHeadModel(config), window=WINDOW, slots=4, insert_at="all", keep_graph=True)
    with Progress(*Progress.get_default_columns(), TextColumn("{task.fields[loss]}"), console=log) as progress:
        fit(start, samples(train, steps, seed=1), 2e-3, False, progress, "pretraining")
        plain, recurrent = copy.deepcopy(start), copy.deepcopy(start)
        fit(plain, samples(train, steps // 2, seed=2), 1e-3, False, progress, "plain")
        fit(recurrent, samples(train, steps // 2, seed=2), 1e-3, True, progress, "recurrent")

    ids = torch.stack([torch.frombuffer(bytearray(text), dtype=torch.uint8).long() for text in held_out])
    table = Table("", f"windows of {WINDOW} bytes", "bits per byte", title="documents not seen", title_justify="left")
    for name, model, use_state in (
        ("plain", plain, False),
        ("recurrent", recurrent, True),
        ("recurrent, state removed", recurrent, False),
    ):
        out = evaluate(model, ids, use_state)
        table.add_row(name, str(-(-(ids.shape[1] - 1) // WINDOW)), f"{out.nll_sum / out.n_scored / math.log(2):.3f}")
    console.print(table)
    for line in exactness(recurrent, ids[:2, :1001]):
        console.print(line)
    console.print("\nFor your own model and text: docs/usage.md")


def documents() -> tuple[list[bytes], list[bytes]]:
    """Long topics of the language reference: every sixth is held out, cut to a common length."""
    texts = [text.encode() for _, text in sorted(topics.topics.items()) if len(text) > 4000]
    unique = [text for text in texts if not any(text[500:1500] in other for other in texts if other is not text)]
    held_out = unique[::6]
    return [text for text in unique if text not in held_out], [text[:4001] for text in held_out]


def samples(texts: Sequence[bytes], steps: int, seed: int) -> Iterator[Tensor]:
    """Batches of random stretches, the same for every model."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        rows = []
        for _ in range(BATCH):
            text = texts[int(torch.randint(len(texts), (), generator=generator))]
            begin = int(torch.randint(len(text) - SAMPLE, (), generator=generator))
            rows.append(torch.frombuffer(bytearray(text[begin : begin + SAMPLE]), dtype=torch.uint8).long())
        yield torch.stack(rows)


def fit(
    model: RecurrentPreTrainedModel,
    batches: Iterator[Tensor],
    learning_rate: float,
    use_state: bool,
    progress: Progress,
    name: str,
) -> None:
    """Train the base model and, where the state is used, the recurrence."""
    batches = list(batches)  # type: ignore[assignment]
    task = progress.add_task(f"{name:>12}", total=len(batches), loss="")  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(model.parameters(), lr=learning_rate)
    model.train()
    for ids in batches:
        loss = model(ids, labels=ids, use_state=use_state).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        progress.update(task, advance=1, loss=f"{loss / math.log(2):.2f} bits a byte")


@torch.no_grad()
def evaluate(model: RecurrentPreTrainedModel, ids: Tensor, use_state: bool) -> Any:
    return model.eval()(ids, labels=ids, use_state=use_state)


def exactness(model: RecurrentPreTrainedModel, ids: Tensor) -> Iterator[str]:
    """The claims of the README, on this model and text."""
    whole = evaluate(model, ids, True).nll_sum
    state, pieces = None, torch.zeros(())
    with torch.no_grad():
        for piece in ids.split(137, dim=1):
            out = model(piece, labels=piece, state=state)
            state, pieces = out.state, pieces + out.nll_sum
    yield f"whole {whole:.3f} nats, in pieces of 137 bytes {pieces:.3f} nats"

    gradients = []
    for keep_graph in (True, False):
        twin = copy.deepcopy(model)
        twin.config.recurrence = dataclasses.replace(twin.config.recurrence, keep_graph=keep_graph)
        twin(ids, labels=ids).loss.backward()
        gradients.append(torch.cat([p.grad.flatten() for p in twin.parameters() if p.grad is not None]))
    error = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
    yield f"gradients recomputed window by window differ from the kept graph's by {error:.1e} of their size"

    window = ids[:, :WINDOW]
    error = (model(window, use_state=False).logits - model.base(window).logits).abs().max()
    yield f"with the state removed, logits differ from the base model's by {error:.1e}"


if __name__ == "__main__":
    main()
