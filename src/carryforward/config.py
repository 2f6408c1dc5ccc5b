# SPDX-License-Identifier: Apache-2.0
"""What a recurrent model is made of: `RecurrenceConfig` (the method) and `RecurrentModelConfig` (method + base model).

`RecurrenceConfig` is the paper's section 3.1 with the alternatives its authors tried, one field each; the defaults
are the paper's. `RecurrentModelConfig` is what `save_pretrained` writes: it holds the base model's own config, so
that `AutoModel...from_pretrained` finds everything in one file.
"""

import dataclasses
import difflib
import logging
from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import AutoConfig, PreTrainedConfig

from . import windows
from .backbones.architectures import Architecture, architecture_of

logger = logging.getLogger(__name__)

Pooling = Literal["mean", "max", "attention"]
PooledLayers = Literal["all", "last", "below"]
PRESETS = ("paper", "kept")
SINKS = 4  # of the preset "kept"
_POOLED = ("pooling", "pooled_layers", "hidden_sizes", "residual", "insert_at", "state_per_layer", "init_std")


@dataclass(frozen=True)
class RecurrenceConfig:
    """The recurrence that is added to a base model. The defaults are the paper's language models.

    Attributes:
        window: tokens read at once, T; for an encoder its special tokens count too.
        overlap: document tokens that consecutive windows share, in training and unless a call says otherwise.
        pooling: how the positions of a window become a vector: "mean" (equation 1), "max", or "attention" with
            learned fixed keys.
        pooled_layers: "all" layers' outputs, mixed with learned softmax weights (equation 1); the "last" one's; or, for
            each insertion layer, those of the layer "below" it, which are its own input: each then has its own state.
        slots: vectors carried. "mean" and "max" pool as many equal stretches; "attention" has as many keys. With 0,
            which needs `kept`, nothing is pooled.
        kept: newest positions whose keys and values are carried as well: every layer of the next window sees them
            again, moved to where they stood. Nothing is computed twice, and a model with rotary positions reads on
            before any training as if the text had not been cut there. One with learned positions nearly does, once
            `measure_position_offsets` has seen some text, with half a window (a few positions do harm before they are trained);
            it needs positions for the window and what is kept.
        sinks: first positions of a document whose keys and values are carried with `kept`, to every window: there many
            models park the attention that is of no use. (Of what is read after a piece without state, if there was.)
        hidden_sizes: hidden layers of the feed-forward network.
        residual: add what was pooled to what the network makes of it, which starts at zero. So before any training the
            carried vectors are hidden states, which the layer above those that were pooled can read.
        insert_at: the layer the state enters (ℓ_ins, counted from 1), a list of layers, or "all" (from the second on
            where the layers below are pooled).
        state_per_layer: with several insertion layers, whether each has a feed-forward network and so a state of its
            own, rather than one state shared by all.
        prefix, suffix: special tokens around every window of an encoder; `add_recurrence(tokenizer=...)` finds them.
        separator: special tokens between a question and the document, likewise.
        bptt_windows: detach the state after every so many windows from the document's start; None never does. With 1
            every state is detached, and the recurrence module is not trained at all.
        keep_windows: how many of a sample's newest windows keep their activations for the backward pass instead of
            being run again: faster, and memory grows with their number. "auto" keeps as many as there is memory for.
            A number is also how many windows of a sample run side by side when training without a state.
        keep_graph: let autograd keep the graph of all windows, as it does for other models: for hooks on gradients and
            whatever else looks into it.
        offload_states: keep the states of a sample's windows in the host's memory between the two passes; for very
            long samples with many slots.
        init_std: standard deviation of the last linear layer's weights (and of attention pooling's keys) at the start.
    """

    window: int = 300
    overlap: int = 0
    pooling: Pooling = "mean"
    pooled_layers: PooledLayers = "all"
    slots: int = 1
    kept: int = 0
    sinks: int = 0
    hidden_sizes: tuple[int, ...] = (200, 200, 200)
    residual: bool = False
    insert_at: int | tuple[int, ...] | Literal["all"] = 2
    state_per_layer: bool = False
    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    separator: tuple[int, ...] = ()
    bptt_windows: int | None = None
    keep_windows: int | Literal["auto"] = "auto"
    keep_graph: bool = False
    offload_states: bool = False
    init_std: float = 0.02

    def __new__(cls, *args: Any, **fields: Any) -> "RecurrenceConfig":
        # A dataclass would answer a misspelt field with a TypeError that does not say what exists.
        known = [field.name for field in dataclasses.fields(cls)]
        for name in fields:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                hint = f" Did you mean {close[0]!r}?" if close else ""
                raise ValueError(f"RecurrenceConfig has no field {name!r}.{hint} Its fields are: {', '.join(known)}.")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        for name in ("hidden_sizes", "prefix", "suffix", "separator"):
            _require(self, name, isinstance(getattr(self, name), list | tuple), "a list of integers")
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.insert_at, list):
            object.__setattr__(self, "insert_at", tuple(self.insert_at))
        for name in ("kept", "sinks"):
            _require(self, name, _is_int(getattr(self, name)) and getattr(self, name) >= 0, "an integer of at least 0")
        _require(self, "sinks", self.kept > 0 or self.sinks == 0, "0 without `kept`")
        for name, least in (("window", 1), ("slots", 0 if self.kept else 1)):
            value = getattr(self, name)
            without = " without `kept`" if (name, least) == ("slots", 1) else ""
            _require(self, name, _is_int(value) and value >= least, f"an integer of at least {least}{without}")
        _require(self, "overlap", _is_int(self.overlap), "an integer of at least 0")
        for name, choices in (("pooling", get_args(Pooling)), ("pooled_layers", get_args(PooledLayers))):
            _require(self, name, getattr(self, name) in choices, "one of " + ", ".join(map(repr, choices)))
        _require(self, "hidden_sizes", all(_is_int(n) and n >= 1 for n in self.hidden_sizes), "positive integers")
        for name in ("prefix", "suffix", "separator"):
            _require(self, name, all(_is_int(n) and n >= 0 for n in getattr(self, name)), "token ids")
        layers: tuple[Any, ...] = self.insert_at if isinstance(self.insert_at, tuple) else (self.insert_at,)
        valid = self.insert_at == "all" or (
            bool(layers) and len(set(layers)) == len(layers) and all(_is_int(n) and n >= 1 for n in layers)
        )
        _require(self, "insert_at", valid, 'a layer number from 1, a list of different ones, or "all"')
        if self.pooled_layers == "below":
            _require(self, "insert_at", 1 not in layers, "at least 2 with pooled_layers='below': nothing is below 1")
        depth = self.bptt_windows
        _require(self, "bptt_windows", depth is None or (_is_int(depth) and depth >= 1), "None or at least 1")
        kept = self.keep_windows
        _require(self, "keep_windows", kept == "auto" or (_is_int(kept) and kept >= 0), 'a number from 0, or "auto"')
        _require(self, "init_std", self.init_std >= 0, "0 or more")
        room = windows.check(self.window, self.overlap, len(self.prefix), len(self.suffix))
        _require(self, "slots", self.slots <= room, f"at most {room}, the document tokens of a window")
        left = room - self.overlap - self.sinks  # or a document's first positions would be seen twice
        _require(self, "kept", self.kept <= left, f"at most {left}: by so many is a window ahead, less `sinks`")

    @classmethod
    def preset(cls, name: str, **fields: Any) -> "RecurrenceConfig":
        """A recurrence by name, with fields on top of it.

        Args:
            name: "paper", the paper's: one vector, pooled from all layers, enters the second. Or "kept", which pools
                nothing and carries the keys and values of half a window: the newest positions and a document's first
                four. It is of use before any training, with learned positions after `measure_position_offsets`.
        """
        if name not in PRESETS:
            raise ValueError(f"RecurrenceConfig has no preset {name!r}. There are: {', '.join(map(repr, PRESETS))}.")
        if name == "kept":
            others = {key: value for key, value in fields.items() if key in ("window", "overlap", "prefix", "suffix")}
            plain = cls(**others)  # which checks them
            ahead = plain.window - len(plain.prefix) - len(plain.suffix) - plain.overlap
            half = min(plain.window // 2, ahead)
            sinks = fields.get("sinks", min(SINKS, half // 2))
            if not _is_int(sinks) or sinks < 0:
                raise _wrong("sinks", sinks, "an integer of at least 0")
            if fields.get("kept") == 0:
                raise ValueError("preset 'kept' with kept=0 would carry nothing. Leave kept out, or use 'paper'.")
            if "kept" not in fields and sinks >= max(half, 1):
                raise ValueError(
                    f"sinks={sinks} leaves nothing of the half window ({half}) to keep. Give kept as well."
                )
            useless = [key for key in fields if key in _POOLED and not fields.get("slots")]
            if useless:
                told = ", ".join(useless)
                raise ValueError(
                    f"{told} is about what is pooled, and preset 'kept' pools nothing: give slots as well."
                )
            fields = {"slots": 0, "kept": max(half - sinks, 1), "sinks": sinks, **fields}
        return cls(**fields)

    @property
    def seen(self) -> int:
        """Earlier positions whose keys and values a window sees."""
        return self.kept + self.sinks

    def pooled(self, room: int, overlap: int) -> int:
        """How many document tokens of a window that has so many are pooled, when it is read at some overlap: the state
        runs as far ahead of the next window as it did in training (footnote 3)."""
        return min(room, room - overlap + self.overlap)

    @property
    def separate(self) -> bool:
        """Whether each insertion layer has a network and a state of its own."""
        return self.state_per_layer or self.pooled_layers == "below"

    def insertion_layers(self, num_layers: int) -> tuple[int, ...]:
        """The layers the pooled state enters, counted from 1, in order."""
        if not self.slots:
            return ()
        if self.insert_at == "all":
            return tuple(range(2 if self.pooled_layers == "below" else 1, num_layers + 1))
        layers: Any = (self.insert_at,) if isinstance(self.insert_at, int) else self.insert_at
        return tuple(sorted(layers))


def _of_base(name: str) -> Any:
    """An attribute of the base model's config, where other libraries look for it."""

    def put(config: Any, value: Any) -> None:
        if config.base_config is not None:
            setattr(config.base_config, name, value)

    return property(lambda config: getattr(config.base_config, name), put)


class RecurrentModelConfig(PreTrainedConfig):
    """The composite config of a recurrent model: its base model's config and its recurrence.

    Attributes:
        use_state: False says that windows were trained alone, and makes that the default of a question-answering model.
    """

    model_type = "carryforward"
    sub_configs = {"base_config": AutoConfig}
    # What `Trainer` must not gather over an evaluation: these do not have one row per token.
    keys_to_ignore_at_inference = ["past_key_values", "state", "nll_sum", "n_scored", "emitted"]

    base_config: PreTrainedConfig = None  # type: ignore[assignment]  # read from a file, these two are dicts at first
    recurrence: RecurrenceConfig = None  # type: ignore[assignment]
    use_state: bool = True

    vocab_size = _of_base("vocab_size")
    hidden_size = _of_base("hidden_size")
    num_hidden_layers = _of_base("num_hidden_layers")
    num_attention_heads = _of_base("num_attention_heads")
    tie_word_embeddings = _of_base("tie_word_embeddings")

    def __post_init__(self, **kwargs: Any) -> None:
        if isinstance(self.base_config, dict):
            self.base_config = AutoConfig.for_model(**self.base_config)
        if self.base_config is not None:  # transformers makes an empty one to compare defaults with
            self.recurrence = self.recurrence or RecurrenceConfig()
            for name in ("id2label", "label2id", "problem_type"):
                if getattr(self, name) is None:
                    setattr(self, name, getattr(self.base_config, name))
            for name in ("attn_implementation", "experts_implementation"):  # would be reset in the base config too
                kwargs.setdefault(name, getattr(self.base_config, f"_{name}"))
            self.check()
        super().__post_init__(**kwargs)

    def check(self) -> None:
        """Refuse a recurrence that does not fit the base model; one from a file, or given on loading, may be a dict."""
        if isinstance(self.recurrence, dict):
            self.recurrence = RecurrenceConfig(**self.recurrence)
        _check_fit(self.recurrence, self.base_config, self.architecture)

    @property
    def architecture(self) -> Architecture:
        """What `insertion` knows of the base model's inside."""
        return architecture_of(self.base_config)

    @property
    def insertion_layers(self) -> tuple[int, ...]:
        """The layers the pooled state enters, counted from 1."""
        return self.recurrence.insertion_layers(self.base_config.num_hidden_layers)

    @property
    def state_shape(self) -> tuple[int, int, int]:
        """Shape of one row's carried vectors: states (1, or one per insertion layer), slots, hidden size."""
        groups = len(self.insertion_layers) if self.recurrence.separate else 1
        return groups, self.recurrence.slots, self.base_config.hidden_size

    @property
    def kept_shape(self) -> tuple[int, int, int, int, int] | None:
        """Shape of one row's carried keys and values: layers, 2, heads, positions, their size; None without any."""
        if not self.recurrence.kept:
            return None
        heads, size = self.architecture.heads(self.base_config)
        return self.base_config.num_hidden_layers, 2, heads, self.recurrence.seen, size

    def get_text_config(self, *args: Any, **kwargs: Any) -> PreTrainedConfig:
        return self.base_config if self.base_config is not None else self

    def to_dict(self) -> dict[str, Any]:
        output = super().to_dict()
        if isinstance(self.recurrence, RecurrenceConfig):
            output["recurrence"] = dataclasses.asdict(self.recurrence)
            output["tie_word_embeddings"] = self.tie_word_embeddings  # adapters must know, and look here
        return output


def _is_int(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require(config: RecurrenceConfig, name: str, valid: bool, accepted: str) -> None:
    if not valid:
        raise _wrong(name, getattr(config, name), accepted)


def _wrong(name: str, value: Any, accepted: str) -> ValueError:
    return ValueError(f"RecurrenceConfig: {name}={value!r} must be {accepted}.")


def _check_fit(recurrence: RecurrenceConfig, base: PreTrainedConfig, architecture: Architecture) -> None:
    """Refuse a recurrence that the base model cannot carry out."""
    depth = base.num_hidden_layers
    layers = recurrence.insertion_layers(depth)
    if not layers and recurrence.slots:
        raise ValueError(f"pooled_layers='below': {base.model_type} has a single layer, and none below it. Use 'all'.")
    missing = [layer for layer in layers if layer > depth]
    if missing:
        raise ValueError(
            f"insert_at={recurrence.insert_at!r}: {base.model_type} has {depth} layers, counted from 1, so layer "
            f"{missing[0]} does not exist. Use a number from 1 to {depth}, a list of them, or 'all'."
        )
    if architecture.causal and (recurrence.prefix or recurrence.suffix):
        raise ValueError(f"prefix and suffix are for encoders; {base.model_type} is causal. Leave them empty.")
    strange = [one for one in (*recurrence.prefix, *recurrence.separator, *recurrence.suffix) if one >= base.vocab_size]
    if strange:
        raise ValueError(f"prefix, separator or suffix hold {strange[0]}, and token ids end at {base.vocab_size - 1}.")
    positions = architecture.positions(base)
    if architecture.rotary and recurrence.window + recurrence.seen > positions:
        logger.warning(
            "window=%d%s is larger than the %d positions %s was trained on; rotary positions reach further, but the "
            "model has not seen them.", recurrence.window, f" with {recurrence.seen} kept" * (recurrence.seen > 0),
            positions, base.model_type,
        )  # fmt: skip
    if recurrence.window + recurrence.seen > positions and not architecture.rotary:
        kept = f" with {recurrence.seen} positions kept in front of it" * (recurrence.seen > 0)
        room = positions - recurrence.seen
        advice = f"Use window={room} or less" if room > recurrence.seen else "Keep fewer, and use a smaller window"
        raise ValueError(
            f"window={recurrence.window}{kept} is larger than the {positions} learned positions that "
            f"{base.model_type} can use. {advice}; the state carries what lies further back."
        )
