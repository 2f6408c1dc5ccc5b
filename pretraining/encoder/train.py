# SPDX-License-Identifier: Apache-2.0
"""Pretrain the small encoder with masked tokens, on what `prepare.py` has written. One GPU, five to eight minutes.

    python pretraining/encoder/train.py --data DATA --minutes 6      # writes the model and its card to encoder/model
    python pretraining/encoder/train.py --data DATA --steps 6000     # so many steps, however long they take

Every row of a batch is one window, [CLS] 510 tokens [SEP], cut from the books one after the other: no padding, shapes
never change. In every row the same number of tokens is chosen anew each time; of these 80 % become [MASK], 10 % a
random token, 10 % stay. Only their logits are computed.
"""

import argparse
import dataclasses
import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from card import card
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForMaskedLM, BertConfig, BertForMaskedLM, PreTrainedTokenizerFast

from carryforward.utils.console import note
from carryforward.utils.digests import damaged_file
from carryforward.utils.files import write_json
from carryforward.utils.progress import ProgressBar
from carryforward.utils.provenance import provenance

HERE = Path(__file__).parent
RESULT = HERE / "results" / "pretraining.json"
LIMIT = 10_000_000  # bytes of the weights
VALIDATE_ROWS = 1024  # during training; at the end all are read
REPORT_EVERY = 50  # steps: reading the loss waits for the device


@dataclass(frozen=True)
class Settings:
    """Shape and training of the model.

    4.83 M parameters, 9.66 MB in 16 bits: 1.57 M in 8,192 tied embeddings, 0.10 M in positions, 7 layers of 0.445 M,
    0.05 M in the head. Depth is worth more here than width: what a window sees of its neighbours in a layer, the next
    layer passes on.

    Attributes:
        warmup: steps in which the learning rate rises; it then falls to zero as a cosine over the share of steps or
            minutes, whichever ends first.
        masked: share of a row's tokens that are predicted.
    """

    width: int = 192
    layers: int = 7
    heads: int = 6
    positions: int = 512
    batch: int = 256  # windows
    learning_rate: float = 2e-3
    weight_decay: float = 0.05
    warmup: int = 300
    masked: float = 0.15
    seed: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that prepare.py has written")
    parser.add_argument("--out", type=Path, default=HERE / "model", help="folder to write the model to")
    parser.add_argument("--result", type=Path, default=RESULT, help="JSON file to write")
    parser.add_argument("--minutes", type=float, default=math.inf, help="time of the training, compilation included")
    parser.add_argument("--steps", type=int, default=None, help="end after so many steps")
    parser.add_argument("--validate-every", type=int, default=500, help="steps")
    parser.add_argument("--validation-rows", type=int, default=None, help="score so many windows; all by default")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=torch.cuda.is_available())
    for field in dataclasses.fields(Settings):
        name = "--" + field.name.replace("_", "-")
        parser.add_argument(name, type=type(field.default), default=field.default, help="default: %(default)s")
    arguments = parser.parse_args()
    if arguments.steps is None and math.isinf(arguments.minutes):
        parser.error("give --minutes or --steps")
    train(arguments)


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Train, store, score what was stored, and write its card. Returns the result."""
    settings = Settings(**{field.name: getattr(arguments, field.name) for field in dataclasses.fields(Settings)})
    device = "cuda" if torch.cuda.is_available() else "cpu"
    about, tokenizer = read_data(arguments.data)
    frame = Frame.of(tokenizer)
    stream = load_split(arguments.data, about["train"]).to(device)
    rows = validation_rows(load_split(arguments.data, about["validation"]).to(device), settings, frame)
    rows = rows[: arguments.validation_rows]
    torch.manual_seed(settings.seed)
    model = BertForMaskedLM(config(settings, tokenizer)).to(device)
    size = 2 * model.num_parameters()
    if size > LIMIT:
        raise SystemExit(f"The weights would take {size:,} bytes in 16 bits; at most {LIMIT:,}: use a smaller shape.")
    note(f"{model.num_parameters():,} parameters, {len(stream):,} training tokens")
    result = {
        **provenance(device), "kind": "encoder pretraining", "settings": dataclasses.asdict(settings),
        "parameters": model.num_parameters(), "vocabulary": len(tokenizer), "data": about,
    }  # fmt: skip
    result |= fit(model, stream, rows, frame, settings, arguments)
    store(model, tokenizer, arguments.out)
    stored = AutoModelForMaskedLM.from_pretrained(arguments.out).to(device)
    note("scoring the stored weights")
    result["validation"] = validate(stored, rows, frame, settings, compiled=False)
    result["bytes"] = (arguments.out / "model.safetensors").stat().st_size
    arguments.result.parent.mkdir(parents=True, exist_ok=True)
    write_json(arguments.result, result)
    (arguments.out / "README.md").write_text(card(result))
    return result


# --- data ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """The special tokens: around a row, in place of a token, and the first that is none."""

    first: int
    last: int
    mask: int
    ordinary: int
    vocabulary: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerFast) -> "Frame":
        cls_id, sep_id, mask_id = tokenizer.convert_tokens_to_ids(["[CLS]", "[SEP]", "[MASK]"])
        return cls(cls_id, sep_id, mask_id, max(tokenizer.all_special_ids) + 1, len(tokenizer))


def read_data(folder: Path) -> tuple[dict[str, Any], PreTrainedTokenizerFast]:
    """The record of the data, and its tokenizer; files that are missing or damaged are refused."""
    about = json.loads((folder / "data.json").read_text())
    damaged = damaged_file(folder, about["train"]["files"] | about["validation"]["files"])
    if damaged is not None:
        raise SystemExit(f"{folder / damaged} is missing or damaged. Copy it again, or run prepare.py.")
    return about, PreTrainedTokenizerFast.from_pretrained(folder / "tokenizer")


def load_split(folder: Path, about: dict[str, Any]) -> Tensor:
    """The tokens of a split, 16 bits each."""
    ids = np.concatenate([np.load(folder / name) for name in sorted(about["files"])])
    return torch.from_numpy(ids.astype(np.int16))


def batches(stream: Tensor, settings: Settings, frame: Frame) -> Iterator[Tensor]:
    """Batches of windows, [batch, positions]. An epoch has every token about once; epochs differ in cuts and order."""
    generator = torch.Generator().manual_seed(settings.seed)
    size = settings.positions - 2
    while True:
        shift = int(torch.randint(min(size, len(stream) - size + 1), (), generator=generator))
        count = (len(stream) - shift) // size
        starts = (shift + size * torch.randperm(count, generator=generator)).to(stream.device)
        for chosen in starts.split(settings.batch):
            if len(chosen) == settings.batch or count < settings.batch:
                yield framed(stream, chosen, size, frame)


def framed(stream: Tensor, starts: Tensor, size: int, frame: Frame) -> Tensor:
    """Windows of `size` tokens between the two special ones, [rows, size + 2]."""
    own = stream[starts[:, None] + torch.arange(size, device=stream.device)].long()
    return F.pad(F.pad(own, (1, 0), value=frame.first), (0, 1), value=frame.last)


def validation_rows(stream: Tensor, settings: Settings, frame: Frame) -> Tensor:
    """All full windows of the validation books."""
    size = settings.positions - 2
    starts = torch.arange(0, len(stream) - size + 1, size, device=stream.device)
    return framed(stream, starts, size, frame)


def corrupt(ids: Tensor, frame: Frame, share: float, generator: torch.Generator | None) -> tuple[Tensor, Tensor]:
    """Choose tokens of each row and corrupt them: the rows, and the positions of the chosen ones, [rows, m]."""
    width = ids.shape[1]
    noise = torch.rand(ids.shape, device=ids.device, generator=generator)
    noise = noise.masked_fill(ids < frame.ordinary, -1)  # special tokens, unless there are too few others
    chosen = noise.topk(max(1, round(share * (width - 2))), dim=1).indices
    fate = torch.rand(chosen.shape, device=ids.device, generator=generator)
    drawn = torch.randint(frame.ordinary, frame.vocabulary, chosen.shape, device=ids.device, generator=generator)
    masked = torch.where(fate < 0.8, frame.mask, torch.where(fate < 0.9, drawn, ids.gather(1, chosen)))
    return ids.scatter(1, chosen, masked), chosen


# --- training ------------------------------------------------------------------------------------------------------


def config(settings: Settings, tokenizer: PreTrainedTokenizerFast) -> BertConfig:
    """The model's config, without dropout: there is too much text to overfit."""
    return BertConfig(
        vocab_size=len(tokenizer), hidden_size=settings.width, num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads, intermediate_size=4 * settings.width,
        max_position_embeddings=settings.positions, type_vocab_size=2, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip


def masked_scores(model: BertForMaskedLM, rows: Tensor, chosen: Tensor) -> Tensor:
    """The logits of the chosen positions, [rows, m, vocabulary]."""
    with torch.autocast(rows.device.type, torch.bfloat16, enabled=rows.is_cuda):
        hidden = model.bert(input_ids=rows).last_hidden_state
        return model.cls(hidden.gather(1, chosen[..., None].expand(-1, -1, hidden.shape[-1]))).float()


def loss_of(model: BertForMaskedLM, rows: Tensor, chosen: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(masked_scores(model, rows, chosen).flatten(0, 1), targets.flatten())


def fit(
    model: BertForMaskedLM, stream: Tensor, rows: Tensor, frame: Frame, settings: Settings, arguments: Any
) -> dict[str, Any]:
    """Train with AdamW until the steps or the minutes are over. Returns the loss curve, and what it took."""
    begun = time.perf_counter()
    loss = torch.compile(loss_of) if arguments.compile else loss_of
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=(0.9, 0.98), fused=stream.is_cuda)
    steps, seconds = arguments.steps or math.inf, 60 * arguments.minutes
    generator = torch.Generator(stream.device).manual_seed(settings.seed)
    recent, curve, step = torch.zeros((), device=stream.device), [], 0
    model.train()
    with ProgressBar("training", arguments.steps, "steps") as bar:
        for ids in batches(stream, settings, frame):
            done = max(step / steps, (time.perf_counter() - begun) / seconds)
            if done >= 1:
                break
            step += 1
            rate = settings.learning_rate * min(1, step / settings.warmup) * (1 + math.cos(math.pi * done)) / 2
            for group in optimizer.param_groups:
                group["lr"] = rate
            corrupted, chosen = corrupt(ids, frame, settings.masked, generator)
            value = loss(model, corrupted, chosen, ids.gather(1, chosen))
            value.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            recent = recent.lerp(value.detach(), 1 / min(step, REPORT_EVERY))
            if step % REPORT_EVERY == 0 or step == steps:
                point = {"step": step, "seconds": time.perf_counter() - begun, "learning_rate": rate,
                         "loss": recent.item()}  # fmt: skip
                if not math.isfinite(point["loss"]):
                    raise ArithmeticError(f"The loss became {point['loss']}: use a smaller --learning-rate.")
                if step % arguments.validate_every == 0:
                    point |= validate(model, rows[:VALIDATE_ROWS], frame, settings, compiled=arguments.compile)
                curve.append(point)
                bar.update(step, remark=f"loss {point['loss']:.3f}")
    tokens = step * settings.batch * (settings.positions - 2)
    return {"steps": step, "tokens": tokens, "seconds": time.perf_counter() - begun, "curve": curve}


@torch.no_grad()
def validate(
    model: BertForMaskedLM, rows: Tensor, frame: Frame, settings: Settings, *, compiled: bool
) -> dict[str, Any]:
    """Loss and accuracy of masked tokens, the same ones every time."""
    generator = torch.Generator(rows.device).manual_seed(settings.seed + 1)
    training, score = model.training, torch.compile(masked_scores) if compiled else masked_scores
    model.eval()
    total, right, count = 0.0, 0, 0
    for ids in rows.split(settings.batch):
        corrupted, chosen = corrupt(ids, frame, settings.masked, generator)
        logits, targets = score(model, corrupted, chosen).flatten(0, 1), ids.gather(1, chosen).flatten()
        total += F.cross_entropy(logits, targets, reduction="sum").item()
        right += int((logits.argmax(dim=-1) == targets).sum())
        count += len(targets)
    model.train(training)
    return {"masked_loss": total / count, "masked_accuracy": right / count, "masked_tokens": count}


def store(model: BertForMaskedLM, tokenizer: PreTrainedTokenizerFast, folder: Path) -> None:
    """Save model and tokenizer, with weights in float16 to halve the file; the config says float32, so they are loaded
    as float32."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    weights = folder / "model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(weights).items()}, weights, {"format": "pt"})


if __name__ == "__main__":
    main()
