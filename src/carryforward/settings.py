# SPDX-License-Identifier: Apache-2.0
"""Settings of the commands. The command line, the job and the run's record all read these dataclasses.

Nothing heavy is imported here, so that `--help` answers at once. A field's metadata holds its help text and the panel
it stands in under `--help`: None is the main panel, for what most users need.
"""

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from functools import partial
from typing import Any

from .presets import (
    DEFAULT_SINKS,
    MAX_DEFAULT_WINDOW,
    PAPER_QA_WINDOW,
    PAPER_WINDOW,
    POOLED_LAYERS,
    POOLINGS,
    PRESET_MEMORIES,
)
from .settings_base import Settings, at_least, flag

FAST_PATHS = ("auto", "compiled", "off")
PYTHON_DOCS = "python-docs"  # the built-in text: the documentation that comes with Python
BUNDLED = "bundled"  # the model that comes with the package
MAX_ANSWER_TOKENS = 30
DTYPES = ("float32", "bfloat16", "float16")  # of weights
# panels of `--help`
ADVANCED = "Advanced"
RUN = "Advanced: run"
MEMORY = "Advanced: memory"
# help texts that several commands share
OVERLAP = "Tokens shared by consecutive windows."
PRESET = "What passes from window to window: recommended (keys and values) or paper (a pooled vector)."
DEFAULT_WINDOW = f"2/3 of the model's positions, at most {MAX_DEFAULT_WINDOW}; paper: {PAPER_WINDOW}"
DEFAULT_RECENT = "half a window, less the sinks"
AS_TRAINED = "as trained"  # a default that depends on the model
NO_STATE = "Process every window on its own, without the state."
NO_CONTROL = "Do not score recurrent models with the state removed."
MIXED_PRECISION = "Use bfloat16 mixed precision."
_QUESTIONS = "HotpotQA or SQuAD JSON, or rows of it (also .gz, .xz)."
_POOLED_LAYERS = "vector: layers that are pooled: all, last, or below (those below --insert-at)."
_HIDDEN_SIZES = "vector: sizes of its network's hidden layers."
_CORPUS = "Corpus: wikitext-103, pg19, NAME=FOLDER, a folder, a .txt or .jsonl file, a Hub dataset, or python-docs."
TEXT_FIELD = "Field that holds the text, in JSON lines and Hub datasets."


def _setting(default: Any, help: str, panel: str | None = None, shown: str | None = None) -> Any:
    """A field of a settings dataclass.

    Args:
        panel: the group of options it stands in under `--help`; None is the main one.
        shown: the default that `--help` shows, where `default` is None because the job or the model decides.
    """
    return field(default=default, metadata={"help": help, "panel": panel, "shown": shown})


def _memory(default: Any, help: str, shown: str | None = None, kind: str | None = None) -> Any:
    """A field about the memory; `kind` is the kind of memory that it belongs to."""
    return field(default=default, metadata={"help": help, "panel": MEMORY, "shown": shown, "kind": kind})


_kv = partial(_memory, kind="kv")
_vector = partial(_memory, kind="vector")
_advanced = partial(_setting, panel=ADVANCED)
_data = partial(_setting, panel="Advanced: data")
_optimisation = partial(_setting, panel="Advanced: optimisation")
_run = partial(_setting, panel=RUN)


@dataclass(frozen=True)
class RecurrentSettings(Settings):
    """Settings that all training commands share: a model, data, and a recurrence. None means that the model decides."""

    model: str = _setting(BUNDLED, "Hub name, folder or .gguf file; bundled comes with the package.")
    data: str = _setting(PYTHON_DOCS, _CORPUS)

    preset: str = _setting("recommended", PRESET)
    window: int | None = _setting(None, "Tokens per window.", shown=DEFAULT_WINDOW)
    recurrence: bool = _memory(True, "Train the plain model on the same windows, as a baseline.")
    memory: tuple[str, ...] | None = _memory(
        None, "Memory: kv (keys and values), vector (pooled), or both.", shown="the preset's"
    )
    overlap: int | None = _memory(None, OVERLAP, shown="0")
    recent: int | None = _kv(None, "kv: most recent positions to carry.", shown=DEFAULT_RECENT)
    sinks: int | None = _kv(
        None, "kv: attention sinks, a document's first positions, always carried.", shown=str(DEFAULT_SINKS)
    )
    slots: int | None = _vector(None, "vector: number of vectors.", shown="1")
    insert_at: tuple[str, ...] | None = _vector(
        None, "vector: layers that receive it, counted from 1, or all.", shown="2"
    )
    pooling: str | None = _vector(None, "vector: pooling over positions: mean, max or attention.", shown="mean")
    pooled_layers: str | None = _vector(None, _POOLED_LAYERS, shown="all")
    hidden_sizes: tuple[int, ...] | None = _vector(None, _HIDDEN_SIZES, shown="200 200 200")
    residual: bool | None = _vector(None, "vector: add the pooled vector to its network's output.")
    init_std: float | None = _vector(
        None, "vector: initial standard deviation of its network's last layer.", shown="0.02"
    )
    state_per_layer: bool | None = _vector(None, "vector: a separate one for each layer of --insert-at.")
    bptt_windows: int | None = _memory(None, "Truncated BPTT: detach the state every N windows.", shown="never")
    block_windows: str | None = _memory(
        None, "Windows of each row that run side by side, where none waits for another: N or auto.", shown="auto"
    )
    keep_windows: str | None = _memory(
        None, "Windows of a sample that keep activations instead of recomputing them.", shown="auto"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "window", "recent", "slots", "hidden_sizes", "bptt_windows")
        at_least(0, self, "overlap", "sinks", "init_std")
        for name, choices in (("pooling", POOLINGS), ("pooled_layers", POOLED_LAYERS)):
            if getattr(self, name) not in (None, *choices):
                raise ValueError(f"{flag(name)} {getattr(self, name)}: it must be one of {', '.join(choices)}.")
        self.recurrence_fields()

    def as_json(self) -> dict[str, Any]:
        """As a run's record has them: without tuples."""
        return json.loads(json.dumps(asdict(self)))

    def recurrence_fields(self) -> dict[str, Any]:
        """The arguments of `models.add_recurrence.recurrence_of` that were given."""
        if self.preset not in PRESET_MEMORIES:
            raise ValueError(f"--preset {self.preset}: it must be one of {', '.join(PRESET_MEMORIES)}.")
        if not self.recurrence:
            self._refuse_memory()
        names = ("window", "overlap", "bptt_windows", "block_windows", "keep_windows")
        values = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        memory = self._memory_options()
        for name, least in (("block_windows", 1), ("keep_windows", 0)):
            if name in values:
                values[name] = _windows(name, values[name], least)
        if self.memory is not None or any(len(options) > 1 for options in memory):
            values["memory"] = memory
        return {"preset": self.preset, **values}

    def _memory_options(self) -> list[dict[str, Any]]:
        """For each kind of memory, its fields that were given."""
        kinds = PRESET_MEMORIES[self.preset] if self.memory is None else self.memory
        options: dict[str, dict[str, Any]] = {kind: {"kind": kind} for kind in kinds}
        for setting in fields(self):
            kind, value = setting.metadata.get("kind"), getattr(self, setting.name)
            if kind is None or value is None:
                continue
            if kind not in options:
                raise ValueError(
                    f"{flag(setting.name)} is an option of the memory {kind}, and the memory is {', '.join(options)}. "
                    f"Use --memory {kind}, or --memory {' '.join([*options, kind])} for both, or leave it out."
                )
            options[kind][setting.name] = _layers(value) if setting.name == "insert_at" else value
        return [*options.values()]

    def _refuse_memory(self) -> None:
        """Refuse settings that have no effect without recurrence."""
        own = [setting for setting in fields(self) if setting.metadata.get("kind")]
        names = ["memory", *(setting.name for setting in own), "bptt_windows"]
        unused = [flag(name) for name in names if getattr(self, name) is not None]
        if unused:
            raise ValueError(
                f"{', '.join(unused)}: no effect with --no-recurrence, which carries nothing. Leave it out."
            )


@dataclass(frozen=True)
class TrainSettings(RecurrentSettings):
    """Settings of `carryforward train`. The optimisation defaults are the paper's protocol."""

    validation_data: str | None = _data(None, "Corpus to validate on.", shown="a split of --data")
    validation: bool = _data(True, "Do not validate during training: keep the last weights, not the best.")
    text_field: str = _data("text", TEXT_FIELD)
    checksums: str | None = _data(None, "Folder with the published checksums of PG-19, to verify its books.")
    max_document_tokens: int | None = _data(None, "Use only the first N tokens of each training document.")
    max_validation_tokens: int | None = _data(None, "Use only the first N tokens of each validation document.")

    windows_per_sample: int = _optimisation(20, "Windows in a training sample.")
    carry_state: bool = _optimisation(False, "Start a sample with the final state of the previous one.")
    learning_rate: tuple[float, ...] = _setting(
        (5e-5,), "Learning rate of the base model. Several values start a search."
    )
    recurrence_learning_rate: tuple[float, ...] = _optimisation(
        (1e-3,), "Learning rate of the added parameters. Several values start a search."
    )
    search_tokens: int = _optimisation(1_000_000, "Tokens to train on for each learning rate of a search.")
    freeze_base: bool = _optimisation(False, "Train only the added parameters.")
    epochs: float = _setting(2, "Passes over the training data.")
    train_tokens: int | None = _optimisation(None, "Train on N tokens; replaces --epochs.")
    eval_tokens: int = _run(2_000_000, "Validate and save a checkpoint every N tokens.")
    save_tokens: int | None = _run(None, "Save a checkpoint every N tokens as well.")
    batch_size: int = _setting(8, "Samples per batch and process.")
    accumulate: int = _optimisation(1, "Gradient accumulation: batches per optimizer step.")
    warmup_steps: int = _optimisation(100, "Steps of linear warm-up. The learning rate is constant afterwards.")
    max_grad_norm: float = _optimisation(1.0, "Clip gradients to this norm; 0 disables clipping.")
    bf16: bool = _setting(False, MIXED_PRECISION)
    fast_path: str = _run("auto", "CUDA graphs on a GPU: auto, compiled (compile at once) or off.")
    seed: int = _run(0, "Random seed.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "max_document_tokens", "max_validation_tokens", "windows_per_sample", "search_tokens",
                 "train_tokens", "eval_tokens", "save_tokens", "batch_size", "accumulate")  # fmt: skip
        at_least(0, self, "warmup_steps", "max_grad_norm")
        for name in ("learning_rate", "recurrence_learning_rate"):
            rates = getattr(self, name)
            if not all(rate > 0 for rate in rates):
                raise ValueError(f"{flag(name)} {' '.join(map(str, rates))}: learning rates must be above 0.")
        if self.fast_path not in FAST_PATHS:
            raise ValueError(f"--fast-path {self.fast_path}: it must be one of {', '.join(FAST_PATHS)}.")
        if not self.epochs > 0:
            raise ValueError(f"--epochs {self.epochs}: it must be above 0.")
        if self.freeze_base and not self.recurrence:
            raise ValueError("--freeze-base trains only the recurrence, which --no-recurrence removes: choose one.")
        if self.carry_state and not self.recurrence:
            raise ValueError("--carry-state carries the state, which --no-recurrence removes: choose one.")


def _windows(name: str, value: str, least: int) -> int | str:
    """Parse --block-windows or --keep-windows."""
    if value == "auto":
        return value
    if not (value.isascii() and value.isdecimal()) or int(value) < least:
        raise ValueError(f"{flag(name)} {value}: give a number from {least}, or auto.")
    return int(value)


def _layers(values: tuple[str, ...]) -> tuple[int, ...] | int | str:
    """Parse --insert-at."""
    if values == ("all",):
        return "all"
    try:
        layers = tuple(int(value) for value in values)
    except ValueError:
        raise ValueError(f"--insert-at {' '.join(values)}: give layer numbers from 1, or all.") from None
    return layers[0] if len(layers) == 1 else layers


@dataclass(frozen=True)
class QuestionSettings(RecurrentSettings):
    """Settings of `carryforward qa train`."""

    model: str = _setting(MISSING, "Encoder, with or without a question-answering head: Hub name or folder.")
    data: str = _setting(MISSING, f"Questions to train on: {_QUESTIONS}")
    window: int | None = _setting(
        None, "Tokens per window.", shown=f"2/3 of the model's positions, or all for paper; at most {PAPER_QA_WINDOW}"
    )
    pooled_layers: str | None = _vector(None, _POOLED_LAYERS, shown="last")
    hidden_sizes: tuple[int, ...] | None = _vector(None, _HIDDEN_SIZES, shown="one, of the model's hidden size")

    validation_data: str | None = _setting(None, "Questions to validate on.", shown="5% of the documents")
    join_words: int | None = _data(None, "Join passages into documents of about N words.")
    max_questions: int | None = _data(None, "Use only the first N training questions.")
    max_validation_questions: int | None = _data(None, "Use only the first N validation questions.")

    learning_rate: float = _setting(2e-5, "Learning rate of the base model and its head.")
    recurrence_learning_rate: float | None = _optimisation(
        None, "Learning rate of the recurrence's parameters.", shown="--learning-rate"
    )
    epochs: float = _setting(4, "Passes over the questions. Validates after each and keeps the best.")
    patience: int | None = _optimisation(None, "Stop after N epochs without improvement.")
    batch_size: int = _setting(8, "Questions per batch and process.")
    accumulate: int = _optimisation(1, "Gradient accumulation: batches per optimizer step.")
    max_grad_norm: float = _optimisation(1.0, "Clip gradients to this norm; 0 disables clipping.")
    bf16: bool = _setting(False, MIXED_PRECISION)
    seed: int = _run(0, "Random seed, also of --join-words.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "join_words", "max_questions", "max_validation_questions", "patience", "batch_size",
                 "accumulate")  # fmt: skip
        at_least(0, self, "max_grad_norm")
        for name in ("learning_rate", "recurrence_learning_rate", "epochs"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{flag(name)} {value}: it must be above 0.")


@dataclass(frozen=True)
class CorpusSettings(Settings):
    """A corpus to read, without training."""

    data: str = _setting(PYTHON_DOCS, _CORPUS)
    split: str | None = _setting(None, "train, validation or test.", shown="validation, or all of a single text")
    text_field: str = _advanced("text", TEXT_FIELD)


@dataclass(frozen=True)
class ScoringSettings(CorpusSettings):
    """Whole documents to score."""

    max_document_tokens: int | None = _setting(None, "Use only the first N tokens of each document.")
    batch_size: int = _setting(8, "Documents per batch.")
    bf16: bool = _advanced(False, MIXED_PRECISION)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "max_document_tokens", "batch_size")


@dataclass(frozen=True)
class EvaluateSettings(ScoringSettings):
    """Settings of `carryforward evaluate`. None stands for what a model was trained with, or all its positions."""

    split: str | None = _setting(None, "train, validation or test.", shown="test, or all of a single text")
    overlap: tuple[int, ...] | None = _setting(None, f"{OVERLAP} One or several values.", shown=AS_TRAINED)
    window: int | None = _setting(None, "Tokens per window, of plain models.", shown="all their positions")
    control: bool = _advanced(True, NO_CONTROL)
    reset_every: int | None = _advanced(None, "Reset the state every N windows.")
    checksums: str | None = _advanced(None, "Folder with the published checksums of PG-19, to verify its books.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "window", "reset_every")
        at_least(0, self, "overlap")


@dataclass(frozen=True)
class HorizonSettings(ScoringSettings):
    """Settings of `carryforward horizon`."""

    depth: tuple[int, ...] | None = _setting(
        None, "Numbers of past windows that the state may cover.", shown="0 1 2 4 8"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "depth")


@dataclass(frozen=True)
class AnswerSettings(Settings):
    """Settings of `carryforward qa evaluate`."""

    data: str = _setting(MISSING, f"Questions: {_QUESTIONS}")
    join_words: int | None = _advanced(None, "First join passages into documents of about N words.")
    max_questions: int | None = _setting(None, "Use only the first N questions.")
    control: bool = _advanced(True, NO_CONTROL)
    max_answer_tokens: int = _advanced(MAX_ANSWER_TOKENS, "Length limit of an answer, in tokens.")
    window: int | None = _advanced(None, "Tokens per window, of plain models.", shown="at most 512")
    overlap: int | None = _advanced(None, OVERLAP, shown=AS_TRAINED)
    batch_size: int = _setting(8, "Questions per batch.")
    bf16: bool = _advanced(False, MIXED_PRECISION)
    seed: int = _advanced(0, "Random seed of --join-words.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "join_words", "max_questions", "max_answer_tokens", "window", "batch_size")
        at_least(0, self, "overlap")


@dataclass(frozen=True)
class EmbedSettings(Settings):
    """Settings of `carryforward embed`."""

    what: str = _setting("document", "What gets a vector: document, tokens or windows.")
    pooling: str = _setting("mean", "Vector of a document: mean (of its token vectors) or state (its last state).")
    window: int | None = _advanced(None, "Tokens per window, of plain models.", shown="at most 512")
    overlap: int | None = _advanced(None, OVERLAP, shown=AS_TRAINED)
    state: bool = _advanced(True, NO_STATE)
    text_field: str = _advanced("text", "Field that holds the text.")
    id_field: str = _advanced("id", "Field that holds the document's id.")
    on_error: str = _advanced("stop", "What to do with a line that cannot be read: stop or skip.")
    batch_size: int = _setting(8, "Documents per batch.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "window", "batch_size")
        at_least(0, self, "overlap")
        if self.on_error not in ("stop", "skip"):
            raise ValueError(f"--on-error {self.on_error}: it must be stop or skip.")


_sampling = partial(_setting, panel="Sampling")
_BY_MODEL = "the model's generation config"


@dataclass(frozen=True)
class GenerateSettings(Settings):
    """Settings of `carryforward generate`. None leaves a choice to the model's generation config."""

    seeds = -(2**63), 2**64 - 1  # torch's range

    max_new_tokens: int = _setting(200, "Tokens to generate.")
    greedy: bool = _sampling(False, "Always take the most likely token; same as --temperature 0.")
    temperature: float | None = _sampling(None, "Sampling temperature.", shown=f"{_BY_MODEL}, or 1")
    top_k: int | None = _sampling(None, "Sample from the K most likely tokens.", shown=f"{_BY_MODEL}, or 50")
    top_p: float | None = _sampling(None, "Sample from the most likely tokens with this total probability.")
    min_p: float | None = _sampling(None, "Drop tokens less likely than this fraction of the most likely one.")
    repetition_penalty: float | None = _sampling(None, "Values above 1 make repetition less likely.")
    seed: int | None = _sampling(None, "Random seed.", shown="random")
    overlap: int | None = _advanced(None, OVERLAP, shown=AS_TRAINED)
    state: bool = _advanced(True, NO_STATE)
    dtype: str = _advanced("float32", "Data type of the weights: float32, bfloat16 or float16.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "max_new_tokens", "top_k")
        at_least(0, self, "overlap")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype}: it must be one of {', '.join(DTYPES)}.")
        for name, accepted, low, high in (
            ("temperature", "at least 0", 0.0, math.inf),
            ("top_p", "above 0 and at most 1", math.ulp(0), 1.0),
            ("min_p", "from 0 to 1", 0.0, 1.0),
            ("repetition_penalty", "above 0", math.ulp(0), math.inf),
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{flag(name)} {value}: it must be {accepted}.")
        unused = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        unused += ["temperature"] if self.greedy and self.temperature else []
        if self.is_greedy and unused:
            raise ValueError(f"{flag(unused[0])} has no effect on greedy decoding. Leave out one of the two.")

    @property
    def is_greedy(self) -> bool:
        return self.greedy or self.temperature == 0

    def sampling(self) -> dict[str, Any]:
        """Keyword arguments of `model.generate`."""
        names = ["repetition_penalty"] + ["temperature", "top_k", "top_p", "min_p"] * (not self.is_greedy)
        kwargs = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"do_sample": not self.is_greedy, **kwargs}


_contexts = partial(_setting, panel="Advanced: contexts and continuations")
_topics = partial(_setting, panel="Advanced: topics")


@dataclass(frozen=True)
class ContinuationSettings(CorpusSettings):
    """Settings of `carryforward topics` and `samples`."""

    split: str = _setting("validation", "Split to draw contexts from: train, validation or test.")
    text_field: str = _contexts("text", TEXT_FIELD)
    plain: str | None = _setting(None, "Plain model to compare with. It gets a single token of context.")

    contexts: int = _setting(300, "Number of contexts. The paper uses 8000.")
    context_tokens: int | None = _contexts(None, "Tokens per context; it must end with a window.", shown="one window")
    new_tokens: int = _contexts(30, "Tokens to generate after each context, greedily.")
    batch_size: int = _setting(32, "Contexts per batch.")
    bf16: bool = _contexts(False, "Load the weights in bfloat16.")
    seed: int = _contexts(0, "Random seed of the contexts, the topic model and the confidence interval.")

    topics: int = _setting(20, "Number of topics to fit.")
    fit_on: str = _topics("train", "Split to fit the topics on.")
    fit_documents: int | None = _topics(None, "Fit the topics on the first N documents only.")
    topics_from: str | None = _topics(None, "Reuse the topics of an earlier run: its folder lda.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "contexts", "context_tokens", "new_tokens", "batch_size", "topics", "fit_documents")
        for name in ("topics", "fit_on", "fit_documents"):
            if self.topics_from is not None and getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"{flag(name)} is for fitting topics, and --topics-from reuses others. Use one.")
