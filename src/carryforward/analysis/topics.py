# SPDX-License-Identifier: Apache-2.0
"""What texts are about, and how far apart they are (section 5.3.1 of the paper).

Topics are fitted by latent Dirichlet allocation (scikit-learn): one is a distribution over words, a text a mixture of
them. Two mixtures are compared by their Jensen-Shannon divergence: the divergence itself, not its square root, in
nats, of which ln 2 = 0.693 is the most.
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from ..utils.files import atomic_write, write_json

WORD = r"(?u)\b[^\W\d_]{3,}\b"  # three letters or more
STRETCH = 500  # words: topics are of stretches, which are nearer in length to a context than a whole book
VOCABULARY = 10_000  # the commonest words
EVERYWHERE, NAMES = 0.2, 0.05  # words of more stretches say nothing; those of fewer documents are mostly names there
PASSES, UPDATES, BATCH = 2, 200, 256  # over the stretches at least, in all at least, and stretches between two
RESAMPLED, LEVEL = 10_000, 0.95  # of the bootstrap interval
EQUAL = 2e-5  # nats; two continuations without a known word are this far apart, by rounding
ARRAYS = "arrays.npz"  # the file that is read again
_WORDS_ARE = (
    ": words are three letters or more, no English function words, not in every stretch and not in a few documents "
    "only. Give other documents, or more."
)


@dataclass(frozen=True)
class Topics:
    """Fitted topics.

    Attributes:
        vocabulary: the words, sorted, [V].
        weights: how often each topic has each word, smoothed, [topics, V].
        about: what they were fitted on, as JSON can hold it.
    """

    vocabulary: np.ndarray
    weights: np.ndarray
    about: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.weights)

    def count(self, texts: Iterable[str]) -> Any:
        """How often each text has each word, a sparse matrix [texts, V]."""
        from sklearn.feature_extraction.text import CountVectorizer

        return CountVectorizer(vocabulary=self.vocabulary.tolist(), token_pattern=WORD).transform(texts)

    def knows(self, texts: Iterable[str]) -> np.ndarray:
        """Whether each text has a word of the vocabulary, [texts]."""
        return np.asarray(self.count(texts).sum(axis=1)).ravel() > 0

    def distributions(self, texts: Iterable[str]) -> np.ndarray:
        """The mixture that each text is, [texts, topics]; all topics alike where no word is known."""
        from scipy.special import psi

        model = _allocation(len(self))
        model.components_ = self.weights
        model.exp_dirichlet_component_ = np.exp(psi(self.weights) - psi(self.weights.sum(axis=1, keepdims=True)))
        model.doc_topic_prior_, model.n_features_in_ = 1 / len(self), len(self.vocabulary)
        return model.transform(self.count(texts))

    def top_words(self, count: int = 10) -> list[list[str]]:
        """The likeliest words of each topic."""
        return [self.vocabulary[np.argsort(-row, kind="stable")[:count]].tolist() for row in self.weights]

    def save(self, folder: Path) -> None:
        """Write a folder: the arrays, and the top words for people."""
        folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(folder / ARRAYS) as beside:
            np.savez_compressed(
                beside, vocabulary=self.vocabulary, weights=self.weights, about=np.array(json.dumps(self.about))
            )
        told = {**self.about, "top_words": self.top_words()}
        write_json(folder / "topics.json", told)

    @classmethod
    def load(cls, folder: str | Path) -> "Topics":
        """Read what `save` wrote."""
        need_scikit_learn()
        folder = Path(folder)
        if not (folder / ARRAYS).is_file():
            raise ValueError(
                f"{folder} holds no fitted topics ({ARRAYS} is missing): give the folder lda that an earlier run of "
                "`carryforward topics` made."
            )
        try:
            with np.load(folder / ARRAYS) as arrays:
                return cls(arrays["vocabulary"], arrays["weights"], json.loads(str(arrays["about"])))
        except (ValueError, KeyError, EOFError, BadZipFile) as error:
            raise ValueError(f"{folder / ARRAYS} is damaged ({error}). Take it away to fit anew.") from error


@dataclass(frozen=True)
class Counts:
    """The words of documents.

    Attributes:
        vocabulary: which there are, [V].
        matrix: how often each stretch of a document has each, sparse [stretches, V].
        documents: how many documents the stretches are of.
    """

    vocabulary: np.ndarray
    matrix: Any
    documents: int


def count_words(texts: Iterable[str]) -> Counts:
    """Count the words of documents, each read once, stretch by stretch.

    Neither English function words count, nor words that are in many stretches, nor those of few documents.
    """
    need_scikit_learn()
    from scipy.sparse import csr_matrix
    from sklearn.feature_extraction.text import CountVectorizer

    of: list[int] = []  # the document of each stretch
    counter = CountVectorizer(stop_words="english", token_pattern=WORD, dtype=np.int32)
    try:
        matrix = counter.fit_transform(_stretches(texts, of)).tocsr()
    except ValueError as error:
        if "empty vocabulary" not in str(error):
            raise  # what is wrong with a text
        raise ValueError(f"there are no words to fit topics on{_WORDS_ARE}") from error
    present = matrix.astype(bool)
    documents = len(set(of))
    by_document = csr_matrix((np.ones(len(of), dtype=bool), (np.unique(of, return_inverse=True)[1], range(len(of)))))
    in_documents = (by_document @ present).getnnz(axis=0)
    often = (present.getnnz(axis=0) <= EVERYWHERE * len(of)) & (in_documents >= NAMES * documents)
    totals = np.where(often, np.asarray(matrix.sum(axis=0)).ravel(), 0)
    chosen = np.sort(np.argsort(-totals, kind="stable")[: min(VOCABULARY, int(often.sum()))])
    if not len(chosen):
        raise ValueError(f"no word tells stretches of the documents apart{_WORDS_ARE}")
    return Counts(np.array(counter.get_feature_names_out(), dtype=str)[chosen], matrix[:, chosen], documents)


def _stretches(texts: Iterable[str], of: list[int]) -> Iterator[str]:
    for number, text in enumerate(texts):
        words = text.split()
        for begin in range(0, len(words), STRETCH):
            of.append(number)
            yield " ".join(words[begin : begin + STRETCH])


def fit(
    counts: Counts,
    topics: int = 20,
    *,
    seed: int = 0,
    progress: Callable[[int, int], object] = lambda *done: None,
) -> Topics:
    """Fit topics on documents.

    Args:
        progress: called with how many stretches were gone through, and will be in all.
    """
    check_documents(counts.documents, topics)
    stretches = counts.matrix.shape[0]
    model = _allocation(topics, total_samples=stretches, random_state=seed)
    passes = max(PASSES, math.ceil(UPDATES / math.ceil(stretches / BATCH)))
    for number in range(passes):
        for begin in range(0, stretches, BATCH):
            part = counts.matrix[begin : begin + BATCH]
            model.partial_fit(part)
            progress(number * stretches + begin + part.shape[0], passes * stretches)
    return Topics(counts.vocabulary, model.components_)


def check_documents(count: int, topics: int) -> None:
    if count < topics:
        raise ValueError(
            f"{topics} topics cannot be fitted on {count} documents: give as many documents as topics at least, or ask "
            "for fewer topics."
        )


def _allocation(topics: int, **more: Any) -> Any:
    from sklearn.decomposition import LatentDirichletAllocation

    return LatentDirichletAllocation(topics, learning_method="online", **more)


def need_scikit_learn() -> None:
    try:
        import sklearn  # noqa: F401
    except ImportError as error:
        raise ImportError("topics need scikit-learn: pip install carryforward[topics]") from error


def divergence(p: np.ndarray, q: np.ndarray | float) -> np.ndarray:
    """The Jensen-Shannon divergence of distributions, row by row, in nats; a number stands for all topics alike.

    >>> divergence(np.array([[1.0, 0.0], [0.5, 0.5]]), np.array([[0.0, 1.0], [0.5, 0.5]])).round(4).tolist()
    [0.6931, 0.0]
    """
    from scipy.special import rel_entr

    middle = (p + q) / 2
    return np.maximum((rel_entr(p, middle) + rel_entr(q, middle)).sum(axis=-1) / 2, 0.0)


@dataclass(frozen=True)
class Comparison:
    """One model's divergences against another's of the same contexts.

    Attributes:
        difference: mean of the one's minus the other's; below 0 the one stays closer.
        interval: of the difference, at `LEVEL`; contexts are drawn again with replacement.
        closer, farther, equal: how many contexts; equal ones count for neither.
        share: closer ones among all.
        p: of the two-sided sign test, which leaves equal ones out.
    """

    difference: float
    interval: tuple[float, float]
    closer: int
    farther: int
    equal: int
    share: float
    p: float


def compare(one: Sequence[float] | np.ndarray, other: Sequence[float] | np.ndarray, *, seed: int = 0) -> Comparison:
    """Hold divergences against others, context by context. Differences below `EQUAL` are of arithmetic alone."""
    differences = np.asarray(one, dtype=float) - np.asarray(other, dtype=float)
    differences[np.abs(differences) < EQUAL] = 0
    closer, farther = int((differences < 0).sum()), int((differences > 0).sum())
    count, random = len(differences), np.random.default_rng(seed)
    means = [differences[random.integers(count, size=count)].mean() for _ in range(RESAMPLED)]
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Comparison(
        float(differences.mean()), (float(low), float(high)), closer, farther, count - closer - farther,
        closer / count, sign_test(closer, farther),
    )  # fmt: skip


def sign_test(closer: int, farther: int) -> float:
    """How likely it is that a fair coin falls as unevenly, on either side.

    >>> sign_test(8, 2)
    0.109375
    """
    from scipy.stats import binomtest

    return float(binomtest(closer, closer + farther).pvalue) if closer + farther else 1.0
