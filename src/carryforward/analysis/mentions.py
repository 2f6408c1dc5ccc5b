# SPDX-License-Identifier: Apache-2.0
"""Find the people of a text, and whether another text mentions them again. Simple rules, the same for every model.

* A name is a capitalised word that occurs inside a sentence at least twice, never occurs in lower case in that text,
  and is not a title, day, month or language. Places are not distinguished from people.
* A pronoun counts as a mention if the first text uses third-person pronouns of the same kind (he, she, they).

English only.
"""

import re
from collections import Counter
from dataclasses import dataclass

_WORD = re.compile(r"[^\W\d_]+(?:['’][^\W\d_]+)?")
_SENTENCE_BREAK = re.compile(r"[.!?:;\"“”'‘’(\[*_—]|--|\n\s*\n|^$")  # between two words
_MIN_OCCURRENCES = 2  # of a name, inside sentences
_TITLES = ("mr mrs miss ms dr sir lady lord madam madame monsieur mademoiselle captain colonel major general "
           "lieutenant sergeant professor doctor king queen prince princess duke duchess count countess earl "
           "baron father mother sister brother aunt uncle saint st rev reverend master mistress")  # fmt: skip
_OTHERS = ("monday tuesday wednesday thursday friday saturday sunday january february march april may june july "
           "august september october november december christmas easter english french german latin greek american "
           "chapter god i oh o ah yes no")  # fmt: skip
_NO_NAMES = frozenset(f"{_TITLES} {_OTHERS}".split())
PRONOUNS = {
    "he": frozenset({"he", "him", "his", "himself"}),
    "she": frozenset({"she", "her", "hers", "herself"}),
    "they": frozenset({"they", "them", "their", "theirs", "themselves"}),
}


@dataclass(frozen=True)
class People:
    """The people of a text: their names in the order of appearance, and the kinds of pronouns that the text uses."""

    names: tuple[str, ...]
    pronouns: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.names or self.pronouns)


def find_people(text: str) -> People:
    """Find the names and kinds of pronouns of a text.

    >>> find_people("Then Anna rose. The old man saw Anna, and he told her so. However, London was far.")
    People(names=('Anna',), pronouns=('he', 'she'))
    """
    capitalised: Counter[str] = Counter()
    lower_case, end = set(), 0
    for match in _WORD.finditer(text):
        word = _without_apostrophe(match[0])
        if word.islower():
            lower_case.add(word)
        elif word.istitle() and len(word) > 1 and not _SENTENCE_BREAK.search(text[end : match.start()]):
            capitalised[word] += 1
        end = match.end()
    names = [word for word, count in capitalised.items()
             if count >= _MIN_OCCURRENCES and word.lower() not in lower_case | _NO_NAMES]  # fmt: skip
    return People(tuple(names), pronoun_kinds(text))


def pronoun_kinds(text: str) -> tuple[str, ...]:
    """The kinds of third-person pronouns that a text uses."""
    words = {_without_apostrophe(match[0]).lower() for match in _WORD.finditer(text)}
    return tuple(kind for kind, forms in PRONOUNS.items() if words & forms)


def find_mentions(people: People, text: str) -> list[tuple[int, int, str]]:
    """Find where a text mentions people of another text: start, end, and the name or kind of pronoun.

    >>> find_mentions(People(("Anna",), ("she",)), "Her brother and Anna's")
    [(0, 3, 'she'), (16, 20, 'Anna')]
    """
    mentions = []
    for match in _WORD.finditer(text):
        word = _without_apostrophe(match[0])
        kinds = [kind for kind in people.pronouns if word.lower() in PRONOUNS[kind]]
        mentioned = word if word in people.names else kinds[0] if kinds else None
        if mentioned is not None:
            mentions.append((match.start(), match.start() + len(word), mentioned))
    return mentions


def mentioned_people(people: People, text: str) -> People:
    """Those of the people, and of the kinds of pronouns, that a text mentions."""
    mentioned = {name for _, _, name in find_mentions(people, text)}
    return People(
        tuple(name for name in people.names if name in mentioned),
        tuple(kind for kind in people.pronouns if kind in mentioned),
    )


def _without_apostrophe(word: str) -> str:
    """Remove an apostrophe and what follows: Anna's is Anna."""
    return re.split("['’]", word)[0]
