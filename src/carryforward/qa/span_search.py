# SPDX-License-Identifier: Apache-2.0
"""The most probable stretches of a document, from the scores of its tokens as starts and ends of an answer."""

import unicodedata
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_AT_ONCE = 2**20  # pairs of a start and an end, about: all of a long document would not fit into memory


def characters(document: str, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each token's characters begin and stop without white space, which byte-level tokens bring along; with the
    accents and vowel signs behind them, which a tokenizer may leave out. None are left of a token of white space."""
    places = []
    for begin, stop in offsets.tolist():
        text = document[begin:stop]
        begin, stop = begin + len(text) - len(text.lstrip()), stop - len(text) + len(text.rstrip())
        while begin < stop < len(document) and _is_mark(document[stop]):
            stop += 1
        places.append((begin, stop))
    begins, stops = np.array(places, dtype=np.int64).reshape(-1, 2).T
    return begins, stops


def _is_mark(character: str) -> bool:
    """Whether it belongs to the character before it and has no place of its own."""
    return unicodedata.combining(character) > 0 or unicodedata.category(character) in ("Mn", "Me")


def best_spans(
    starts: Tensor, ends: Tensor, places: tuple[np.ndarray, np.ndarray], count: int, longest: int
) -> list[tuple[int, int, float]]:
    """The most probable stretches: the first and the last token, and their share of all that are not too long.

    Several tokens may be parts of one character. Stretches of the same characters are one, which has the share of all,
    and is told by the outermost of their tokens.

    Args:
        starts, ends: logits of every token, [N].
        places: where each token's characters begin and stop, as `characters` tells. One that has none is no answer.
        count, longest: how many stretches, and of how many tokens.
    """
    longest, blank = min(longest, len(starts)), places[0] >= places[1]
    starts, ends = (
        logits.masked_fill(torch.from_numpy(blank), -torch.inf).log_softmax(-1) for logits in (starts, ends)
    )
    first, last = (torch.from_numpy(_outermost(some, blank, step)) for some, step in zip(places, (1, -1), strict=True))
    # views, [N, longest]: for every stretch that begins at a token, what is known of its last one
    scores = F.pad(ends, (0, longest - 1), value=-torch.inf).unfold(0, longest, 1)
    lasts = F.pad(last, (0, longest - 1), value=0).unfold(0, longest, 1)
    portions = [*_portions(first, longest)]
    # numbers, not tensors: a small one kept between large ones that are freed leaves holes that malloc cannot use again
    sums = [(starts[some, None] + scores[some]).flatten().logsumexp(0).item() for some in portions]
    total = torch.tensor(sums, dtype=starts.dtype).logsumexp(0)
    found: list[tuple[int, int, float]] = []
    for some in portions:
        shares = (starts[some, None] + scores[some] - total).exp()
        reach = (lasts[some] - first[some, None]).clamp(min=0)  # what is padded has no share
        width = int(reach.max()) + 1
        place = (first[some, None] - some.start) * width + reach
        together = shares.new_zeros(len(shares) * width).index_add_(0, place.flatten(), shares.flatten())
        values, where = together.topk(min(count, int((together > 0).sum())))
        for share, at in zip(values.tolist(), where.tolist(), strict=True):
            begin = some.start + at // width
            found.append((begin, begin + at % width, share))
    return sorted(found, key=lambda one: -one[2])[:count]


def _portions(first: Tensor, longest: int) -> Iterator[slice]:
    """Tokens that stretches begin at, some at a time; those of one character are in one portion."""
    to_come = first.flip(0).cummin(0).values.flip(0)
    start = 0
    for begin in (to_come == torch.arange(len(first))).nonzero().flatten().tolist():
        if (begin - start) * longest >= _AT_ONCE:
            yield slice(start, begin)
            start = begin
    yield slice(start, len(first))


def _outermost(places: np.ndarray, blank: np.ndarray, step: int) -> np.ndarray:
    """For each token the first of those at the same character, or with -1, from behind, the last."""
    found, real = np.arange(len(places)), np.flatnonzero(~blank)[::step]
    _, index, inverse = np.unique(places[real], return_index=True, return_inverse=True)
    found[real] = real[index[inverse]]
    return found
