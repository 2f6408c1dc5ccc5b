# SPDX-License-Identifier: Apache-2.0
"""Keys and values as a memory: every layer of the next window attends to positions of the windows before it.

Carried are the first positions of a document (attention sinks), far ones if there are any, and the most recent ones. In
the next window they stand in this order at the first positions, after an encoder's prefix, and the window's own tokens
follow them, as if all were one text. An encoder's window may also see the first positions of the one after it, which
stand behind its own tokens.

Shapes: B rows, L layers, heads with keys of size d, S carried positions: sinks, far, recent.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from transformers import PreTrainedConfig

from ..backbones.architectures import Architecture, architecture_of
from ..presets import DEFAULT_GROUP_WINDOWS, DEFAULT_SINKS, MAX_DEFAULT_WINDOW
from ..windows import WindowGroup
from .base import Dependency, MemoryConfig, WindowCost, WindowSize, is_int
from .kv_history import HistoryKVMemory
from .kv_memory import KVMemory
from .kv_slots import SlotSizes, slot_table
from .links import BlockLayout
from .selections.attention import AttentionSelection
from .selections.base import Selection
from .selections.dissimilar import DissimilarSelection
from .selections.lookup import LookupSelection
from .selections.merged import MergedSelection
from .slot_links import Send, SlotLinks, slot_links

SELECTIONS: dict[str, Callable[[], Selection]] = {
    "attention": AttentionSelection,
    "dissimilar": DissimilarSelection,
    "merged": MergedSelection,
    "lookup": LookupSelection,
}
GROUPS = {"merged": 4, "lookup": 32}  # positions that are selected together, by default; others are selected singly
ARCHIVE = 4096  # positions to look up, by default


@dataclass(frozen=True)
class KVMemoryConfig(MemoryConfig):
    """Keys and values of earlier positions. Nothing is computed twice.

    A model with rotary positions reads on across windows before any training, as if the text had not been cut there. A
    model with learned positions nearly does, with half a window carried; it needs positions for the window and for what
    is carried, and position offsets, which `add_recurrence` measures. An encoder's windows can also see what comes
    after them (`right`).

    Attributes:
        recent: most recent positions whose keys and values are carried. By default half a window, less the sinks.
        far: positions that are carried although they have left the recent ones. Not needed to read further back than a
            window, which `recent` does by itself.
        selection: which positions these are: "attention" (those that get most attention), "dissimilar" (whose keys are
            least like the others), "merged" (averages of neighbours), or "lookup" (groups of neighbours out of an
            archive, anew for every window).
        group: how many neighbours are averaged ("merged", by default 4) or looked up together ("lookup", 32).
        archive: for "lookup", how many positions are kept to be looked up; by default 4,096. The state grows by them,
            what a window attends to does not.
        sinks: attention sinks: initial positions of a document whose keys and values are always carried. Many models
            direct unneeded attention there. By default 4, or fewer in small windows.
        right: for encoders, how many first positions of its right neighbour a window sees in every layer, beside those
            that are carried from its left: by default as many.
        group_windows: with `right`, windows of a group, by default 16: windows see their right neighbours only inside
            their group, and its last window is read again as the first of the next one.
    """

    kind: ClassVar[str] = "kv"
    dependency: ClassVar[Dependency] = Dependency.SAME_LAYER_KV

    recent: int | None = None
    sinks: int | None = None
    far: int = 0
    selection: str = "attention"
    group: int | None = None
    archive: int | None = None
    right: int = 0
    group_windows: int | None = None

    def __post_init__(self) -> None:
        least_of = {"recent": 1, "sinks": 0, "far": 0, "group": 1, "archive": 1, "right": 0, "group_windows": 2}
        for name, least in least_of.items():
            value = getattr(self, name)
            optional = value is None and name not in ("far", "right")
            self._require(name, optional or (is_int(value) and value >= least), f"an integer from {least}")
        self._require("selection", self.selection in SELECTIONS, "one of " + ", ".join(map(repr, SELECTIONS)))
        for name, kinds in (("group", [*GROUPS]), ("archive", ["lookup"])):
            fits = self.selection in kinds and self.far > 0
            needed = f"left out: it needs far, and selection={' or '.join(map(repr, kinds))}"
            self._require(name, getattr(self, name) is None or fits, needed)
        self._require("group_windows", self.group_windows is None or self.right > 0, "left out: it needs right")
        self._require("far", not (self.far and self.right), "0: it cannot be combined with right")
        if self.selection == "lookup" and self.far:
            sizes = self.slot_sizes
            self._require("far", self.far % sizes.group == 0, f"a multiple of {sizes.group}, the positions of a group")
            valid = sizes.archive % sizes.group == 0 and sizes.archive >= self.far
            self._require("archive", valid, f"a multiple of {sizes.group}, the positions of a group, and at least far")

    def resolve(self, size: WindowSize) -> "KVMemoryConfig":
        stride = size.capacity - size.overlap
        default = min(self.right or size.window // 2, stride)  # positions carried in all
        sinks, recent = self.sinks, self.recent
        if sinks is None:
            room = default // 2 if recent is None or recent > stride or self.far else stride - recent
            sinks = max(min(DEFAULT_SINKS, default // 2, room), 0)
        if recent is None:
            if sinks >= max(default, 1):
                share = f"right={self.right}" if self.right else f"half a window ({default})"
                raise ValueError(
                    f"KVMemoryConfig: sinks={sinks} leaves nothing of {share} for recent positions. Give recent as "
                    "well, or fewer sinks."
                )
            recent = max(default - sinks, 1)
        group_windows = (self.group_windows or DEFAULT_GROUP_WINDOWS) if self.right else None
        return replace(self, recent=recent, sinks=sinks, group_windows=group_windows)

    def needs_history(self, size: WindowSize) -> bool:
        """All that is carried fits into what a window adds, or some of it comes from further back."""
        return self.far > 0 or self.carried > size.capacity - size.overlap

    @property
    def window_group(self) -> WindowGroup | None:
        return WindowGroup(self.group_windows or DEFAULT_GROUP_WINDOWS, self.right) if self.right else None

    @property
    def selects(self) -> bool:
        method = self.selection_method
        return method is not None and method.dynamic

    @property
    def scans(self) -> bool:
        method = self.selection_method
        return method is not None and method.scans

    def slot_links(self, block: BlockLayout, rotary: bool, send: Send) -> SlotLinks:
        return slot_links(slot_table(block, self.slot_sizes, self.selects), block.width, block.num_first, rotary, send)

    @property
    def carried(self) -> int:
        """Positions carried in all (after `resolve`)."""
        return self.slot_sizes.total

    @property
    def selection_method(self) -> Selection | None:
        """How far positions are selected; None if there are none."""
        return SELECTIONS[self.selection]() if self.far else None

    @property
    def slot_sizes(self) -> SlotSizes:
        """The positions carried, by kind (after `resolve`)."""
        group = (self.group or GROUPS.get(self.selection, 1)) if self.far else 1
        archive = 0
        if self.far and self.selection == "lookup":
            archive = self.archive or max(ARCHIVE // group * group, group, self.far)
        averaged = self.selection == "merged"
        return SlotSizes(self.sinks or 0, self.far, self.recent or 0, group, averaged, archive)

    def min_capacity(self, overlap: int, size: WindowSize) -> int:
        return overlap + (1 if self.needs_history(size) else max(1, self.carried, self.right))

    def default_window(self, usable: int) -> int:
        """Window and carried positions together fill the positions: of 512, a window of 341 with half of it carried. A
        window is no shorter than a quarter of the positions: short ones are slow."""
        if self.recent is None and not self.right:
            return min(MAX_DEFAULT_WINDOW, (2 * usable + 1) // 3)
        carried = self.right
        if self.recent is not None:
            carried = self.recent + self.far + (DEFAULT_SINKS if self.sinks is None else self.sinks)
        return min(MAX_DEFAULT_WINDOW, max(usable - carried - self.right, usable // 4, 1))

    @property
    def extra_positions(self) -> int:
        return self.carried + self.right

    @property
    def carried_positions(self) -> int:
        return self.carried

    def check_base(self, base: PreTrainedConfig) -> None:
        if self.right and architecture_of(base).causal:
            raise ValueError(
                f"KVMemoryConfig: right={self.right} lets windows see what comes after them, and {base.model_type} is "
                "causal: it predicts that. Leave right out; it is for encoders."
            )

    def state_shape(self, base: PreTrainedConfig, architecture: Architecture) -> tuple[int, ...]:
        """Layers, 2 (keys and values), heads, positions, size of a key."""
        heads, size = architecture.kv_heads(base)
        return base.num_hidden_layers, 2, heads, self.slot_sizes.stored, size

    def flops(self, cost: WindowCost) -> float:
        attended = 4 * cost.attention_width * (self.carried + self.right) * sum(cost.queries)
        selection = self.selection_method
        return attended + (0.0 if selection is None else selection.flops(cost, self.slot_sizes))

    def signature(self) -> str:
        sizes = self.slot_sizes
        far = f" + {self.far} far, {self.selection} {sizes.group}/{sizes.archive}" if self.far else ""
        right = f" + {self.right} right, groups of {self.group_windows}" if self.right else ""
        return f" ({self.sinks} sinks + {self.recent} recent{far}{right})"

    def describe(self) -> str:
        sinks = f" and the first {self.sinks}" if self.sinks else ""
        far = f" and {self.far} far ones ({self.selection})" if self.far else ""
        right = f", and of {self.right} that follow, in groups of {self.group_windows} windows" if self.right else ""
        return f"keys and values of the {self.recent} most recent positions{sinks}{far}{right}"

    def usage_note(self) -> str:
        return "Carried keys and values help without training, and more with it."

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        # Without right neighbours as before there were any, so that saved states still belong to their models.
        return {name: x for name, x in values.items() if self.right or name not in ("right", "group_windows")}

    def build(self, base: PreTrainedConfig, architecture: Architecture, size: WindowSize) -> KVMemory:
        memory = HistoryKVMemory if self.needs_history(size) else KVMemory
        shape = self.state_shape(base, architecture)
        return memory(self, shape, size.window, learned_positions=not architecture.rotary)
