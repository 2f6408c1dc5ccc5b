# SPDX-License-Identifier: Apache-2.0
"""Names and pronouns that a text mentions."""

import pytest

from carryforward.analysis.mentions import People, find_mentions, find_people, mentioned_people


@pytest.mark.parametrize(
    ("text", "names", "pronouns"),
    [
        ("Then Mary rose, and Mary spoke.", ("Mary",), ()),
        ("Mary rose. Mary spoke.", (), ()),  # a sentence may begin with any word
        ("Then Mary rose. He called Tom, and Mary too.", ("Mary",), ("he",)),  # Tom is named once
        ('"Come," said Mary\'s aunt to Mary. "But why?"', ("Mary",), ()),
        ("the Rose that Rose saw was a rose", (), ()),  # also in lower case
        ("on Monday and Monday, when Mr. Bell met Mr. Bell", (), ()),  # a full stop may end a sentence
        ("the NASA and the NASA of I and I", (), ()),
        ("her own, their own; It hit them", (), ("she", "they")),
        ("", (), ()),
    ],
)
def test_people_of_a_text(text, names, pronouns):
    assert find_people(text) == People(names, pronouns)


def test_mentions_of_people_of_another_text():
    people = People(("Mary", "Tom"), ("he",))
    text = "She gave Tom's hat to him, and his to Maryland."
    assert mentioned_people(people, text) == People(("Tom",), ("he",))
    assert [text[start:end] for start, end, _ in find_mentions(people, text)] == ["Tom", "him", "his"]
    assert not mentioned_people(people, "Someone else, she said.")
