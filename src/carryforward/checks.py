# SPDX-License-Identifier: Apache-2.0
"""What a call may be given: each refusal names the argument, the value it got and what to do."""

from torch import Tensor

from . import windows
from .configuration import RecurrentModelConfig
from .reading import IGNORE
from .state import State


def overlap(config: RecurrentModelConfig, value: int) -> None:
    """An overlap the windows can have, and at which something is left to pool for every slot."""
    recurrence = config.recurrence
    room = windows.check(recurrence.window, value, len(recurrence.prefix), len(recurrence.suffix))
    pooled = min(room, room - value + recurrence.overlap)
    if pooled < recurrence.slots:
        raise ValueError(
            f"overlap={value}: a model made for overlap {recurrence.overlap} then pools only {pooled} positions of a "
            f"window, fewer than its {recurrence.slots} slots. Use an overlap closer to {recurrence.overlap}."
        )


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


def tokens(input_ids: Tensor, attention_mask: Tensor | None, vocabulary: int, state: State, final: bool) -> None:
    """Real tokens in every row, all in the vocabulary. No new token is needed to end documents already begun."""
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask has shape {list(attention_mask.shape)}, input_ids {list(input_ids.shape)}: they must be "
            "equal, 1 for a token and 0 for padding."
        )
    real = input_ids.new_ones(()).expand_as(input_ids).bool() if attention_mask is None else attention_mask.bool()
    for row, (count, read) in enumerate(zip(real.sum(dim=1).tolist(), state.read.tolist(), strict=True)):
        if count == 0 and not (final and read):
            raise ValueError(f"row {row} of input_ids has no real token: leave it out of the batch.")
    used = input_ids[real]
    if used.numel() and (used.min() < 0 or used.max() >= vocabulary):
        wrong = used[(used < 0) | (used >= vocabulary)][0].item()
        raise ValueError(
            f"input_ids holds the token id {wrong}; the model's vocabulary has ids from 0 to {vocabulary - 1}. "
            "Use the tokenizer that belongs to the model."
        )


def labels(given: Tensor | None, input_ids: Tensor | None, classes: int) -> None:
    """Labels for every token, each a class or -100."""
    if given is None:
        return
    if input_ids is None or given.shape != input_ids.shape:
        shape = None if input_ids is None else list(input_ids.shape)
        raise ValueError(
            f"labels has shape {list(given.shape)}, input_ids {shape}: they must be equal; use {IGNORE} for tokens "
            "that are not scored."
        )
    wrong = given[(given != IGNORE) & ((given < 0) | (given >= classes))]
    if wrong.numel():
        raise ValueError(f"labels holds {wrong[0].item()}; accepted are 0 to {classes - 1}, and {IGNORE} for unscored.")


def token_types(given: Tensor | None) -> None:
    if given is not None and given.any():
        raise ValueError("token_type_ids must be all zero: a document is one sequence. Leave the argument out.")
