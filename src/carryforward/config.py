# SPDX-License-Identifier: Apache-2.0
"""The configs: `RecurrenceConfig` (the method) and `RecurrentModelConfig` (the method and the base model).

A recurrence is a window, an overlap and one or several memories. Each kind of memory has a config class with its own
fields (`memories`). `RecurrentModelConfig` is what `save_pretrained` writes. It holds the base model's own config, so
that `AutoModel...from_pretrained` finds everything in one file.
"""

import dataclasses
import reprlib
from dataclasses import dataclass
from typing import Any, Literal

from transformers import AutoConfig, PreTrainedConfig
from transformers.utils import logging

from . import windows
from .backbones.architectures import ARCHITECTURES, STORED_AS, Architecture, architecture_of, unsupported_type
from .memories.base import Dependency, MemoryConfig, WindowSize, check_fields, is_int
from .memories.kinds import MemoryChoice, owner_hint, parse_memory
from .memories.links import BlockLayout
from .memories.slot_links import Send, SlotLinks
from .windows import WindowGroup

logger = logging.get_logger(__name__)

_GRADIENT_FIELDS = ("bptt_windows", "block_windows", "keep_windows", "keep_graph", "offload_states")


@dataclass(frozen=True, eq=False)
class RecurrenceConfig:
    """The recurrence that is added to a base model. The default memory is the recommended one, keys and values.

    Attributes:
        window: tokens read at once, T. An encoder's special tokens count too.
        overlap: document tokens that consecutive windows share, in training and unless a call says otherwise.
        memory: what passes from a window to the next: "kv", "vector", "tokens", "associative", a memory config, or a
            list of these. `memories` has the configs with all defaults filled in.
        prefix, suffix: special tokens around every window of an encoder; `add_recurrence(tokenizer=...)` finds them.
        separator: special tokens between a question and the document, likewise.
        bptt_windows: truncated BPTT: detach the state after every so many windows from the document's start; None never
            does. With 1 every state is detached, and the memory's parameters are not trained; only, if carried keys and
            values reach further than one window, the offsets of the positions at which a window sees them. Where
            windows see their right neighbours, only states between groups are detached: the first one after every so
            many windows.
        block_windows: how many windows of each row run side by side in training, where windows need not wait for each
            other: with carried keys and values, or without a state. Faster, and memory grows with their number. "auto"
            chooses as many as memory allows and speed gains from. Without gradients a block has a fixed number of
            tokens instead. Where windows see their right neighbours, a block has those of a group at least.
        keep_windows: how many of a sample's newest windows keep their activations for the backward pass instead of
            being recomputed: faster, and memory grows with their number. "auto" keeps as many as memory allows.
        keep_graph: let autograd keep the graph of all windows, as it does for other models: for hooks on gradients and
            other tools that inspect the graph.
        offload_states: keep the states of a sample's windows in host memory between the two passes; for very long
            samples with large states.
    """

    window: int = 300
    overlap: int = 0
    memory: MemoryChoice = "kv"
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    separator: tuple[int, ...] = ()
    bptt_windows: int | None = None
    block_windows: int | Literal["auto"] = "auto"
    keep_windows: int | Literal["auto"] = "auto"
    keep_graph: bool = False
    offload_states: bool = False

    def __new__(cls, *args: Any, **values: Any) -> "RecurrenceConfig":
        check_fields(cls, values, owner_hint)  # a dataclass would raise a TypeError without the known fields
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("prefix", "suffix", "separator"):
            self._require(name, isinstance(getattr(self, name), list | tuple), "a list of token ids")
            object.__setattr__(self, name, tuple(getattr(self, name)))
            self._require(name, all(is_int(n) and n >= 0 for n in getattr(self, name)), "token ids")
        self._require("window", is_int(self.window) and self.window >= 1, "an integer of at least 1")
        self._require("overlap", is_int(self.overlap), "an integer of at least 0")
        depth = self.bptt_windows
        self._require("bptt_windows", depth is None or (is_int(depth) and depth >= 1), "None or at least 1")
        block = self.block_windows
        self._require("block_windows", block == "auto" or (is_int(block) and block >= 1), 'a number from 1, or "auto"')
        keep = self.keep_windows
        self._require("keep_windows", keep == "auto" or (is_int(keep) and keep >= 0), 'a number from 0, or "auto"')
        for name in ("keep_graph", "offload_states"):
            self._require(name, isinstance(getattr(self, name), bool), "True or False")
        capacity = windows.check(self.window, self.overlap, len(self.prefix), len(self.suffix))
        size = WindowSize(self.window, capacity, self.overlap)
        object.__setattr__(self, "_size", size)
        object.__setattr__(self, "memory", parse_memory(self.memory))
        object.__setattr__(self, "_memories", tuple(memory.resolve(size) for memory in self.memory))  # type: ignore[union-attr]
        self.check_capacity(capacity, self.overlap)
        self._check_blocks()

    @property
    def memories(self) -> tuple[MemoryConfig, ...]:
        """The memory configs, with defaults that depend on the window filled in."""
        return self._memories  # type: ignore[attr-defined]  # set in `__post_init__`

    @property
    def size(self) -> WindowSize:
        """The sizes that memories must fit."""
        return self._size  # type: ignore[attr-defined]  # set in `__post_init__`

    def __eq__(self, other: object) -> bool:
        return isinstance(other, RecurrenceConfig) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash((self.window, self.overlap, self.memories))

    def find(self, kind: str) -> Any:
        """The config of a kind of memory; None if the recurrence does not have it."""
        return next((memory for memory in self.memories if memory.kind == kind), None)

    @property
    def dependency(self) -> Dependency:
        """How windows depend on each other."""
        return max(memory.dependency for memory in self.memories)

    @property
    def needs_history(self) -> bool:
        """Whether windows are told how much of their document was read; see `MemoryConfig.needs_history`."""
        return any(memory.needs_history(self.size) for memory in self.memories)

    @property
    def window_group(self) -> WindowGroup | None:
        """The groups in which windows see their right neighbours, if they do; see `MemoryConfig.window_group`."""
        return next((memory.window_group for memory in self.memories if memory.window_group), None)

    @property
    def writes_behind(self) -> bool:
        """Whether a memory puts positions behind windows that pass their state on; see `MemoryConfig`."""
        return any(memory.writes_behind for memory in self.memories)

    @property
    def scans(self) -> bool:
        """Whether a memory selects window by window."""
        return any(memory.scans for memory in self.memories)

    def slot_links(self, block: BlockLayout, rotary: bool, send: Send) -> SlotLinks | None:
        """Where the windows of a block find what they receive, if a memory needs their history."""
        memories = (memory for memory in self.memories if memory.needs_history(self.size))
        return next((memory.slot_links(block, rotary, send) for memory in memories), None)

    @property
    def extra_positions(self) -> int:
        """Positions of the base model that memories take beside those of the window."""
        return sum(memory.extra_positions for memory in self.memories)

    @property
    def memory_positions(self) -> int:
        """Those of them in front of a full window's tokens and behind them."""
        return sum(memory.memory_positions for memory in self.memories)

    def pooled(self, capacity: int, overlap: int) -> int:
        """How many document tokens of a window are pooled when it is read at an overlap: the pooled tokens reach as far
        past the start of the next window as they did in training (footnote 3 of the paper)."""
        return min(capacity, capacity - overlap + self.overlap)

    def min_capacity(self, overlap: int) -> int:
        """Document tokens that a window needs at least when read at an overlap."""
        return max(memory.min_capacity(overlap, self.size) for memory in self.memories)

    def check_capacity(self, capacity: int, overlap: int) -> None:
        """Refuse an overlap at which windows with so many document tokens have too little to carry."""
        if overlap and self.window_group:
            raise ValueError(
                f"overlap={overlap} must be 0: windows see {self.window_group.right} positions of their right "
                "neighbours, and nothing is read twice. Leave it out, or leave right out of the memory."
            )
        for memory in self.memories:
            needed = memory.min_capacity(overlap, self.size)
            if capacity < needed:
                trained = f" (trained at {self.overlap})" if overlap != self.overlap else ""
                raise ValueError(
                    f"overlap={overlap}{trained}: a window has {capacity} document tokens and needs {needed} to carry "
                    f"{memory.describe()}. Use a smaller overlap, a larger window, or carry less."
                )

    def _check_blocks(self) -> None:
        """Refuse a memory that needs blocks beside one whose windows wait for each other."""
        group = self.window_group
        if group and self.dependency > Dependency.SAME_LAYER_KV:
            raise ValueError(
                f"memory: windows that see {group.right} positions of their right neighbours run side by side, and "
                f"with {', '.join(repr(memory.kind) for memory in self.memories)} they wait for each other. Leave "
                'right out, or use memory="kv" alone.'
            )
        if group and self.needs_history:
            raise ValueError(
                f"memory: {self.describe()} reach further back than one window. With right={group.right}, carry at "
                f"most the {self.size.capacity} document tokens of a window."
            )
        if self.needs_history and self.dependency > Dependency.SAME_LAYER_KV:
            (far,) = (memory for memory in self.memories if memory.needs_history(self.size))
            raise ValueError(
                f"memory: {far.describe()} reach further back than one window, which cannot stand beside another kind "
                f"of memory. Carry at most {self.size.capacity - self.overlap} positions in all and no far ones, or "
                'use memory="kv" alone.'
            )

    def describe(self) -> str:
        """What is carried, in words."""
        return "; ".join(memory.describe() for memory in self.memories)

    def usage_note(self) -> str:
        """What to expect of the memory, in a sentence or two."""
        return " ".join(memory.usage_note() for memory in self.memories)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {**values, "memory": [memory.to_dict() for memory in self.memories]}

    def state_settings(self) -> dict[str, Any]:
        """The settings that decide what a state means: all but those of how gradients are computed."""
        return {name: value for name, value in self.to_dict().items() if name not in _GRADIENT_FIELDS}

    def _require(self, name: str, valid: bool, accepted: str) -> None:
        if not valid:
            raise ValueError(f"RecurrenceConfig: {name}={getattr(self, name)!r} must be {accepted}.")


def default_window(base: PreTrainedConfig, memory: MemoryChoice) -> int:
    """A window that leaves room for what is carried and for memory positions among those that a base model can use."""
    architecture = architecture_of(base)
    # A causal layer with a sliding window never attends further. (An encoder's window slides to both sides.)
    limits = [limit for limit in architecture.sliding_windows(base) if limit is not None and architecture.causal]
    configs = parse_memory(memory)
    usable = min([architecture.max_positions(base), *limits]) - sum(config.memory_positions for config in configs)
    return max(min(config.default_window(usable) for config in configs), 1)


def _of_base(name: str) -> Any:
    """An attribute of the base model's config, which other libraries look for in a model's config."""

    def put(config: Any, value: Any) -> None:
        if config.base_config is not None:
            setattr(config.base_config, name, value)

    return property(lambda config: getattr(config.base_config, name), put)


class RecurrentModelConfig(PreTrainedConfig):
    """The config of a recurrent model: its base model's config and its recurrence.

    Attributes:
        use_state: False records that windows were trained alone; a question-answering model then reads them so.
        tokenizer_fingerprint: of the tokenizer that was saved with the model, if any.
        initial_memory: by kind of memory that must be trained, the fingerprint of its weights before training.
        verified: the version of transformers and the digest of the model's source with which the base model was
            verified (`models.verification`), if it was.
    """

    model_type = "carryforward"
    sub_configs = {"base_config": AutoConfig}
    # `Trainer` must not gather these over an evaluation: they do not have one row per token.
    keys_to_ignore_at_inference = ["past_key_values", "state", "nll_sum", "n_scored", "emitted"]

    base_config: PreTrainedConfig = None  # type: ignore[assignment]  # read from a file, these two are dicts at first
    recurrence: RecurrenceConfig = None  # type: ignore[assignment]
    use_state: bool = True
    tokenizer_fingerprint: str | None = None
    initial_memory: dict[str, str] | None = None
    verified: dict[str, str] | None = None

    vocab_size = _of_base("vocab_size")
    hidden_size = _of_base("hidden_size")
    num_hidden_layers = _of_base("num_hidden_layers")
    num_attention_heads = _of_base("num_attention_heads")
    tie_word_embeddings = _of_base("tie_word_embeddings")

    def __post_init__(self, **kwargs: Any) -> None:
        self.base_config = _base_config(self.base_config)
        if self.base_config is not None:  # transformers makes an empty one to compare defaults with
            self.recurrence = RecurrenceConfig() if self.recurrence is None else self.recurrence
            for name in ("id2label", "label2id", "problem_type"):
                if getattr(self, name) is None:
                    setattr(self, name, getattr(self.base_config, name))
            for name in ("attn_implementation", "experts_implementation"):  # would be reset in the base config too
                kwargs.setdefault(name, getattr(self.base_config, f"_{name}"))
            self.check()
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Refuse a recurrence that does not fit the base model. It may be a dict: from a file, or given on loading."""
        if isinstance(self.recurrence, dict):
            self.recurrence = RecurrenceConfig(**self.recurrence)
        if not isinstance(self.recurrence, RecurrenceConfig):
            raise ValueError(f"recurrence={reprlib.repr(self.recurrence)} must be a RecurrenceConfig, or its fields.")
        if not isinstance(self.use_state, bool):
            raise ValueError(f"use_state={reprlib.repr(self.use_state)} must be True or False.")
        _check_fit(self.recurrence, self.base_config, self.architecture)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The config of a file. Defaults would make another model of it: what is missing is refused."""
        for name in ("base_config", "recurrence"):
            if config_dict.get(name) is None and kwargs.get(name) is None:
                raise ValueError(f"config.json has no {name}, which a recurrent model must have.")
        return super().from_dict(config_dict, **kwargs)

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoConfig") -> None:
        """Called when a model is loaded by its loader, which is then saved again; not this module."""

    @property
    def architecture(self) -> Architecture:
        """The structure of the base model."""
        return architecture_of(self.base_config)

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        return self.base_config if self.base_config is not None else self

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        if isinstance(self.recurrence, RecurrenceConfig):
            output["recurrence"] = self.recurrence.to_dict()
            output["tie_word_embeddings"] = self.tie_word_embeddings  # peft looks for it here
        return output


def _base_config(value: Any) -> Any:
    """The base model's config, from a config, its values, or None."""
    if value is None or isinstance(value, PreTrainedConfig):
        return value
    model_type = value.get("model_type") if isinstance(value, dict) else None
    if not isinstance(model_type, str):
        raise ValueError(f"base_config={reprlib.repr(value)} must be the config of a base model, with its model_type.")
    if model_type not in ARCHITECTURES and not value.get(STORED_AS):
        raise ValueError(unsupported_type(model_type))
    return AutoConfig.for_model(**value)


def _check_fit(recurrence: RecurrenceConfig, base: PreTrainedConfig, architecture: Architecture) -> None:
    """Refuse a recurrence that the base model cannot have.

    Learned positions end: more of them are refused. Rotary positions do not, and models differ in how far they read
    beyond those they were trained on. So this is a warning, once, as where transformers' `generate` exceeds a model's
    length: the user may train the model, or may have measured that it works.
    """
    for memory in recurrence.memories:
        memory.check_base(base)
    if recurrence.memory_positions and not architecture.takes_embeddings:
        raise ValueError(
            f"memory: {recurrence.describe()} pass through the model as embeddings, which {base.model_type} does not "
            'read as it reads token ids. Use memory="kv" or memory="vector".'
        )
    if architecture.causal and (recurrence.prefix or recurrence.suffix):
        raise ValueError(f"prefix and suffix are for encoders; {base.model_type} is causal. Leave them empty.")
    special = (*recurrence.prefix, *recurrence.separator, *recurrence.suffix)
    unknown = [token for token in special if token >= base.vocab_size]
    if unknown:
        raise ValueError(f"prefix, separator or suffix hold {unknown[0]}; token ids end at {base.vocab_size - 1}.")
    positions, extra = architecture.max_positions(base), recurrence.extra_positions
    if recurrence.window + extra <= positions:
        return
    around = recurrence.memory_positions
    where = "carried in front of it" if recurrence.window_group is None else "of its neighbours on both sides"
    parts = [f"{extra - around} positions {where}"] * (extra > around)
    parts += [f"{around} memory positions"] * (around > 0)
    carried = f" with {' and '.join(parts)}" * (extra > 0)
    if not architecture.positions_end:
        logger.warning_once(
            "window=%d%s exceeds the %d positions that %s was trained on. Rotary positions reach further, but the "
            "model has not seen them: predictions may become worse. Train the model, or use a smaller window%s.",
            recurrence.window, carried, positions, base.model_type, " or reach" * (extra > around),
        )  # fmt: skip
        return
    raise ValueError(
        f"window={recurrence.window}{carried} exceeds the {positions} {architecture.kind_of_positions} that "
        f"{base.model_type} has. {_fitting_advice(recurrence, base, positions)}."
    )


def _fitting_advice(recurrence: RecurrenceConfig, base: PreTrainedConfig, positions: int) -> str:
    """What to change of a recurrence that takes more positions than there are."""
    window, around = _fitting_window(recurrence, base, positions), recurrence.memory_positions
    if window is not None:
        fewer = ", or fewer memory tokens" * (around > 0)
        return f"Use window={window} or less{fewer}; the state carries what lies further back"
    if around == recurrence.extra_positions:
        return f"Use fewer memory tokens, which take {around} of them"
    room = positions - recurrence.window - around
    return f"Carry at most {room} positions" if room > 0 else "Carry fewer positions, with a smaller window"


def _fitting_window(recurrence: RecurrenceConfig, base: PreTrainedConfig, positions: int) -> int | None:
    """A window that fits the base model's positions together with what is carried; None if no window does."""
    if not recurrence.extra_positions:
        return positions
    window = default_window(base, recurrence.memory)
    try:
        smaller = dataclasses.replace(recurrence, window=window)
    except ValueError:
        return None
    return window if window + smaller.extra_positions <= positions else None
