# SPDX-License-Identifier: Apache-2.0
"""Classify tokens by the word they belong to and by whether that word occurred before. Simple rules for English.

The first character of a token that is not white space decides. Words are letters and digits with apostrophes inside. A
*name* is a word that has a capital letter somewhere inside a sentence and never occurs without one. *Function words*
are those in the list below. A token that starts inside a word is *inside a word*, whatever the word is.
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
_SUFFIX = re.compile(r"(?:n['’]t|['’](?:s|d|m|ll|re|ve))$", re.IGNORECASE)  # Maren's, wasn't
_SENTENCE_BREAK = re.compile(r"(?:[.!?…:\"“‘«]|\n\s*\n)[\s'\"’”)]*$")  # before a sentence or direct speech
_BREAK_CHARACTERS = 12  # characters before a word in which to look for a sentence break
_FUNCTION_WORDS = frozenset(
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
class WordClasses:
    """Classes of the tokens of a text.

    Attributes:
        kinds: index into `KINDS`, [N].
        seen: index into `SEEN`, [N].
        words: the word or punctuation that each token belongs to, without suffixes such as 's.
    """

    kinds: np.ndarray
    seen: np.ndarray
    words: list[str]


def classify(pieces: Sequence[str], windows: Sequence[Window]) -> WordClasses:
    """Classify the tokens of a text.

    A token was seen before if its whole word was: in the tokens that its window reads, or only in earlier windows.

    Args:
        pieces: the text of each token; together they are the whole text.
        windows: the windows in which the text was read.
    """
    text, ends = "".join(pieces), np.cumsum([len(piece) for piece in pieces])
    words = list(_WORD.finditer(text))
    names = _names(text, words)
    window_starts = _window_starts(windows, len(pieces))
    kinds, seen, token_words = np.full(len(pieces), SPACE), np.full(len(pieces), NEW), [""] * len(pieces)
    last: dict[str, int] = {}  # the latest token at which each word or sign started
    word = 0  # index of the current or next word
    current, previous = -1, -1  # the word that was entered last, and the token of its previous occurrence
    for i, piece in enumerate(pieces):
        stripped = piece.lstrip()
        if not stripped:
            if not piece and i:  # continues a character of the token before
                kinds[i], token_words[i], seen[i] = kinds[i - 1], token_words[i - 1], seen[i - 1]
            continue
        start = int(ends[i]) - len(stripped)
        while word < len(words) and words[word].end() <= start:
            word += 1
        in_word = word < len(words) and words[word].start() <= start
        token_words[i] = _stem(words[word]) if in_word else stripped.rstrip()
        if not in_word:
            kinds[i] = PUNCTUATION
        elif words[word].start() < start:
            kinds[i] = INSIDE
        else:
            kinds[i] = _kind(_stem(words[word]), names)
        if not in_word or word != current:
            key, current = token_words[i].casefold(), word if in_word else -1
            previous, last[key] = last.get(key, -1), i
        if previous >= 0:
            seen[i] = HERE if previous >= window_starts[i] else EARLIER
    return WordClasses(kinds, seen, token_words)


def _stem(word: re.Match) -> str:
    return _SUFFIX.sub("", word.group()) or word.group()


def _kind(stem: str, names: set[str]) -> int:
    if stem[0].isdigit():
        return NUMBER
    if stem.casefold() in _FUNCTION_WORDS:
        return FUNCTION
    return NAME if stem in names else OTHER


def _names(text: str, words: Sequence[re.Match]) -> set[str]:
    """Words that are capitalised somewhere inside a sentence and never occur in lower case."""
    stems = [_stem(word) for word in words]
    lower_case = {stem for stem in stems if stem[0].islower()}
    names = set()
    for word, stem in zip(words, stems, strict=True):
        if stem[0].isupper() and stem not in names and stem.lower() not in lower_case:
            before = text[max(word.start() - _BREAK_CHARACTERS, 0) : word.start()]
            if before and not _SENTENCE_BREAK.search(before):
                names.add(stem)
    return names


def _window_starts(windows: Sequence[Window], count: int) -> np.ndarray:
    """For each token, the first token that its window reads, [count]."""
    starts = np.zeros(count, dtype=np.int64)
    for window in windows:
        starts[window.score_from : window.score_to] = window.start
    return starts
