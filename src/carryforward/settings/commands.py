# SPDX-License-Identifier: Apache-2.0
"""Settings of the commands. The command line, the job and the run's record all read these dataclasses.

Nothing heavy is imported here, so that `--help` answers at once.
"""

import math
from dataclasses import MISSING, dataclass
from functools import partial
from typing import Any

from ..presets import MASK_PROBABILITY, PAPER_QA_WINDOW, TASKS
from .base import (
    Settings,
    advanced_setting,
    at_least,
    data_setting,
    flag,
    optimisation_setting,
    run_setting,
    setting,
)
from .recurrence import (
    CORPUS,
    HIDDEN_SIZES_HELP,
    OVERLAP,
    POOLED_LAYERS_HELP,
    PYTHON_DOCS,
    RecurrentSettings,
    vector_setting,
)

FAST_PATHS = ("auto", "compiled", "off")
MAX_ANSWER_TOKENS = 30
DTYPES = ("float32", "bfloat16", "float16")  # of weights
# help texts that several commands share
AS_TRAINED = "as trained"  # a default that depends on the model
NO_STATE = "Process every window on its own, without the state."
NO_CONTROL = "Do not score recurrent models with the state removed."
MIXED_PRECISION = "Use bfloat16 mixed precision."
_QUESTIONS = "HotpotQA or SQuAD JSON, or rows of it (also .gz, .xz)."
MASKED_SHARE = "masked-lm: share of tokens that are to be predicted."
TEXT_FIELD = "Field that holds the text, in JSON, Parquet files and Hub datasets."


@dataclass(frozen=True)
class TrainSettings(RecurrentSettings):
    """Settings of `carryforward train`. The optimisation defaults are the paper's protocol."""

    task: str | None = setting(None, f"What to train: {', '.join(TASKS)}.", shown="that of the model's head and data")
    validation_data: str | None = data_setting(None, "Corpus to validate on.", shown="a split of --data")
    validation: bool = data_setting(True, "Do not validate during training: keep the last weights, not the best.")
    text_field: str = data_setting("text", TEXT_FIELD)
    checksums: str | None = data_setting(None, "Folder with the published checksums of PG-19, to verify its books.")
    max_document_tokens: int | None = data_setting(None, "Use only the first N tokens of each training document.")
    max_validation_tokens: int | None = data_setting(None, "Use only the first N tokens of each validation document.")

    mask_probability: float | None = optimisation_setting(None, MASKED_SHARE, shown=str(MASK_PROBABILITY))
    windows_per_sample: int = optimisation_setting(20, "Windows in a training sample.")
    carry_state: bool = optimisation_setting(False, "Start a sample with the final state of the previous one.")
    learning_rate: tuple[float, ...] = setting(
        (5e-5,), "Learning rate of the base model. Several values start a search."
    )
    recurrence_learning_rate: tuple[float, ...] = optimisation_setting(
        (1e-3,), "Learning rate of the added parameters. Several values start a search."
    )
    search_tokens: int = optimisation_setting(1_000_000, "Tokens to train on for each learning rate of a search.")
    freeze_base: bool = optimisation_setting(False, "Train only the added parameters.")
    epochs: float = setting(2, "Passes over the training data.")
    train_tokens: int | None = optimisation_setting(None, "Train on N tokens; replaces --epochs.")
    eval_tokens: int = run_setting(2_000_000, "Validate and save a checkpoint every N tokens.")
    save_tokens: int | None = run_setting(None, "Save a checkpoint every N tokens as well.")
    batch_size: int = setting(8, "Samples per batch and process.")
    accumulate: int = optimisation_setting(1, "Gradient accumulation: batches per optimizer step.")
    warmup_steps: int = optimisation_setting(100, "Steps of linear warm-up. The learning rate is constant afterwards.")
    max_grad_norm: float = optimisation_setting(1.0, "Clip gradients to this norm; 0 disables clipping.")
    bf16: bool = setting(False, MIXED_PRECISION)
    fast_path: str = run_setting("auto", "CUDA graphs on a GPU: auto, compiled (compile at once) or off.")
    seed: int = run_setting(0, "Random seed.")

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
        if self.task not in (None, *TASKS):
            raise ValueError(f"--task {self.task}: it must be one of {', '.join(TASKS)}.")
        _check_mask_probability(self.mask_probability)
        if not self.epochs > 0:
            raise ValueError(f"--epochs {self.epochs}: it must be above 0.")
        if self.freeze_base and not self.recurrence:
            raise ValueError("--freeze-base trains only the recurrence, which --no-recurrence removes: choose one.")
        if self.carry_state and not self.recurrence:
            raise ValueError("--carry-state carries the state, which --no-recurrence removes: choose one.")


@dataclass(frozen=True)
class QuestionSettings(RecurrentSettings):
    """Settings of `carryforward qa train`."""

    model: str = setting(MISSING, "Encoder, with or without a question-answering head: Hub name or folder.")
    data: str = setting(MISSING, f"Questions to train on: {_QUESTIONS}")
    window: int | None = setting(
        None, "Tokens per window.", shown=f"2/3 of the model's positions, or all for paper; at most {PAPER_QA_WINDOW}"
    )
    pooled_layers: str | None = vector_setting(None, POOLED_LAYERS_HELP, shown="last")
    hidden_sizes: tuple[int, ...] | None = vector_setting(
        None, HIDDEN_SIZES_HELP, shown="one, of the model's hidden size"
    )

    validation_data: str | None = setting(None, "Questions to validate on.", shown="5% of the documents")
    join_words: int | None = data_setting(None, "Join passages into documents of about N words.")
    max_questions: int | None = data_setting(None, "Use only the first N training questions.")
    max_validation_questions: int | None = data_setting(None, "Use only the first N validation questions.")

    learning_rate: float = setting(2e-5, "Learning rate of the base model and its head.")
    recurrence_learning_rate: float | None = optimisation_setting(
        None, "Learning rate of the recurrence's parameters.", shown="--learning-rate"
    )
    epochs: float = setting(4, "Passes over the questions. Validates after each and keeps the best.")
    patience: int | None = optimisation_setting(None, "Stop after N epochs without improvement.")
    batch_size: int = setting(8, "Questions per batch and process.")
    accumulate: int = optimisation_setting(1, "Gradient accumulation: batches per optimizer step.")
    max_grad_norm: float = optimisation_setting(1.0, "Clip gradients to this norm; 0 disables clipping.")
    bf16: bool = setting(False, MIXED_PRECISION)
    seed: int = run_setting(0, "Random seed, also of --join-words.")

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

    data: str = setting(PYTHON_DOCS, CORPUS)
    split: str | None = setting(None, "train, validation or test.", shown="validation, or all of a single text")
    text_field: str = advanced_setting("text", TEXT_FIELD)


@dataclass(frozen=True)
class ScoringSettings(CorpusSettings):
    """Whole documents to score."""

    max_document_tokens: int | None = setting(None, "Use only the first N tokens of each document.")
    batch_size: int = setting(8, "Documents per batch.")
    bf16: bool = advanced_setting(False, MIXED_PRECISION)

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "max_document_tokens", "batch_size")


@dataclass(frozen=True)
class EvaluateSettings(ScoringSettings):
    """Settings of `carryforward evaluate`. None stands for what a model was trained with, or all its positions."""

    split: str | None = setting(None, "train, validation or test.", shown="test, or all of a single text")
    overlap: tuple[int, ...] | None = setting(None, f"{OVERLAP} One or several values.", shown=AS_TRAINED)
    window: int | None = setting(None, "Tokens per window, of plain models.", shown="all their positions")
    control: bool = advanced_setting(True, NO_CONTROL)
    reset_every: int | None = advanced_setting(None, "Reset the state every N windows.")
    bos: bool = advanced_setting(False, "Put the tokenizer's BOS token before each document, as lm-eval does.")
    checksums: str | None = advanced_setting(None, "Folder with the published checksums of PG-19, to verify its books.")
    mask_probability: float | None = advanced_setting(None, MASKED_SHARE, shown=str(MASK_PROBABILITY))
    mask_seed: int = advanced_setting(0, "masked-lm: random seed of the masked tokens.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "window", "reset_every")
        at_least(0, self, "overlap", "mask_seed")
        _check_mask_probability(self.mask_probability)


def _check_mask_probability(value: float | None) -> None:
    if value is not None and not 0 < value <= 1:
        raise ValueError(f"--mask-probability {value}: it must be above 0 and at most 1.")


@dataclass(frozen=True)
class HorizonSettings(ScoringSettings):
    """Settings of `carryforward horizon`."""

    depth: tuple[int, ...] | None = setting(
        None, "Numbers of past windows that the state may cover.", shown="0 1 2 4 8; 16 32 if it reaches far back"
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(0, self, "depth")


@dataclass(frozen=True)
class AnswerSettings(Settings):
    """Settings of `carryforward qa evaluate`."""

    data: str = setting(MISSING, f"Questions: {_QUESTIONS}")
    join_words: int | None = advanced_setting(None, "First join passages into documents of about N words.")
    max_questions: int | None = setting(None, "Use only the first N questions.")
    control: bool = advanced_setting(True, NO_CONTROL)
    max_answer_tokens: int = advanced_setting(MAX_ANSWER_TOKENS, "Length limit of an answer, in tokens.")
    window: int | None = advanced_setting(None, "Tokens per window, of plain models.", shown="at most 512")
    overlap: int | None = advanced_setting(None, OVERLAP, shown=AS_TRAINED)
    batch_size: int = setting(8, "Questions per batch.")
    bf16: bool = advanced_setting(False, MIXED_PRECISION)
    seed: int = advanced_setting(0, "Random seed of --join-words.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "join_words", "max_questions", "max_answer_tokens", "window", "batch_size")
        at_least(0, self, "overlap")


_MODULES = "what a folder of sentence-transformers says"


@dataclass(frozen=True)
class EmbedSettings(Settings):
    """Settings of `carryforward embed`."""

    what: str = setting("document", "What gets a vector: document, chunks, tokens or windows.")
    chunk_size: int | None = setting(None, "Tokens per chunk, for --what chunks.")
    chunks_field: str | None = setting(
        None, "Field with a document's chunks: a list of pairs of characters, start and stop."
    )
    pooling: str | None = setting(
        None, "Vector of a document or chunk: mean or max of its token vectors, cls, or state (a document's last one).",
        shown=f"{_MODULES}, or mean",
    )  # fmt: skip
    normalize: bool | None = setting(None, "Give all vectors unit length.", shown=_MODULES)
    prompt: str | None = setting(None, "Text to put in front of each document, or a prompt's name.", shown=_MODULES)
    special_tokens: bool | None = advanced_setting(None, "Pool special tokens too.", shown=_MODULES)
    window: int | None = advanced_setting(None, "Tokens per window, of plain models.", shown="at most 512")
    overlap: int | None = advanced_setting(None, OVERLAP, shown=AS_TRAINED)
    state: bool = advanced_setting(True, NO_STATE)
    text_field: str = advanced_setting("text", "Field that holds the text.")
    id_field: str = advanced_setting("id", "Field that holds the document's id.")
    on_error: str = advanced_setting("stop", "What to do with a line that cannot be read: stop or skip.")
    batch_size: int = setting(8, "Documents per batch.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "window", "batch_size", "chunk_size")
        at_least(0, self, "overlap")
        given = [name for name in ("chunk_size", "chunks_field") if getattr(self, name) is not None]
        if given and self.what != "chunks":
            raise ValueError(f"{flag(given[0])} is for --what chunks, not for --what {self.what}. Leave it out.")
        if self.what == "chunks" and len(given) != 1:
            raise ValueError("--what chunks needs --chunk-size or --chunks-field, one of the two.")
        if self.on_error not in ("stop", "skip"):
            raise ValueError(f"--on-error {self.on_error}: it must be stop or skip.")


_sampling = partial(setting, panel="Sampling")
_BY_MODEL = "the model's generation config"


@dataclass(frozen=True)
class GenerateSettings(Settings):
    """Settings of `carryforward generate`. None leaves a choice to the model's generation config."""

    seeds = -(2**63), 2**64 - 1  # torch's range

    max_new_tokens: int = setting(200, "Tokens to generate.")
    greedy: bool = _sampling(False, "Always take the most likely token; same as --temperature 0.")
    temperature: float | None = _sampling(None, "Sampling temperature.", shown=f"{_BY_MODEL}, or 1")
    top_k: int | None = _sampling(None, "Sample from the K most likely tokens.", shown=f"{_BY_MODEL}, or 50")
    top_p: float | None = _sampling(None, "Sample from the most likely tokens with this total probability.")
    min_p: float | None = _sampling(None, "Drop tokens less likely than this fraction of the most likely one.")
    repetition_penalty: float | None = _sampling(None, "Values above 1 make repetition less likely.")
    seed: int | None = _sampling(None, "Random seed.", shown="random")
    overlap: int | None = advanced_setting(None, OVERLAP, shown=AS_TRAINED)
    state: bool = advanced_setting(True, NO_STATE)
    dtype: str = advanced_setting("float32", "Data type of the weights: float32, bfloat16 or float16.")

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


_contexts = partial(setting, panel="Advanced: contexts and continuations")
_topics = partial(setting, panel="Advanced: topics")


@dataclass(frozen=True)
class ContinuationSettings(CorpusSettings):
    """Settings of `carryforward topics` and `samples`."""

    split: str = setting("validation", "Split to draw contexts from: train, validation or test.")
    text_field: str = _contexts("text", TEXT_FIELD)
    plain: str | None = setting(None, "Plain model to compare with. It gets a single token of context.")

    contexts: int = setting(300, "Number of contexts. The paper uses 8000.")
    context_tokens: int | None = _contexts(None, "Tokens per context; it must end with a window.", shown="one window")
    new_tokens: int = _contexts(30, "Tokens to generate after each context, greedily.")
    batch_size: int = setting(32, "Contexts per batch.")
    bf16: bool = _contexts(False, "Load the weights in bfloat16.")
    seed: int = _contexts(0, "Random seed of the contexts, the topic model and the confidence interval.")

    topics: int = setting(20, "Number of topics to fit.")
    fit_on: str = _topics("train", "Split to fit the topics on.")
    fit_documents: int | None = _topics(None, "Fit the topics on the first N documents only.")
    topics_from: str | None = _topics(None, "Reuse the topics of an earlier run: its folder lda.")

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least(1, self, "contexts", "context_tokens", "new_tokens", "batch_size", "topics", "fit_documents")
        for name in ("topics", "fit_on", "fit_documents"):
            if self.topics_from is not None and getattr(self, name) != getattr(type(self), name):
                raise ValueError(f"{flag(name)} is for fitting topics, and --topics-from reuses others. Use one.")
