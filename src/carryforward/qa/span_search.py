# SPDX-License-Identifier: Apache-2.0
"""Find the most probable answer spans of a document, given start and end logits of its tokens."""

import unicodedata
from collections.abc import Iterator

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

_MAX_PAIRS = (
    2**20
)  # (start, end) pairs scored at once, approximately: all pairs of a long document need too much memory


def trim_offsets(document: str, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Start and end of each token's characters, without white space and with trailing combining marks.

    Byte-level tokens include a leading space; some tokenizers drop accents and vowel signs. A token of white space
    only gets an empty range.
    """
    ranges = []
    for start, end in offsets.tolist():
        text = document[start:end]
        start, end = start + len(text) - len(text.lstrip()), end - len(text) + len(text.rstrip())
        while start < end < len(document) and _is_mark(document[end]):
            end += 1
        ranges.append((start, end))
    starts, ends = np.array(ranges, dtype=np.int64).reshape(-1, 2).T
    return starts, ends


def _is_mark(character: str) -> bool:
    """Whether a character combines with the one before it."""
    return unicodedata.combining(character) > 0 or unicodedata.category(character) in ("Mn", "Me")


def best_spans(
    starts: Tensor,
    ends: Tensor,
    offsets: tuple[np.ndarray, np.ndarray],
    top_k: int,
    max_tokens: int,
    *,
    normalise: bool = True,
) -> list[tuple[int, int, float]]:
    """The most probable spans: first token, last token, and share of the probability of all spans that are allowed.

    Several tokens can be parts of one character. Spans of the same characters count as one: their shares are added,
    and the outermost of their tokens are returned.

    Args:
        starts, ends: logits of every token, [N].
        offsets: start and end of each token's characters, from `trim_offsets`; tokens with an empty range are excluded.
        top_k: number of spans.
        max_tokens: length of the longest span that is allowed.
        normalise: False takes `starts` and `ends` as log-probabilities, and returns their products instead, which need
            not add up to 1: a start and an end that are drawn independently may be no span.
    """
    max_tokens, empty = min(max_tokens, len(starts)), offsets[0] >= offsets[1]
    starts, ends = (logits.masked_fill(torch.from_numpy(empty), -torch.inf) for logits in (starts, ends))
    if normalise:
        starts, ends = starts.log_softmax(-1), ends.log_softmax(-1)
    first = torch.from_numpy(_outermost(offsets[0], empty, 1))
    last = torch.from_numpy(_outermost(offsets[1], empty, -1))
    # views [N, max_tokens]: for every start token, the score and the outermost last token of each end
    end_scores = F.pad(ends, (0, max_tokens - 1), value=-torch.inf).unfold(0, max_tokens, 1)
    last_tokens = F.pad(last, (0, max_tokens - 1), value=0).unfold(0, max_tokens, 1)
    chunks = [*_chunks(first, max_tokens)]
    total = torch.zeros((), dtype=starts.dtype)
    if normalise:
        # Python floats: small tensors kept between large ones that are freed would fragment the memory
        sums = [(starts[chunk, None] + end_scores[chunk]).flatten().logsumexp(0).item() for chunk in chunks]
        total = torch.tensor(sums, dtype=starts.dtype).logsumexp(0)
    spans: list[tuple[int, int, float]] = []
    for chunk in chunks:
        shares = (starts[chunk, None] + end_scores[chunk] - total).exp()
        length = (last_tokens[chunk] - first[chunk, None]).clamp(min=0)  # negative only for padding, whose share is 0
        width = int(length.max()) + 1
        index = (first[chunk, None] - chunk.start) * width + length
        merged = shares.new_zeros(len(shares) * width).index_add_(0, index.flatten(), shares.flatten())
        values, indices = merged.topk(min(top_k, int((merged > 0).sum())))
        for share, flat in zip(values.tolist(), indices.tolist(), strict=True):
            start = chunk.start + flat // width
            spans.append((start, start + flat % width, share))
    return sorted(spans, key=lambda span: -span[2])[:top_k]


def _chunks(first: Tensor, max_tokens: int) -> Iterator[slice]:
    """Slices of start tokens with about `_MAX_PAIRS` spans each; the tokens of one character stay in one slice."""
    following_min = first.flip(0).cummin(0).values.flip(0)
    start = 0
    for boundary in (following_min == torch.arange(len(first))).nonzero().flatten().tolist():
        if (boundary - start) * max_tokens >= _MAX_PAIRS:
            yield slice(start, boundary)
            start = boundary
    yield slice(start, len(first))


def _outermost(offsets: np.ndarray, empty: np.ndarray, step: int) -> np.ndarray:
    """For each token the first (step 1) or last (step -1) token that has the same offset."""
    outermost, tokens = np.arange(len(offsets)), np.flatnonzero(~empty)[::step]
    _, index, inverse = np.unique(offsets[tokens], return_index=True, return_inverse=True)
    outermost[tokens] = tokens[index[inverse]]
    return outermost
