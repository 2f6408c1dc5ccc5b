# SPDX-License-Identifier: Apache-2.0
"""Checks of a call's arguments: each error names the argument, the value it got and what to do."""

from collections.abc import Iterable, Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from .. import windows
from ..config import RecurrentModelConfig
from ..state import State
from ..windows import IGNORE

NEUTRAL = ("inputs_embeds", "position_ids", "token_type_ids", "head_mask", "past_key_values", "cache_position",
           "use_cache", "output_attentions")  # fmt: skip
_REASONS = {
    "use_cache": "generate has its own cache. Leave it out.",
    "output_attentions": "the windows of a document have attention of their own, also to carried positions. Leave it "
    "out; `carryforward inspect` shows the attention to the state.",
}
_OF_PACKED = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # come with packed rows


def check_overlap(config: RecurrentModelConfig, value: int | None, prefix: int | None = None) -> int:
    """Check an overlap: windows must move forward and leave enough to carry. Returns it.

    Args:
        value: None for the one the model was made for.
        prefix: tokens in front of every window; by default as many as the config has.
    """
    recurrence = config.recurrence
    value = recurrence.overlap if value is None else value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"overlap={value!r}: give a number of tokens.")
    value = int(value)
    prefix = len(recurrence.prefix) if prefix is None else prefix
    recurrence.check_capacity(windows.check(recurrence.window, value, prefix, len(recurrence.suffix)), value)
    return value


def check_batch(input_ids: Tensor | None) -> Tensor:
    """Check that documents are a batch of token ids. Returns them as 64-bit integers."""
    if input_ids is None:
        raise ValueError("input_ids is missing: give the documents' tokens, a tensor [batch, length].")
    input_ids = _integers("input_ids", input_ids)
    if input_ids.ndim != 2 or len(input_ids) == 0:
        raise ValueError(
            f"input_ids has shape {list(input_ids.shape)}: a batch [batch, length] with at least one row is expected."
        )
    return input_ids


def _integers(name: str, value: Any) -> Tensor:
    """A tensor of integers, as 64-bit ones."""
    _check_tensor(name, value)
    if value.is_floating_point() or value.is_complex() or value.dtype == torch.bool:
        kind = "token ids" if name.endswith("_ids") else "these"
        raise ValueError(f"{name} has dtype {value.dtype}: {kind} are integers.")
    return value.long()


def _check_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise ValueError(f"{name} is of type {type(value).__name__}: give a tensor.")
    if value.is_meta:
        raise ValueError(f"{name} is on the meta device and has no values: give a tensor that has some.")


def check_state(state: State, rows: int, fresh: State, allow_other_model: bool = False) -> None:
    """Check that a call can continue from a state.

    Args:
        fresh: a state of the model that is called.
        allow_other_model: accept the state of a model with other weights or settings, if its shapes fit.
    """
    if not isinstance(state, State):
        raise ValueError(f"state is a {type(state).__name__}: give the state that an earlier call returned.")
    if len(state) != rows:
        raise ValueError(
            f"state has {len(state)} rows, input_ids has {rows}: a state continues the documents it came from, row by "
            "row. Pick rows with state[...], or join states with State.cat."
        )
    if state.signature != fresh.signature:
        raise ValueError(
            f"state comes from another model or overlap: {state.signature}. This call reads with {fresh.signature}. "
            "Read the documents from the start, or use the model and overlap that the state was made with."
        )
    if state.model and fresh.model and state.model != fresh.model and not allow_other_model:
        raise ValueError(
            f"state comes from another model, whose weights or settings differ (fingerprint {state.model}, this "
            f"model's is {fresh.model}). Read the documents from the start, use the model that the state was made "
            "with, or give allow_other_model=True in Python."
        )
    if state.ended:
        raise ValueError(
            "state belongs to documents that were read to their end. To read in pieces, give final=False with every "
            "piece but the last."
        )


def token_lists(name: str, rows: Any) -> list[list[int]]:
    """Lists of token ids, one a document, from a tensor [B, N] or from lists."""
    if isinstance(rows, Tensor):
        if rows.ndim != 2:
            raise ValueError(f"{name} has shape {list(rows.shape)}: a batch [batch, length] is expected.")
        return _integers(name, rows).tolist()
    if not isinstance(rows, Sequence) or not all(_are_ids(row) for row in rows):
        raise ValueError(f"{name} must be a tensor [batch, length], or a list of token ids for each document.")
    return [[int(token) for token in row] for row in rows]


def _are_ids(row: Any) -> bool:
    return isinstance(row, Iterable) and all(isinstance(x, Integral) and not isinstance(x, bool) for x in row)


def check_mask(attention_mask: Tensor | None, input_ids: Tensor, name: str = "attention_mask") -> None:
    """Check that a mask has a 1 or a 0 for every token."""
    if attention_mask is None:
        return
    _check_tensor(name, attention_mask)
    ids = name.replace("attention_mask", "input_ids").replace("_mask", "_ids")
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"{name} has shape {list(attention_mask.shape)}, {ids} {list(input_ids.shape)}: they must be equal, 1 for "
            "a token and 0 for padding."
        )
    if attention_mask.dtype != torch.bool and not bool(((attention_mask == 0) | (attention_mask == 1)).all()):
        other = attention_mask[(attention_mask != 0) & (attention_mask != 1)][0].item()
        raise ValueError(
            f"{name} holds {other}: it must be 1 for a token and 0 for padding. (Additive masks, 0 and -inf, are not "
            "supported.)"
        )


def check_tokens(input_ids: Tensor, attention_mask: Tensor | None, state: State, final: bool) -> None:
    """Check that every row has real tokens. Ending documents that were begun needs no new token."""
    counts = [input_ids.shape[1]] * len(input_ids)
    if attention_mask is not None:
        counts = attention_mask.bool().sum(dim=1).tolist()
    for row, (count, read) in enumerate(zip(counts, state.read.tolist(), strict=True)):
        if count == 0 and not (final and read):
            raise ValueError(f"row {row} of input_ids has no real token: leave it out of the batch.")


def check_labels(labels: Tensor | None, input_ids: Tensor) -> Tensor | None:
    """Check that every token has a label. Returns them as 64-bit integers."""
    if labels is None:
        return None
    labels = _integers("labels", labels)
    if labels.shape != input_ids.shape:
        raise ValueError(
            f"labels has shape {list(labels.shape)}, input_ids {list(input_ids.shape)}: they must be equal; use "
            f"{IGNORE} for tokens that are not scored."
        )
    return labels


def find_framing(
    input_ids: Tensor, attention_mask: Tensor | None, prefix: tuple[int, ...], suffix: tuple[int, ...]
) -> Tensor | None:
    """Where a tokenizer has put the special tokens around a row that the model puts around every window.

    Returns:
        True at these tokens [B, N], in the rows that begin with all of `prefix` and end with all of `suffix`; None if
        no row does.
    """
    if not prefix and not suffix:
        return None
    real = torch.ones_like(input_ids) if attention_mask is None else attention_mask.to(input_ids)
    number, count = real.cumsum(dim=1) - 1, real.sum(dim=1, keepdim=True)  # of each real token in its row
    framing, same = torch.zeros_like(input_ids, dtype=torch.bool), count >= len(prefix) + len(suffix)
    places: list[tuple[int | Tensor, int]] = [*enumerate(prefix)]
    places += [(count - len(suffix) + i, token) for i, token in enumerate(suffix)]
    for place, token in places:
        here = (number == place) & real.bool()
        same &= (here & (input_ids == token)).any(dim=1, keepdim=True)
        framing |= here
    framing &= same
    return framing if framing.any() else None


def check_vocabulary(input_ids: Tensor, attention_mask: Tensor | None, size: int, name: str = "input_ids") -> None:
    """Check that token ids exist. This waits for the device, so it comes after all work that need not wait."""
    used = input_ids if attention_mask is None else input_ids[attention_mask.bool()]
    if used.numel() and not _within(used, size):
        unknown = used[(used < 0) | (used >= size)][0].item()
        raise ValueError(
            f"{name} holds the token id {unknown}; the model's vocabulary has ids from 0 to {size - 1}. "
            "Use the tokenizer that belongs to the model."
        )


def check_one_each(values: Tensor | None, rows: int, name: str) -> Tensor | None:
    """Check that there is one integer for each document. Returns them as 64-bit integers, [B]."""
    if values is None:
        return None
    values = _integers(name, values)
    values = values.view(-1) if values.ndim == 2 and values.shape[1] == 1 else values
    if values.shape != (rows,):
        raise ValueError(f"{name} has shape {list(values.shape)}: one for each of {rows} documents is expected.")
    return values


def check_targets(labels: Tensor, rows: int, size: int, problem: str | None) -> Tensor:
    """Check the labels of a sequence classifier: a class of each document, or numbers, as its `problem_type` says."""
    _check_tensor("labels", labels)
    if problem == "single_label_classification" or (problem is None and size > 1 and not labels.is_floating_point()):
        checked = check_one_each(labels.view(-1) if labels.ndim == 2 else labels, rows, "labels")
        assert checked is not None
        check_classes(checked, None, size)
        return checked
    shapes = [(rows,), (rows, 1)] if size == 1 else [(rows, size)]
    if tuple(labels.shape) not in shapes:
        raise ValueError(f"labels has shape {list(labels.shape)}: numbers of shape {list(shapes[-1])} are expected.")
    return labels.float() if labels.dtype in (torch.bool, torch.int32, torch.int64) else labels


def check_num_items(value: Any) -> None:
    """Check `num_items_in_batch`: a positive number, or a tensor with one."""
    number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
    if value is not None and not number and not (isinstance(value, Tensor) and value.numel() == 1):
        raise ValueError(f"num_items_in_batch={value!r} must be a positive number of targets, or a tensor with one.")


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
    _refuse_packed(arguments)
    for name, value in arguments.items():
        if name not in NEUTRAL:
            raise TypeError(f"forward() got an unexpected keyword argument {name!r}")
        if name == "token_type_ids":
            check_token_types(value)
        elif value is not None and value is not False:
            reason = _REASONS.get(name, "a document has many windows, each its own. Leave it out.")
            raise ValueError(f"{name} is not supported: {reason}")


def _refuse_packed(arguments: dict[str, Any]) -> None:
    """Refuse rows that hold several documents: a state would pass from one to the next."""
    positions = arguments.get("position_ids")
    restarts = isinstance(positions, Tensor) and bool((positions == 0).sum(dim=-1).gt(1).any())
    given = ["position_ids"] * restarts + [name for name in _OF_PACKED if arguments.get(name) is not None]
    if given:
        raise ValueError(
            f"the batch is packed ({given[0]}): several documents stand in one row, and the state would pass from one "
            "to the next. Give each document its own row; with TRL: packing=False and padding_free=False."
        )


def check_token_types(values: Tensor | None) -> None:
    if values is None:
        return
    _check_tensor("token_type_ids", values)
    if values.any():
        raise ValueError("token_type_ids must be all zero: a document is one sequence. Leave the argument out.")
