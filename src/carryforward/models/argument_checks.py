# SPDX-License-Identifier: Apache-2.0
"""What a call may be given: each refusal names the argument, the value it got and what to do."""

from typing import Any

import torch
from torch import Tensor

from .. import windows
from ..config import RecurrentModelConfig
from ..state import State
from ..windows import IGNORE

NEUTRAL = ("inputs_embeds", "position_ids", "token_type_ids", "head_mask", "past_key_values", "cache_position",
           "use_cache", "output_attentions", "output_hidden_states")  # fmt: skip


def overlap(config: RecurrentModelConfig, value: int | None, prefix: int | None = None) -> int:
    """An overlap the windows can have, and at which something is left to pool for every slot, and to keep: given back.

    Args:
        value: None is the one the model was made for.
        prefix: tokens in front of every window; by default as many as the config has.
    """
    recurrence = config.recurrence
    value = recurrence.overlap if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"overlap={value!r}: give a number of tokens.")
    prefix = len(recurrence.prefix) if prefix is None else prefix
    room = windows.check(recurrence.window, value, prefix, len(recurrence.suffix))
    pooled = recurrence.pooled(room, value)
    if pooled < recurrence.slots:
        raise ValueError(
            f"overlap={value}: a model made for overlap {recurrence.overlap} then pools only {pooled} positions of a "
            f"window, fewer than its {recurrence.slots} slots. Use an overlap closer to {recurrence.overlap}."
        )
    if room - value < recurrence.seen:
        most = room - recurrence.seen
        advice = f"Use an overlap of at most {most}" if most >= 0 else "Use a larger window, or keep fewer"
        raise ValueError(
            f"overlap={value}: the next window is only {room - value} tokens ahead, and the model keeps the keys and "
            f"values of {recurrence.seen}. {advice}."
        )
    return value


def batch(input_ids: Tensor | None) -> Tensor:
    if input_ids is None:
        raise ValueError("input_ids is missing: give the documents' tokens, a tensor [batch, length].")
    if input_ids.ndim != 2 or len(input_ids) == 0:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)}: a batch [batch, length] with at least one row is expected."
        )
    if input_ids.is_floating_point():
        raise ValueError(f"input_ids has dtype {input_ids.dtype}: token ids are integers.")
    return input_ids


def state(given: State, rows: int, signature: str) -> None:
    if len(given) != rows:
        raise ValueError(
            f"state has {len(given)} rows, input_ids has {rows}: a state continues the documents it came from, row by "
            "row. Pick rows with state[...], or join states with State.cat."
        )
    if given.signature != signature:
        raise ValueError(
            f"state comes from another model or overlap: {given.signature}. This call reads with {signature}. "
            "Start the documents anew, or use the model and overlap the state was made with."
        )
    if given.ended:
        raise ValueError(
            "state belongs to documents that were read to their end. To read in pieces, give final=False with every "
            "piece but the last."
        )


def tokens(input_ids: Tensor, attention_mask: Tensor | None, state: State, final: bool) -> None:
    """Real tokens in every row. No new token is needed to end documents already begun."""
    counts = [input_ids.shape[1]] * len(input_ids)
    if attention_mask is not None:
        if attention_mask.shape != input_ids.shape:
            raise ValueError(
                f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}: they must "
                "be equal, 1 for a token and 0 for padding."
            )
        counts = attention_mask.bool().sum(dim=1).tolist()
    for row, (count, read) in enumerate(zip(counts, state.read.tolist(), strict=True)):
        if count == 0 and not (final and read):
            raise ValueError(f"row {row} of input_ids has no real token: leave it out of the batch.")


def labels(given: Tensor | None, input_ids: Tensor) -> None:
    """A label for every token."""
    if given is not None and given.shape != input_ids.shape:
        raise ValueError(
            f"labels has shape {list(given.shape)}, input_ids {list(input_ids.shape)}: they must be equal; use "
            f"{IGNORE} for tokens that are not scored."
        )


def framed(input_ids: Tensor, attention_mask: Tensor | None, prefix: tuple[int, ...], suffix: tuple[int, ...]) -> bool:
    """Whether a tokenizer has put around the first row what every window is given."""
    row = input_ids[0] if attention_mask is None else input_ids[0][attention_mask[0].bool()]
    ends = [*row[: len(prefix)].tolist(), *row[max(len(row) - len(suffix), 0) :].tolist()]
    return len(row) >= len(ends) and ends == [*prefix, *suffix]


def vocabulary(input_ids: Tensor, attention_mask: Tensor | None, size: int, name: str = "input_ids") -> None:
    """Tokens that exist. A device that is still at work is waited for, so this comes after what can be done before."""
    used = input_ids if attention_mask is None else input_ids[attention_mask.bool()]
    if used.numel() and not _within(used, size):
        wrong = used[(used < 0) | (used >= size)][0].item()
        raise ValueError(
            f"{name} holds the token id {wrong}; the model's vocabulary has ids from 0 to {size - 1}. "
            "Use the tokenizer that belongs to the model."
        )


def one_each(given: Tensor | None, rows: int, name: str) -> None:
    """One number for each document."""
    if given is not None and given.shape != (rows,):
        raise ValueError(f"{name} has shape {list(given.shape)}: one for each of {rows} documents is expected.")


def classes(labels: Tensor | None, attention_mask: Tensor | None, number: int, name: str = "labels") -> None:
    """Labels that are each a class or -100; what stands at padding is not scored."""
    if labels is not None and attention_mask is not None:
        labels = labels[attention_mask.bool().to(labels.device)]
    if labels is not None and labels.numel() and not _within(labels.masked_fill(labels == IGNORE, 0), number):
        wrong = labels[(labels != IGNORE) & ((labels < 0) | (labels >= number))][0].item()
        raise ValueError(f"{name} holds {wrong}; accepted are 0 to {number - 1}, and {IGNORE} for unscored.")


def _within(x: Tensor, size: int) -> bool:
    lowest, highest = torch.stack(x.aminmax()).tolist()
    return lowest >= 0 and highest < size


def neutral(given: dict[str, Any]) -> None:
    """Keywords that peft and others pass to every model, with values that ask for nothing."""
    for name, value in given.items():
        if name not in NEUTRAL:
            raise TypeError(f"forward() got an unexpected keyword argument {name!r}")
        if name == "token_type_ids":
            token_types(value)
        elif value is not None and value is not False:
            told = "generate keeps its own" if name == "use_cache" else "a document has many windows, and one each"
            raise ValueError(f"{name} cannot be had here: {told}. Leave it out.")


def token_types(given: Tensor | None) -> None:
    if given is not None and given.any():
        raise ValueError("token_type_ids must be all zero: a document is one sequence. Leave the argument out.")
