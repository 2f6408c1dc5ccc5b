# SPDX-License-Identifier: Apache-2.0
"""What commands can be told, once: the command line, a run's record and the job all read this.

Nothing heavy is imported here, so that `--help` answers at once.
"""

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, fields
from typing import Any

FAST_PATHS = ("auto", "compiled", "off")
PRESETS = ("paper", "kept")  # of `RecurrenceConfig`
PYTHON_DOCS = "python-docs"  # the built-in text: the documentation that comes with Python
BUNDLED = "bundled"  # the model that comes with the package
MAX_ANSWER_TOKENS = 30
DTYPES = ("float32", "bfloat16", "float16")  # of weights
# what several commands say of an option
OVERLAP = "Tokens that windows share; the trained one by default."
NO_STATE = "--no-state removes the state: every window stands alone."
_QUESTIONS = "HotpotQA's or SQuAD's JSON, or rows of it; .gz and .xz are read too."
_CORPUS = "wikitext-103, pg19, NAME=FOLDER, a folder, a .txt or .jsonl, a Hub name, or python-docs."
TEXT_FIELD = "The field that holds the text, in JSON lines and Hub data."
_RECURRENCE = "Recurrence (the paper's by default)"


def _setting(default: Any, help: str, panel: str | None = None) -> Any:
    return field(default=default, metadata={"help": help, "panel": panel})


def _data(default: Any, help: str) -> Any:
    return _setting(default, help, "Data")


def _recurrence(default: Any, help: str) -> Any:
    return _setting(default, help, _RECURRENCE)


def _training(default: Any, help: str) -> Any:
    return _setting(default, help, "Training (the paper's protocol by default)")


@dataclass(frozen=True)
class RecurrentSettings:
    """What every training can be told: a model, data, and a recurrence. None leaves a choice to the model or the
    paper."""

    model: str = _setting(BUNDLED, "A Hub name, a folder, a .gguf file, or bundled, which comes with the package.")
    data: str = _setting(PYTHON_DOCS, _CORPUS)

    recurrence: bool = _recurrence(True, "--no-recurrence trains the plain model in the same loop.")
    preset: str | None = _recurrence(None, "paper, or kept: keys and values of half a window, which gains more.")
    window: int | None = _recurrence(None, "Tokens read at once (300).")
    overlap: int | None = _recurrence(None, "Tokens that consecutive windows share (0).")
    slots: int | None = _recurrence(None, "Vectors carried (1; kept: 0).")
    kept: int | None = _recurrence(None, "Newest positions whose keys and values are carried (0; kept: half a window).")
    sinks: int | None = _recurrence(None, "A document's first positions, whose are carried too (0; kept: 4).")
    insert_at: tuple[str, ...] | None = _recurrence(None, "Layers the state enters, from 1, or all (2).")
    pooling: str | None = _recurrence(None, "mean, max or attention (mean).")
    pooled_layers: str | None = _recurrence(None, "all, last, or below (all).")
    hidden_sizes: tuple[int, ...] | None = _recurrence(None, "Hidden layers of the module (200 200 200).")
    residual: bool | None = _recurrence(None, "Carry what was pooled, plus what the module adds to it.")
    init_std: float | None = _recurrence(None, "Spread of the module's last layer at the start (0.02).")
    state_per_layer: bool | None = _recurrence(None, "A state of its own for each of several layers.")
    bptt_windows: int | None = _recurrence(None, "Detach the state after every so many windows.")
    keep_windows: str | None = _recurrence(None, "Windows of a sample that keep their activations (auto).")

    def as_json(self) -> dict[str, Any]:
        """As a run's record has them, which knows no tuples."""
        return json.loads(json.dumps(asdict(self)))

    def recurrence_fields(self) -> dict[str, Any]:
        """The fields of `RecurrenceConfig` that were given."""
        names = [one.name for one in fields(self) if one.metadata["panel"] == _RECURRENCE]
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        useless = [flag(name) for name in given if name not in ("recurrence", "window", "overlap", "keep_windows")]
        if self.preset not in (None, *PRESETS):
            raise ValueError(f"--preset {self.preset}: it is one of {', '.join(PRESETS)}.")
        if useless and not self.recurrence:
            raise ValueError(f"{', '.join(useless)}: there is no state with --no-recurrence. Choose one.")
        read: dict[str, Any] = {"keep_windows": _windows, "insert_at": _layers}
        return {name: read[name](value) if name in read else value for name, value in given.items()
                if name not in ("recurrence", "preset")}  # fmt: skip


@dataclass(frozen=True)
class TrainSettings(RecurrentSettings):
    """Everything that decides what `carryforward train` makes."""

    validation_data: str | None = _data(None, "Take validation text from elsewhere.")
    validation: bool = _data(True, "Validate while training, and keep the best.")
    text_field: str = _data("text", TEXT_FIELD)
    checksums: str | None = _data(None, "Folder of PG-19's published checksums, to check its books against.")
    max_document_tokens: int | None = _data(None, "Train on the first so many tokens of each document.")
    max_validation_tokens: int | None = _data(None, "Validate on the first so many tokens of each document.")

    windows_per_sample: int = _training(20, "Windows in a training sample.")
    carry_state: bool = _training(False, "Start a sample with the state of the one before.")
    learning_rate: tuple[float, ...] = _training((5e-5,), "Of the base model; several are tried first.")
    recurrence_learning_rate: tuple[float, ...] = _training((1e-3,), "Of the new parameters; likewise.")
    search_tokens: int = _training(1_000_000, "Tokens each learning rate is tried on.")
    freeze_base: bool = _training(False, "Train the recurrence module alone.")
    epochs: float = _training(2, "Passes over the data.")
    train_tokens: int | None = _training(None, "Stop after so many tokens instead.")
    eval_tokens: int = _training(2_000_000, "Validate and save every so many tokens.")
    save_tokens: int | None = _training(None, "Save every so many tokens as well.")
    batch_size: int = _training(8, "Samples a step, for each process.")
    accumulate: int = _training(1, "Batches whose gradients are added up for a step.")
    warmup_steps: int = _training(100, "Steps of linear warm-up; then the rate is constant.")
    max_grad_norm: float = _training(1.0, "Clip gradients to this norm; 0 does not.")
    bf16: bool = _training(False, "bfloat16 mixed precision.")
    fast_path: str = _training("auto", "On a GPU: auto, compiled (from the first window), or off.")
    seed: int = _training(0, "Seed of everything random.")

    def __post_init__(self) -> None:
        _at_least(1, self, "max_document_tokens", "max_validation_tokens", "windows_per_sample", "search_tokens",
                  "train_tokens", "eval_tokens", "save_tokens", "batch_size", "accumulate")  # fmt: skip
        _at_least(0, self, "warmup_steps", "max_grad_norm")
        for name in ("learning_rate", "recurrence_learning_rate"):
            rates = getattr(self, name)
            if not rates or not all(0 < rate < math.inf for rate in rates):
                raise ValueError(f"{flag(name)} {' '.join(map(str, rates))}: rates are numbers above 0.")
        if self.fast_path not in FAST_PATHS:
            raise ValueError(f"--fast-path {self.fast_path}: it is one of {', '.join(FAST_PATHS)}.")
        if not 0 < self.epochs < math.inf:
            raise ValueError(f"--epochs {self.epochs}: it must be above 0.")
        if self.freeze_base and not self.recurrence:
            raise ValueError("--freeze-base trains the recurrence alone and --no-recurrence the rest: choose one.")
        if self.carry_state and not self.recurrence:
            raise ValueError("--carry-state carries what --no-recurrence leaves out: choose one.")
        self.recurrence_fields()


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _at_least(least: int, settings: Any, *names: str) -> None:
    """Refuse smaller numbers; None is what the default is."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and value < least:
            raise ValueError(f"{flag(name)} {value}: it must be at least {least}.")


def _windows(given: str) -> int | str:
    if given != "auto" and not (given.isascii() and given.isdecimal()):
        raise ValueError(f"--keep-windows {given}: give a number from 0, or auto.")
    return given if given == "auto" else int(given)


def _layers(given: tuple[str, ...]) -> tuple[int, ...] | int | str:
    if given == ("all",):
        return "all"
    try:
        layers = tuple(int(layer) for layer in given)
    except ValueError:
        raise ValueError(f"--insert-at {' '.join(given)}: give layer numbers from 1, or all.") from None
    return layers[0] if len(layers) == 1 else layers


@dataclass(frozen=True)
class QuestionSettings(RecurrentSettings):
    """Everything that decides what `carryforward qa train` makes."""

    model: str = _setting(MISSING, "An encoder: a Hub name or a folder; with a question-answering head, or none.")
    data: str = _setting(MISSING, f"Questions: {_QUESTIONS}")
    window: int | None = _recurrence(None, "Tokens read at once (512, or as many as the model has positions for).")
    pooled_layers: str | None = _recurrence(None, "all, last, or below (last).")
    hidden_sizes: tuple[int, ...] | None = _recurrence(None, "Hidden layers of the module (one, the model's width).")

    validation_data: str | None = _data(None, "Questions to validate on; a twentieth of the documents by default.")
    join_words: int | None = _data(None, "Join passages to documents of about so many words.")
    max_questions: int | None = _data(None, "Train on the first so many questions.")
    max_validation_questions: int | None = _data(None, "Validate on the first so many.")

    learning_rate: float = _training(2e-5, "Of the base model and its head.")
    recurrence_learning_rate: float | None = _training(None, "Of the new parameters; the same by default.")
    epochs: float = _training(4, "Passes over the questions; validation after each, the best is kept.")
    patience: int | None = _training(None, "Stop after so many epochs without improvement.")
    batch_size: int = _training(8, "Questions a step, for each process.")
    accumulate: int = _training(1, "Batches whose gradients are added up for a step.")
    max_grad_norm: float = _training(1.0, "Clip gradients to this norm; 0 does not.")
    bf16: bool = _training(False, "bfloat16 mixed precision.")
    seed: int = _training(0, "Seed of everything random, joining included.")

    def __post_init__(self) -> None:
        _at_least(1, self, "join_words", "max_questions", "max_validation_questions", "patience", "batch_size",
                  "accumulate")  # fmt: skip
        for name in ("learning_rate", "recurrence_learning_rate", "epochs"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{flag(name)} {value}: it must be above 0.")
        self.recurrence_fields()


@dataclass(frozen=True)
class CorpusSettings:
    """Text that is read, and not trained on."""

    data: str = _setting(PYTHON_DOCS, _CORPUS)
    split: str | None = _setting(None, "train, validation or test; validation, or all of a single text.")
    text_field: str = _setting("text", TEXT_FIELD)


@dataclass(frozen=True)
class ScoringSettings(CorpusSettings):
    """Whole documents that are scored."""

    max_document_tokens: int | None = _setting(None, "The first so many tokens of each document.")
    batch_size: int = _setting(8, "Documents read side by side.")
    bf16: bool = _setting(False, "bfloat16 mixed precision.")

    def __post_init__(self) -> None:
        _at_least(1, self, "max_document_tokens", "batch_size")


@dataclass(frozen=True)
class EvaluateSettings(ScoringSettings):
    """What `carryforward evaluate` measures. None is what a model was trained at, or else as much as it can read."""

    split: str | None = _setting(None, "train, validation or test; test, or all of a single text.")
    overlap: tuple[int, ...] | None = _setting(None, "One or several; the trained one by default.")
    window: int | None = _setting(None, "For plain models; all their positions by default.")
    control: bool = _setting(True, "Score recurrent models without their state as well.")
    reset_every: int | None = _setting(None, "Empty the state every so many windows.")
    checksums: str | None = _setting(None, "Folder of PG-19's published checksums.")

    def __post_init__(self) -> None:
        super().__post_init__()
        _at_least(1, self, "window", "reset_every")


@dataclass(frozen=True)
class HorizonSettings(ScoringSettings):
    """What `carryforward horizon` measures."""

    depth: tuple[int, ...] | None = _setting(None, "Windows back, several (0 1 2 4 8).")

    def __post_init__(self) -> None:
        super().__post_init__()
        if any(depth < 0 for depth in self.depth or ()):
            raise ValueError(f"--depth {' '.join(map(str, self.depth or ()))}: windows are counted from 0.")


@dataclass(frozen=True)
class AnswerSettings:
    """What `carryforward qa evaluate` measures."""

    data: str = _setting(MISSING, _QUESTIONS)
    join_words: int | None = _setting(None, "First join passages to documents of about so many words.")
    max_questions: int | None = _setting(None, "The first so many questions only.")
    control: bool = _setting(True, "Score recurrent models without their state as well.")
    max_answer_tokens: int = _setting(MAX_ANSWER_TOKENS, "The longest answer, in tokens.")
    window: int | None = _setting(None, "For plain models; up to 512 tokens by default.")
    overlap: int | None = _setting(None, OVERLAP)
    batch_size: int = _setting(8, "Questions answered side by side.")
    bf16: bool = _setting(False, "bfloat16 mixed precision.")
    seed: int = _setting(0, "Of the joining.")

    def __post_init__(self) -> None:
        _at_least(1, self, "join_words", "max_questions", "max_answer_tokens", "window", "batch_size")


@dataclass(frozen=True)
class EmbedSettings:
    """Which vectors `carryforward embed` makes, and of what."""

    what: str = _setting("document", "document, tokens or windows.")
    pooling: str = _setting("mean", "A document's vector: mean of its tokens, or its last state.")
    window: int | None = _setting(None, "For plain models: tokens read at once.")
    overlap: int | None = _setting(None, "Tokens that consecutive windows share.")
    state: bool = _setting(True, NO_STATE)
    text_field: str = _setting("text", TEXT_FIELD)
    id_field: str = _setting("id", "The field that holds a document's id.")
    on_error: str = _setting("stop", "A line that cannot be read: stop or skip.")
    batch_size: int = _setting(8, "Documents read side by side.")

    def __post_init__(self) -> None:
        _at_least(1, self, "window", "batch_size")
        if self.on_error not in ("stop", "skip"):
            raise ValueError(f"--on-error {self.on_error}: it must be stop or skip.")


def _sampling(default: Any, help: str) -> Any:
    return _setting(default, help, "Sampling (the model's own settings by default)")


@dataclass(frozen=True)
class WriteSettings:
    """How `carryforward generate` writes; None leaves a choice to the model's own generation config."""

    max_new_tokens: int = _setting(200, "Tokens to write.")
    overlap: int | None = _setting(None, OVERLAP)
    state: bool = _setting(True, NO_STATE)
    dtype: str = _setting("float32", "float32, bfloat16 or float16.")
    greedy: bool = _sampling(False, "Always the likeliest token, as --temperature 0.")
    temperature: float | None = _sampling(None, "Of sampling (the model's setting, or 1).")
    top_k: int | None = _sampling(None, "Sample from so many tokens (the model's setting, or 50).")
    top_p: float | None = _sampling(None, "Sample from the likeliest that add up to this.")
    min_p: float | None = _sampling(None, "Nor from those less likely than this times the best.")
    repetition_penalty: float | None = _sampling(None, "Above 1 disfavours what was written.")
    seed: int | None = _sampling(None, "The same text again.")

    def __post_init__(self) -> None:
        _at_least(1, self, "max_new_tokens", "top_k")
        if self.dtype not in DTYPES:
            raise ValueError(f"--dtype {self.dtype}: it must be one of {', '.join(DTYPES)}.")
        for name, accepted, low, high in (
            ("temperature", "at least 0", 0.0, math.inf),
            ("top_p", "above 0 and at most 1", math.ulp(0), 1.0),
            ("min_p", "from 0 to 1", 0.0, 1.0),
            ("repetition_penalty", "above 0", math.ulp(0), math.inf),
            ("seed", "at least -2**63 and below 2**64", -(2**63), 2**64 - 1),  # what torch takes
        ):
            value = getattr(self, name)
            if value is not None and not low <= value <= high:
                raise ValueError(f"{flag(name)} {value}: it must be {accepted}.")
        unused = [name for name in ("top_k", "top_p", "min_p") if getattr(self, name) is not None]
        unused += ["temperature"] if self.greedy and self.temperature else []
        if self.is_greedy and unused:
            raise ValueError(f"{flag(unused[0])} has no meaning when the likeliest token is taken. Leave one out.")

    @property
    def is_greedy(self) -> bool:
        return self.greedy or self.temperature == 0

    def sampling(self) -> dict[str, Any]:
        """As `generate` takes it."""
        names = ["repetition_penalty"] + ["temperature", "top_k", "top_p", "min_p"] * (not self.is_greedy)
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        return {"do_sample": not self.is_greedy, **given}


def _context(default: Any, help: str) -> Any:
    return _setting(default, help, "Contexts and what is written after them (the paper's by default)")


def _topics(default: Any, help: str) -> Any:
    return _setting(default, help, "Topics")


@dataclass(frozen=True)
class ContinuationSettings(CorpusSettings):
    """Everything that decides what `carryforward topics` and `samples` show."""

    split: str = _setting("validation", "Where contexts are drawn: train, validation or test.")
    plain: str | None = _setting(None, "A plain model to compare with; it is given one token.")

    contexts: int = _context(300, "How many; the paper has 8000.")
    context_tokens: int | None = _context(None, "Tokens of a context, which must end with a window (a window).")
    new_tokens: int = _context(30, "Tokens written after each, the likeliest every time.")
    batch_size: int = _context(32, "Contexts continued side by side.")
    bf16: bool = _context(False, "Weights in bfloat16.")
    seed: int = _context(0, "Of what is drawn: contexts, the start of the fit, the interval.")

    topics: int = _topics(20, "How many are fitted.")
    fit_on: str = _topics("train", "The split whose documents they are fitted on.")
    fit_documents: int | None = _topics(None, "The first so many documents of it only.")
    topics_from: str | None = _topics(None, "Take those that an earlier run fitted: its folder lda.")

    def __post_init__(self) -> None:
        _at_least(1, self, "contexts", "context_tokens", "new_tokens", "batch_size", "topics", "fit_documents")
        _at_least(0, self, "seed")
        for name in ("topics", "fit_on", "fit_documents"):
            if self.topics_from is not None and getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"{flag(name)} is about topics to be fitted, and --topics-from takes others. Use one.")
