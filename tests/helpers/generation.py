# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of generation: logits token by token, and those of one call over the whole text."""

import torch

from carryforward.models.generation.window_cache import WindowCache

WINDOW = 8
NO_EOS = {"pad_token_id": 1, "eos_token_id": None}
GREEDY = {**NO_EOS, "do_sample": False}


def pad_left(ids, lengths):
    """The first so many tokens of each row, padded on the left, and their mask."""
    width = max(lengths)
    prompts, mask = torch.ones(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width).long()
    for row, length in enumerate(lengths):
        prompts[row, width - length :] = ids[row, :length]
        mask[row, width - length :] = 1
    return prompts, mask


def decode(model, ids, lengths, overlap=None, use_state=True):
    """Read prompts of these lengths, then the rest of the text token by token.

    Returns:
        logits from the end of each row's prompt on, [B, steps, V], and the cache.
    """
    overlap = model.config.recurrence.overlap if overlap is None else overlap
    cache = WindowCache(model.fresh_state(len(ids), overlap), overlap, use_state)
    prompts, mask = pad_left(ids, lengths)
    logits = [model(prompts, attention_mask=mask, past_key_values=cache).logits]
    for step in range(ids.shape[1] - max(lengths)):
        column = torch.stack([ids[row, length + step] for row, length in enumerate(lengths)])[:, None]
        logits.append(model(column, past_key_values=cache).logits)
    return torch.cat(logits, dim=1), cache


def logits_of_one_call(model, ids, lengths, **arguments):
    """The same logits from one call over the whole texts."""
    with torch.no_grad():
        whole = model(ids, **arguments).logits
    steps = ids.shape[1] - max(lengths) + 1
    return torch.stack([whole[row, length - 1 :][:steps] for row, length in enumerate(lengths)])


def greedy_continuation(model, ids, steps, **arguments):
    """Greedy search that reads the whole text again for every token."""
    with torch.no_grad():
        for _ in range(steps):
            best = model(ids, logits_to_keep=1, **arguments).logits[:, -1].argmax(dim=-1, keepdim=True)
            ids = torch.cat([ids, best], dim=1)
    return ids
