# SPDX-License-Identifier: Apache-2.0
"""What is measured: plain models at several windows and overlaps, and models that carry keys and values.

An arm is data. A selection with fields of its own is one more entry of `SELECTIONS`.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

SELECTIONS: dict[str, dict[str, Any]] = {"attention": {}, "dissimilar": {}, "merged": {}, "lookup": {}}  # and fields
GROUPS = {"merged": 4, "lookup": 32}  # positions that are selected together: up to so many less one wait for that
SINKS = 4
BOOKS, LONG = "books", "long"  # the first tokens of many books; one long book


@dataclass(frozen=True, eq=False)
class Arm:
    """A plain model, or one that carries keys and values, and how it reads.

    Attributes:
        window, overlap: in tokens. A plain window longer than the documents is as long as they are.
        memory: fields of `KVMemoryConfig`; None for a plain model.
        text: which tokens it reads.
        control: measure it with the state removed, too.
        depths: measure the gain of a state that comes from only so many windows.
    """

    window: int
    overlap: int = 0
    memory: dict[str, Any] | None = None
    text: str = BOOKS
    control: bool = False
    depths: bool = False
    kind: str = field(init=False)
    name: str = field(init=False)

    def __post_init__(self) -> None:
        far = self.memory is not None and self.memory.get("far", 0) > 0
        kind = "plain" if self.memory is None else self.memory["selection"] if far else "recent"
        parts = [kind, f"{self.window}", self.size if self.memory else f"{self.overlap}"]
        parts += [self.text] if self.text != BOOKS else []
        object.__setattr__(self, "kind", kind)
        object.__setattr__(self, "name", "-".join(parts))

    @property
    def size(self) -> str:
        """What is carried: recent, far, other fields, sinks."""
        memory = self.memory or {}
        known = ("recent", "far", "sinks", "selection")
        more = [f"{name}{value}" for name, value in memory.items() if name not in known]
        far = [f"{memory['far']}"] if memory.get("far") else []
        return "+".join([f"{memory['recent']}", *far, *more, f"{memory['sinks']}"])

    def fields(self) -> dict[str, Any]:
        """As results record it."""
        return asdict(self)


@dataclass(frozen=True)
class Setting:
    """A base model and its arms.

    Attributes:
        title: of the base model.
        start, goal: the arms between which shares of the way are measured.
        goal_title: of the goal.
        arms: in the order of measuring.
    """

    title: str
    start: str
    goal: str
    goal_title: str
    arms: tuple[Arm, ...]


def plain(windows: dict[int, Iterable[int]]) -> list[Arm]:
    """Plain windows and their overlaps."""
    return [Arm(window, overlap) for window, overlaps in windows.items() for overlap in overlaps]


def recent(window: int, sizes: Iterable[int], *, control: int = 0, depths: Iterable[int] = ()) -> list[Arm]:
    """Most recent positions and sinks.

    Args:
        sizes: how many recent positions.
        control, depths: the sizes that are measured with the state removed, and by depth.
    """
    return [
        Arm(window, memory={"recent": size, "sinks": SINKS}, control=size == control, depths=size in depths)
        for size in sizes
    ]


def far(window: int, splits: Iterable[tuple[int, int]], *, most: int | None = None, depths: bool = False) -> list[Arm]:
    """Every selection at several splits into recent and far positions.

    Args:
        splits: recent and far positions.
        most: slots there may be in all, for models with learned positions.
        depths: measure the first split by depth.
    """
    arms = []
    for i, (near, distant) in enumerate(splits):
        for selection, fields in SELECTIONS.items():
            group = fields.get("group") or GROUPS.get(selection, 1)
            room = (distant if most is None else min(distant, most - SINKS - near)) - (group - 1)
            room -= room % group if selection == "lookup" else 0
            memory = {"recent": near, "far": room, "selection": selection, "sinks": SINKS, **fields}
            arms.append(Arm(window, memory=memory, depths=depths and i == 0))
    return arms


def streaming(window: int, size: int) -> list[Arm]:
    """StreamingLLM (Xiao et al. 2023, arXiv 2309.17453): recent positions of one long book, with and without sinks."""
    carried = [Arm(window, memory={"recent": size, "sinks": sinks}, text=LONG) for sinks in (0, SINKS)]
    return [Arm(window, text=LONG), *carried]


SMOLLM2 = Setting(
    title="SmolLM2-135M, rotary positions",
    start="recent-300-146+4",
    goal="plain-8192-0",
    goal_title="all tokens at once",
    arms=(
        *plain({300: (0, 50, 150, 200), 600: (0, 100, 300, 400), 1024: (0, 512), 2048: (0, 1024), 4096: (0, 2048)}),
        *plain({8192: (0,)}),
        *recent(300, (146, 296, 446, 596, 796, 896, 1196, 1796), control=146, depths=(146, 596, 1796)),
        *far(300, ((296, 300), (146, 450), (596, 600)), depths=True),
        *recent(600, (596, 1196), control=596),
        *recent(150, (146, 296, 596), control=146),
        *streaming(300, 296),
    ),
)  # fmt: skip

BUNDLED = Setting(
    title="the bundled model, learned positions, 512 of them",
    start="recent-300-146+4",
    goal="plain-512-341",
    goal_title="plain windows of 512 with an overlap of 341",
    arms=(
        *plain({300: (0, 50, 150, 200), 512: (0, 85, 256, 341), 200: (0, 33, 100, 133), 128: (0, 21, 64, 85)}),
        *recent(300, (146, 208), control=146, depths=(146, 208)),
        *far(300, ((104, 104),), most=212, depths=True),
        *recent(200, (146, 308), control=308),
        *far(200, ((154, 154),), most=312),
        *recent(128, (124, 380), control=380),
        *far(128, ((190, 190),), most=384),
        *streaming(300, 208),
    ),
)  # fmt: skip

SETTINGS = {"smollm2": SMOLLM2, "bundled": BUNDLED}
