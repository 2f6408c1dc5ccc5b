# SPDX-License-Identifier: Apache-2.0
"""Helpers for tests of generation: logits token by token, and those of one call over the whole text."""

import torch

from carryforward.models.window_cache import WindowCache

WINDOW = 8
QUIET = {"pad_token_id": 1, "eos_token_id": None}
GREEDY = {**QUIET, "do_sample": False}


def left_padded(ids, lengths):
    """The first so many tokens of each row, padded on the left, and their mask."""
    width = max(lengths)
    prompts, mask = torch.ones(len(lengths), width, dtype=torch.long), torch.zeros(len(lengths), width).long()
    for row, length in enumerate(lengths):
        prompts[row, width - length :] = ids[row, :length]
        mask[row, width - length :] = 1
    return prompts, mask


def written(model, ids, lengths, overlap=None, use_state=True):
    """Logits from the end of each row's prompt on, token by token, [B, steps, V]."""
    overlap = model.config.recurrence.overlap if overlap is None else overlap
    cache = WindowCache(model.fresh_state(len(ids), overlap), overlap, use_state)
    prompts, mask = left_padded(ids, lengths)
    logits = [model(prompts, attention_mask=mask, past_key_values=cache).logits]
    for step in range(ids.shape[1] - max(lengths)):
        column = torch.stack([ids[row, length + step] for row, length in enumerate(lengths)])[:, None]
        logits.append(model(column, past_key_values=cache).logits)
    return torch.cat(logits, dim=1), cache


def read_at_once(model, ids, lengths, **arguments):
    """The same from one call over whole texts."""
    with torch.no_grad():
        whole = model(ids, **arguments).logits
    steps = ids.shape[1] - max(lengths) + 1
    return torch.stack([whole[row, length - 1 :][:steps] for row, length in enumerate(lengths)])


def greedily(model, ids, steps, **arguments):
    """Argmax of a whole call, again and again."""
    with torch.no_grad():
        for _ in range(steps):
            best = model(ids, logits_to_keep=1, **arguments).logits[:, -1].argmax(dim=-1, keepdim=True)
            ids = torch.cat([ids, best], dim=1)
    return ids
