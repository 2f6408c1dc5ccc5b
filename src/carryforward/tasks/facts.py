# SPDX-License-Identifier: Apache-2.0
"""Facts in books: people go from place to place, in sentences that are strewn among those of a text.

The rules are those of tasks 1 and 2 of bAbI (Weston et al. 2015, arXiv 1502.05698), and strewing facts among sentences
of books is from BABILong (Kuratov et al. 2024, arXiv 2406.10149); people, places, things and words are our own.

* Where is a person? Where they went last: one fact is needed.
* Where is a thing? Where the one who holds it is, or was when they put it down: two or more facts are needed.
"""

from typing import Any, ClassVar

import numpy as np

from .filler import Filler
from .text_task import Story, TextTask

PEOPLE = ("Tom", "Clara", "Hugo", "Nina", "Paul", "Ines")
PLACES = ("garden", "station", "forest", "school", "church", "island", "village", "tower")
THINGS = ("lantern", "letter", "coin", "basket")
GO = ("walked to", "set off for", "has come to", "hurried to")
TAKE = ("picked up", "took along")
DROP = ("put down", "left behind")
EVENTS = range(2, 11)  # in a story about people; twice as many in one about things


class Facts(TextTask):
    """Answer where a person or a thing is. Sizes count tokens.

    Attributes:
        about: "people", where one fact is needed, or "things", where two or more are.
    """

    name: ClassVar[str] = "facts"
    chance = 1 / len(PLACES)

    def __init__(self, tokenizer: Any, filler: Filler, *, about: str = "people"):
        if about not in ("people", "things"):
            raise ValueError(f"about={about!r} must be people or things.")
        super().__init__(tokenizer, filler)
        self.about = about

    def settings(self) -> dict[str, Any]:
        return {"about": self.about, "text": self.filler.name}

    def story(self, rng: np.random.Generator) -> Story:
        world = _World(rng)
        events = int(rng.integers(EVENTS.start, EVENTS.stop))
        if self.about == "people":
            for _ in range(events):
                world.go()
            return world.ask(world.people)
        while len(world.told) < 2 * events or not world.things:
            (world.go, world.take, world.drop)[rng.integers(3)]()
        return world.ask(world.things)


class _World:
    """Who and what is where, and which facts say so.

    Attributes:
        told: the facts so far.
        people, things: the place of each, and the first fact that it needs.
        holder: who holds a thing.
    """

    def __init__(self, rng: np.random.Generator):
        self.rng = rng
        self.told: list[str] = []
        self.people: dict[str, tuple[str, int]] = {}
        self.things: dict[str, tuple[str, int]] = {}
        self.holder: dict[str, str] = {}
        self.taken: dict[str, int] = {}  # the fact that says so

    def go(self) -> None:
        """Somebody goes to another place, with all they hold."""
        person = self._one_of(PEOPLE)
        place = self._one_of([place for place in PLACES if place != self.people.get(person, ("", 0))[0]])
        self.people[person] = place, len(self.told)
        for thing, holder in self.holder.items():
            if holder == person:
                self.things[thing] = place, self.taken[thing]
        self.told.append(f"{person} {self._one_of(GO)} the {place}.")

    def take(self) -> None:
        """Somebody whose place is known takes a thing that lies there, or that nobody has mentioned."""
        pairs = [(person, thing) for person, (place, _) in self.people.items() for thing in THINGS
                 if thing not in self.holder and self.things.get(thing, (place, 0))[0] == place]  # fmt: skip
        if pairs:
            person, thing = pairs[self.rng.integers(len(pairs))]
            place, arrived = self.people[person]
            self.holder[thing], self.taken[thing] = person, len(self.told)
            self.things[thing] = place, arrived
            self.told.append(f"{person} {self._one_of(TAKE)} the {thing}.")

    def drop(self) -> None:
        """Somebody puts down a thing that they hold."""
        if self.holder:
            thing = self._one_of([*self.holder])
            person = self.holder.pop(thing)
            place, arrived = self.people[person]
            self.things[thing] = place, arrived
            self.told.append(f"{person} {self._one_of(DROP)} the {thing}.")

    def ask(self, known: dict[str, tuple[str, int]]) -> Story:
        """Where one of those that are known is."""
        name = self._one_of([*known])
        place, needed = known[name]
        subject = name if known is self.people else f"the {name}"
        return Story(self.told, f" Question: Where is {subject}? Answer: the", f" {place}", needed)

    def _one_of(self, names: Any) -> str:
        return names[int(self.rng.integers(len(names)))]
