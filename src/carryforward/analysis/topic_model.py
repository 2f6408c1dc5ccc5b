# SPDX-License-Identifier: Apache-2.0
"""Topics of texts, and the divergence between two texts' topics (section 5.3.1 of the paper).

Topics are fitted by latent Dirichlet allocation (scikit-learn): a topic is a distribution over words, and a text is a
mixture of topics. Mixtures are compared by the Jensen-Shannon divergence in nats, not by its square root. Its maximum
is ln 2 = 0.693.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..utils.arrays import read_arrays
from ..utils.files import atomic_write, write_json
from ..utils.install import install_hint
from ..utils.parsing import parse_json

WORD = r"(?u)\b[^\W\d_]{3,}\b"  # three letters or more
CHUNK_WORDS = 500  # topics are fitted on chunks, which are closer in length to a context than a whole book is
MAX_VOCABULARY = 10_000  # the most frequent words
MAX_CHUNK_SHARE = 0.2  # words in a larger share of chunks say little about a topic
MIN_DOCUMENT_SHARE = 0.05  # words in a smaller share of documents are mostly names
MIN_PASSES, MIN_UPDATES, BATCH_SIZE = 2, 200, 256  # of the fit; a batch of chunks makes an update
BOOTSTRAP_SAMPLES, CONFIDENCE = 10_000, 0.95
TOLERANCE = 2e-5  # nats; rounding makes two continuations without known words differ by this much
ARRAYS = "arrays.npz"
_WORD_RULE = (
    ": words have three letters or more; English function words, words in over a fifth of all chunks and words in few "
    "documents do not count. Use other documents, or more."
)


@dataclass(frozen=True)
class Topics:
    """Fitted topics.

    Attributes:
        vocabulary: the words, sorted, [V].
        weights: smoothed count of each word in each topic, [topics, V].
        metadata: what the topics were fitted on, as JSON values.
    """

    vocabulary: np.ndarray
    weights: np.ndarray
    metadata: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.weights)

    def count(self, texts: Iterable[str]) -> Any:
        """Count the words of the vocabulary in each text: a sparse matrix [texts, V]."""
        from sklearn.feature_extraction.text import CountVectorizer

        return CountVectorizer(vocabulary=self.vocabulary.tolist(), token_pattern=WORD).transform(texts)

    def has_known_words(self, texts: Iterable[str]) -> np.ndarray:
        """Whether each text has a word of the vocabulary, [texts]."""
        return np.asarray(self.count(texts).sum(axis=1)).ravel() > 0

    def distributions(self, texts: Iterable[str]) -> np.ndarray:
        """The topic mixture of each text, [texts, topics]; uniform for a text without known words."""
        from scipy.special import psi

        model = _lda(len(self))
        model.components_ = self.weights
        model.exp_dirichlet_component_ = np.exp(psi(self.weights) - psi(self.weights.sum(axis=1, keepdims=True)))
        model.doc_topic_prior_, model.n_features_in_ = 1 / len(self), len(self.vocabulary)
        return model.transform(self.count(texts))

    def top_words(self, count: int = 10) -> list[list[str]]:
        """The most probable words of each topic."""
        return [self.vocabulary[np.argsort(-row, kind="stable")[:count]].tolist() for row in self.weights]

    def save(self, folder: Path) -> None:
        """Write the arrays, and `topics.json` with the top words for readers."""
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / ARRAYS) as temporary:
            np.savez_compressed(
                temporary, vocabulary=self.vocabulary, weights=self.weights, about=np.array(json.dumps(self.metadata))
            )
        write_json(folder / "topics.json", {**self.metadata, "top_words": self.top_words()})

    @classmethod
    def load(cls, folder: str | Path) -> "Topics":
        """Load topics that `save` wrote."""
        need_scikit_learn()
        folder = Path(folder)
        if not (folder / ARRAYS).is_file():
            raise ValueError(
                f"{folder} holds no fitted topics ({ARRAYS} is missing): give the folder lda of an earlier run of "
                "`carryforward topics`."
            )
        remedy = "Delete it to fit the topics again."
        arrays = read_arrays(folder / ARRAYS, remedy)
        try:
            topics = cls(arrays["vocabulary"], arrays["weights"], parse_json(str(arrays["about"]), "about"))
            topics._check()
        except (KeyError, ValueError) as error:
            raise ValueError(f"{folder / ARRAYS} is damaged ({error}). {remedy}") from error
        return topics

    def _check(self) -> None:
        """Refuse arrays that cannot be topics."""
        words, weights = self.vocabulary, self.weights
        if words.ndim != 1 or words.dtype.kind != "U" or len(set(words.tolist())) != len(words) or not len(words):
            raise ValueError("vocabulary is not a list of different words")
        if weights.ndim != 2 or weights.dtype.kind != "f" or weights.shape[1] != len(words) or not len(weights):
            raise ValueError("weights do not fit the vocabulary")
        if not (np.isfinite(weights) & (weights > 0)).all():
            raise ValueError("weights are not all above 0")
        if not isinstance(self.metadata, dict):
            raise ValueError("about is not an object")


@dataclass(frozen=True)
class WordCounts:
    """Word counts of documents.

    Attributes:
        vocabulary: the words that count, [V].
        matrix: count of each word in each chunk of a document, sparse [chunks, V].
        documents: number of documents.
    """

    vocabulary: np.ndarray
    matrix: Any
    documents: int


def count_words(texts: Iterable[str]) -> WordCounts:
    """Count the words of documents in chunks; each document is read once.

    English function words, words in too many chunks and words in too few documents are left out.
    """
    need_scikit_learn()
    from scipy.sparse import csr_matrix
    from sklearn.feature_extraction.text import CountVectorizer

    owners: list[int] = []  # the document of each chunk
    counter = CountVectorizer(stop_words="english", token_pattern=WORD, dtype=np.int32)
    try:
        matrix = counter.fit_transform(_chunks(texts, owners)).tocsr()
    except ValueError as error:
        if "empty vocabulary" not in str(error):
            raise  # an error in reading a text
        raise ValueError(f"there are no words to fit topics on{_WORD_RULE}") from error
    present = matrix.astype(bool)
    documents, chunks = len(set(owners)), len(owners)
    by_document = csr_matrix((np.ones(chunks, dtype=bool), (np.unique(owners, return_inverse=True)[1], range(chunks))))
    in_documents = (by_document @ present).getnnz(axis=0)
    eligible = (present.getnnz(axis=0) <= MAX_CHUNK_SHARE * chunks) & (in_documents >= MIN_DOCUMENT_SHARE * documents)
    totals = np.where(eligible, np.asarray(matrix.sum(axis=0)).ravel(), 0)
    chosen = np.sort(np.argsort(-totals, kind="stable")[: min(MAX_VOCABULARY, int(eligible.sum()))])
    if not len(chosen):
        raise ValueError(f"no word distinguishes chunks of the documents{_WORD_RULE}")
    return WordCounts(np.array(counter.get_feature_names_out(), dtype=str)[chosen], matrix[:, chosen], documents)


def _chunks(texts: Iterable[str], owners: list[int]) -> Iterator[str]:
    """Split texts into chunks of `CHUNK_WORDS`; append the index of each chunk's text to `owners`."""
    for number, text in enumerate(texts):
        words = text.split()
        for begin in range(0, len(words), CHUNK_WORDS):
            owners.append(number)
            yield " ".join(words[begin : begin + CHUNK_WORDS])


def fit(
    counts: WordCounts,
    topics: int = 20,
    *,
    seed: int = 0,
    progress: Callable[[int, int], object] = lambda *done: None,
) -> Topics:
    """Fit topics on documents.

    Args:
        progress: called with the number of chunks processed so far, and in total.
    """
    check_documents(counts.documents, topics)
    chunks = counts.matrix.shape[0]
    model = _lda(topics, total_samples=chunks, random_state=seed)
    passes = max(MIN_PASSES, math.ceil(MIN_UPDATES / math.ceil(chunks / BATCH_SIZE)))
    for number in range(passes):
        for begin in range(0, chunks, BATCH_SIZE):
            batch = counts.matrix[begin : begin + BATCH_SIZE]
            model.partial_fit(batch)
            progress(number * chunks + begin + batch.shape[0], passes * chunks)
    return Topics(counts.vocabulary, model.components_)


def check_documents(count: int, topics: int) -> None:
    """Refuse more topics than documents."""
    if count < topics:
        raise ValueError(
            f"{topics} topics cannot be fitted on {count} documents: give at least as many documents, or use "
            f"--topics {count} or fewer (topics={count} in Python)."
            if count
            else "there are no documents to fit topics on."
        )


def _lda(topics: int, **options: Any) -> Any:
    from sklearn.decomposition import LatentDirichletAllocation

    return LatentDirichletAllocation(topics, learning_method="online", **options)


def need_scikit_learn() -> None:
    """Raise an ImportError that says what to install if scikit-learn is missing."""
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise ImportError(f"topics need scikit-learn: {install_hint('topics')}") from error


def divergence(p: np.ndarray, q: np.ndarray | float) -> np.ndarray:
    """Jensen-Shannon divergence of each row of `p` from the same row of `q`, in nats.

    A number for `q` is a uniform distribution.

    >>> divergence(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([[0.0, 1.0], [0.5, 0.5]])).round(4).tolist()
    [0.6931, 0.0]
    """
    from scipy.special import rel_entr

    middle = (p + q) / 2
    return np.maximum((rel_entr(p, middle) + rel_entr(q, middle)).sum(axis=-1) / 2, 0.0)


@dataclass(frozen=True)
class Comparison:
    """Divergences of one model compared with a baseline's, context by context.

    Attributes:
        difference: mean difference; below 0 the model is closer to the contexts than the baseline.
        interval: bootstrap interval of the mean difference at `CONFIDENCE`, contexts resampled with replacement.
        closer, farther, equal: number of contexts in which the model is closer, farther, or equally far.
        share: share of contexts in which it is closer.
        p: p-value of the two-sided sign test, without the equal contexts.
    """

    difference: float
    interval: tuple[float, float]
    closer: int
    farther: int
    equal: int
    share: float
    p: float


def compare(
    divergences: Sequence[float] | np.ndarray, baseline: Sequence[float] | np.ndarray, *, seed: int = 0
) -> Comparison:
    """Compare divergences with a baseline's, context by context. Differences below `TOLERANCE` count as equal."""
    differences = np.asarray(divergences, dtype=float) - np.asarray(baseline, dtype=float)
    differences[np.abs(differences) < TOLERANCE] = 0
    closer, farther = int((differences < 0).sum()), int((differences > 0).sum())
    count, rng = len(differences), np.random.default_rng(seed)
    means = [differences[rng.integers(count, size=count)].mean() for _ in range(BOOTSTRAP_SAMPLES)]
    low, high = np.quantile(means, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    return Comparison(
        float(differences.mean()), (float(low), float(high)), closer, farther, count - closer - farther,
        closer / count, sign_test(closer, farther),
    )  # fmt: skip


def sign_test(closer: int, farther: int) -> float:
    """p-value of the two-sided sign test.

    >>> sign_test(8, 2)
    0.109375
    """
    from scipy.stats import binomtest

    return float(binomtest(closer, closer + farther).pvalue) if closer + farther else 1.0
