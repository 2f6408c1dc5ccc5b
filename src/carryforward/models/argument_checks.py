# SPDX-License-Identifier: Apache-2.0
"""Checks of a call's arguments: each error names the argument, the value it got and what to do."""

from typing import Any

import torch
from torch import Tensor

from .. import windows
from ..config import RecurrentModelConfig
from ..state import State
from ..windows import IGNORE

NEUTRAL = ("inputs_embeds", "position_ids", "token_type_ids", "head_mask", "past_key_values", "cache_position",
           "use_cache", "output_attentions", "output_hidden_states")  # fmt: skip


def check_overlap(config: RecurrentModelConfig, value: int | None, prefix: int | None = None) -> int:
    """Check an overlap: windows must move forward and leave enough to carry. Returns it.

    Args:
        value: None for the one the model was made for.
        prefix: tokens in front of every window; by default as many as the config has.
    """
    recurrence = config.recurrence
    value = recurrence.overlap if value is None else value
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"overlap={value!r}: give a number of tokens.")
    prefix = len(recurrence.prefix) if prefix is None else prefix
    recurrence.check_capacity(windows.check(recurrence.window, value, prefix, len(recurrence.suffix)), value)
    return value


def check_batch(input_ids: Tensor | None) -> Tensor:
    if input_ids is None:
        raise ValueError("input_ids is missing: give the documents' tokens, a tensor [batch, length].")
    if input_ids.ndim != 2 or len(input_ids) == 0:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)}: a batch [batch, length] with at least one row is expected."
        )
    if input_ids.is_floating_point():
        raise ValueError(f"input_ids has dtype {input_ids.dtype}: token ids are integers.")
    return input_ids


def check_state(state: State, rows: int, signature: str) -> None:
    if len(state) != rows:
        raise ValueError(
            f"state has {len(state)} rows, input_ids has {rows}: a state continues the documents it came from, row by "
            "row. Pick rows with state[...], or join states with State.cat."
        )
    if state.signature != signature:
        raise ValueError(
            f"state comes from another model or overlap: {state.signature}. This call reads with {signature}. "
            "Read the documents from the start, or use the model and overlap that the state was made with."
        )
    if state.ended:
        raise ValueError(
            "state belongs to documents that were read to their end. To read in pieces, give final=False with every "
            "piece but the last."
        )


def check_tokens(input_ids: Tensor, attention_mask: Tensor | None, state: State, final: bool) -> None:
    """Check that every row has real tokens. Ending documents that were begun needs no new token."""
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


def check_labels(labels: Tensor | None, input_ids: Tensor) -> None:
    """Check that every token has a label."""
    if labels is not None and labels.shape != input_ids.shape:
        raise ValueError(
            f"labels has shape {list(labels.shape)}, input_ids {list(input_ids.shape)}: they must be equal; use "
            f"{IGNORE} for tokens that are not scored."
        )


def has_special_tokens(
    input_ids: Tensor, attention_mask: Tensor | None, prefix: tuple[int, ...], suffix: tuple[int, ...]
) -> bool:
    """Whether a tokenizer has put the windows' special tokens around the first row."""
    row = input_ids[0] if attention_mask is None else input_ids[0][attention_mask[0].bool()]
    ends = [*row[: len(prefix)].tolist(), *row[max(len(row) - len(suffix), 0) :].tolist()]
    return len(row) >= len(ends) and ends == [*prefix, *suffix]


def check_vocabulary(input_ids: Tensor, attention_mask: Tensor | None, size: int, name: str = "input_ids") -> None:
    """Check that token ids exist. This waits for the device, so it comes after all work that need not wait."""
    used = input_ids if attention_mask is None else input_ids[attention_mask.bool()]
    if used.numel() and not _within(used, size):
        unknown = used[(used < 0) | (used >= size)][0].item()
        raise ValueError(
            f"{name} holds the token id {unknown}; the model's vocabulary has ids from 0 to {size - 1}. "
            "Use the tokenizer that belongs to the model."
        )


def check_one_each(values: Tensor | None, rows: int, name: str) -> None:
    """Check that there is one number for each document."""
    if values is not None and values.shape != (rows,):
        raise ValueError(f"{name} has shape {list(values.shape)}: one for each of {rows} documents is expected.")


def check_classes(labels: Tensor | None, attention_mask: Tensor | None, number: int, name: str = "labels") -> None:
    """Check that each label is a class or -100; labels at padding are not scored."""
    if labels is not None and attention_mask is not None:
        labels = labels[attention_mask.bool().to(labels.device)]
    if labels is not None and labels.numel() and not _within(labels.masked_fill(labels == IGNORE, 0), number):
        unknown = labels[(labels != IGNORE) & ((labels < 0) | (labels >= number))][0].item()
        raise ValueError(f"{name} holds {unknown}; accepted are 0 to {number - 1}, and {IGNORE} for unscored.")


def _within(x: Tensor, size: int) -> bool:
    lowest, highest = torch.stack(x.aminmax()).tolist()
    return lowest >= 0 and highest < size


def refuse_unsupported(arguments: dict[str, Any]) -> None:
    """Check arguments that peft and others pass to every model: their values must request nothing."""
    for name, value in arguments.items():
        if name not in NEUTRAL:
            raise TypeError(f"forward() got an unexpected keyword argument {name!r}")
        if name == "token_type_ids":
            check_token_types(value)
        elif value is not None and value is not False:
            reason = (
                "generate has its own cache" if name == "use_cache" else "a document has many windows, each its own"
            )
            raise ValueError(f"{name} is not supported: {reason}. Leave it out.")


def check_token_types(values: Tensor | None) -> None:
    if values is not None and values.any():
        raise ValueError("token_type_ids must be all zero: a document is one sequence. Leave the argument out.")
