# SPDX-License-Identifier: Apache-2.0
"""Does a text name or refer to people of the text before it? A simple rule, the same for every model.

* A name is a capitalised word that stands inside a sentence at least twice, never occurs in small letters in that text,
  and is no title, day, month or language. Places cannot be told from people.
* A text refers to people if it uses third-person pronouns of a kind (he, she, they) that the text before it used.

English only.
"""

import re
from collections import Counter
from dataclasses import dataclass

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_ENDS = re.compile(r"[.!?:;\"“”'‘’(\[*_—]|--|\n\s*\n|^$")  # between two words: the second may begin a sentence
_TIMES = 2  # that a name must stand inside a sentence
_TITLES = ("mr mrs miss ms dr sir lady lord madam madame monsieur mademoiselle captain colonel major general "
           "lieutenant sergeant professor doctor king queen prince princess duke duchess count countess earl "
           "baron father mother sister brother aunt uncle saint st rev reverend master mistress")  # fmt: skip
_CALENDAR = ("monday tuesday wednesday thursday friday saturday sunday january february march april may june july "
             "august september october november december christmas easter english french german latin greek american "
             "chapter god i oh o ah yes no")  # fmt: skip
_NO_NAMES = frozenset(f"{_TITLES} {_CALENDAR}".split())
PRONOUNS = {
    "he": frozenset({"he", "him", "his", "himself"}),
    "she": frozenset({"she", "her", "hers", "herself"}),
    "they": frozenset({"they", "them", "their", "theirs", "themselves"}),
}


@dataclass(frozen=True)
class People:
    """Those of a text: their names, in the order in which they appear, and the kinds of pronouns it uses."""

    names: tuple[str, ...]
    pronouns: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.names or self.pronouns)


def people(text: str) -> People:
    """Who is in a text.

    >>> people("Then Anna rose. The old man saw Anna, and he told her so. However, London was far.")
    People(names=('Anna',), pronouns=('he', 'she'))
    """
    inside: Counter[str] = Counter()
    small, end = set(), 0
    for match in _WORD.finditer(text):
        word = _bare(match[0])
        if word.islower():
            small.add(word)
        elif word.istitle() and len(word) > 1 and not _ENDS.search(text[end : match.start()]):
            inside[word] += 1
        end = match.end()
    names = [word for word, times in inside.items()
             if times >= _TIMES and word.lower() not in small | _NO_NAMES]  # fmt: skip
    return People(tuple(names), pronouns(text))


def pronouns(text: str) -> tuple[str, ...]:
    """The kinds of third-person pronouns that a text uses."""
    words = {_bare(match[0]).lower() for match in _WORD.finditer(text)}
    return tuple(kind for kind, forms in PRONOUNS.items() if words & forms)


def mentions(before: People, text: str) -> list[tuple[int, int, str]]:
    """Where a text names or refers to those of the text before: start, end, and the name or kind of pronoun.

    >>> mentions(People(("Anna",), ("she",)), "Her brother and Anna's")
    [(0, 3, 'she'), (16, 20, 'Anna')]
    """
    found = []
    for match in _WORD.finditer(text):
        word = _bare(match[0])
        kinds = [kind for kind in before.pronouns if word.lower() in PRONOUNS[kind]]
        who = word if word in before.names else kinds[0] if kinds else None
        if who is not None:
            found.append((match.start(), match.start() + len(word), who))
    return found


def taken_up(before: People, text: str) -> People:
    """Those of the text before that another text names or refers to."""
    met = {who for _, _, who in mentions(before, text)}
    return People(
        tuple(name for name in before.names if name in met), tuple(kind for kind in before.pronouns if kind in met)
    )


def _bare(word: str) -> str:
    """Without what an apostrophe adds: Anna's is Anna."""
    return re.split("['’]", word)[0]
