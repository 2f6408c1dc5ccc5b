# SPDX-License-Identifier: Apache-2.0
"""What kind of word a token belongs to, and whether it was there before: simple rules, for English, always the same.

A token is what its first character that is no white space is part of. Words are letters and digits with apostrophes
inside. A *name* is a word that is written with a capital letter somewhere in the middle of a sentence and never
without. A *function word* is in the list below. What begins inside a word is *inside a word*, whatever the word is.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..windows import Window

KINDS = ("name", "function word", "other word", "inside a word", "number", "punctuation", "space")
NAME, FUNCTION, OTHER, INSIDE, NUMBER, PUNCTUATION, SPACE = range(len(KINDS))
SEEN = ("new", "in this window before", "in earlier windows only")
NEW, HERE, EARLIER = range(len(SEEN))

_WORD = re.compile(r"\w+(?:['’]\w+)*")
_ENDING = re.compile(r"(?:n['’]t|['’](?:s|d|m|ll|re|ve))$", re.IGNORECASE)  # Maren's, wasn't
_STARTS = re.compile(r"(?:[.!?…:\"“‘«]|\n\s*\n)[\s'\"’”)]*$")  # what stands before a sentence, or before direct speech
_BEFORE = 12  # characters of it that are looked at
_FUNCTION = frozenset(
    """a an the this that these those some any no every each either neither both all half such what whatever which
    whichever who whoever whom whose i me my mine myself you your yours yourself yourselves thou thee thy thine he him
    his himself she her hers herself it its itself we us our ours ourselves they them their theirs themselves one and or
    but nor so yet for if then than though although because since unless until while whether as of to in on at by with
    without from into onto upon out off over under up down about above below between among through during before after
    against toward towards across along around behind beside besides beyond near within is am are was were be been being
    do does did done doing have has had having can could will would shall should may might must ought not there here
    when where why how again too very just only also even still more most much many few less least own same other
    another now ever never always once ca wo""".split()  # noqa: SIM905
)


@dataclass(frozen=True)
class Words:
    """What tokens are, by number, [N]: `kinds` as in KINDS, `seen` as in SEEN; and the word or sign each belongs to, as
    it is written there, without 's and the like."""

    kinds: np.ndarray
    seen: np.ndarray
    words: list[str]


def classify(pieces: Sequence[str], windows: Sequence[Window]) -> Words:
    """What the tokens of a text are, which their pieces make up, read in such windows.

    A token was seen before if its whole word was: in what its window reads, or only earlier than that.
    """
    text, ends = "".join(pieces), np.cumsum([len(piece) for piece in pieces])
    words = list(_WORD.finditer(text))
    names = _names(text, words)
    starts = _first_read(windows, len(pieces))
    kinds, seen, belongs = np.full(len(pieces), SPACE), np.full(len(pieces), NEW), [""] * len(pieces)
    last: dict[str, int] = {}  # where a word or sign was met last
    word, entered, before = 0, -1, -1  # the next word; the one we are in, and where that was met before
    for i, piece in enumerate(pieces):
        stripped = piece.lstrip()
        if not stripped:
            if not piece and i:  # the rest of a character that the token before begins
                kinds[i], belongs[i], seen[i] = kinds[i - 1], belongs[i - 1], seen[i - 1]
            continue
        at = int(ends[i]) - len(stripped)
        while word < len(words) and words[word].end() <= at:
            word += 1
        inside = word < len(words) and words[word].start() <= at
        belongs[i] = _stem(words[word]) if inside else stripped.rstrip()
        if not inside:
            kinds[i] = PUNCTUATION
        elif words[word].start() < at:
            kinds[i] = INSIDE
        else:
            kinds[i] = _kind(_stem(words[word]), names)
        if not inside or word != entered:
            key, entered = belongs[i].casefold(), word if inside else -1
            before, last[key] = last.get(key, -1), i
        if before >= 0:
            seen[i] = HERE if before >= starts[i] else EARLIER
    return Words(kinds, seen, belongs)


def _stem(word: re.Match) -> str:
    return _ENDING.sub("", word.group()) or word.group()


def _kind(stem: str, names: set[str]) -> int:
    if stem[0].isdigit():
        return NUMBER
    if stem.casefold() in _FUNCTION:
        return FUNCTION
    return NAME if stem in names else OTHER


def _names(text: str, words: Sequence[re.Match]) -> set[str]:
    """Words with a capital letter that is not a sentence's, and that are never written without."""
    stems = [_stem(word) for word in words]
    small = {stem for stem in stems if stem[0].islower()}
    found = set()
    for word, stem in zip(words, stems, strict=True):
        if stem[0].isupper() and stem not in found and stem.lower() not in small:
            before = text[max(word.start() - _BEFORE, 0) : word.start()]
            if before and not _STARTS.search(before):
                found.add(stem)
    return found


def _first_read(windows: Sequence[Window], count: int) -> np.ndarray:
    """For each token the first one that the window reads which answers for it."""
    starts = np.zeros(count, dtype=np.int64)
    for window in windows:
        starts[window.score_from : window.score_to] = window.start
    return starts
