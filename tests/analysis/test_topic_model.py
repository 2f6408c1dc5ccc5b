# SPDX-License-Identifier: Apache-2.0
"""Topics compared with scikit-learn's, divergences and tests with scipy's and with values computed by hand."""

import math
import sys

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.stats import binomtest
from sklearn.decomposition import LatentDirichletAllocation

from carryforward.analysis import topic_model
from carryforward.analysis.topic_model import Topics, compare, count_words, divergence, fit, sign_test

SEA = ["ship", "captain", "sails", "harbour", "waves", "anchor", "storm", "island", "deck", "cargo"]
FARM = ["cattle", "wheat", "plough", "barn", "harvest", "meadow", "shepherd", "fences", "orchard", "horses"]


def texts(count=24, words=40):
    """Texts about the sea and about a farm in turn, which share no word but "the"."""
    random = np.random.default_rng(0)
    return [" ".join(["the", *random.choice(SEA if i % 2 else FARM, words)]) for i in range(count)]


@pytest.fixture(scope="module")
def counts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topic_model, "MAX_CHUNK_SHARE", 0.6)
        return count_words(texts())


@pytest.fixture(scope="module")
def fitted(counts):
    return fit(counts, 2)


def test_texts_about_different_things_have_different_topics(fitted):
    assert {frozenset(words) for words in fitted.top_words(10)} == {frozenset(SEA), frozenset(FARM)}
    mixtures = fitted.distributions(["The ship's captain saw waves", "WHEAT and horses, and a barn", "xyz 12 of"])
    assert np.allclose(mixtures.sum(axis=1), 1)
    assert mixtures[0].argmax() != mixtures[1].argmax()
    assert mixtures[:2].max(axis=1).min() > 0.8
    assert np.allclose(mixtures[2], 0.5), "no known word"


def test_fitted_as_scikit_learn_does(counts, fitted, monkeypatch):
    monkeypatch.setattr(topic_model, "BATCH_SIZE", 7)
    monkeypatch.setattr(topic_model, "MIN_UPDATES", 10)
    reports = []
    refitted = fit(counts, 3, seed=5, progress=lambda done, total: reports.append((done, total)))
    reference = LatentDirichletAllocation(
        3, learning_method="online", batch_size=7, max_iter=3, random_state=5, total_samples=24
    ).fit(counts.matrix)
    assert np.allclose(refitted.weights, reference.components_)
    assert np.allclose(refitted.distributions(texts()), reference.transform(counts.matrix), rtol=1e-6)
    assert reports[-1] == (72, 72)
    assert reports == sorted(set(reports))


def test_save_and_load(fitted, tmp_path):
    with_metadata = Topics(fitted.vocabulary, fitted.weights, {"documents": 24})
    with_metadata.save(tmp_path / "lda")
    loaded = Topics.load(tmp_path / "lda")
    assert (loaded.distributions(texts()) == fitted.distributions(texts())).all()
    assert loaded.metadata == {"documents": 24}
    assert loaded.top_words() == fitted.top_words()
    (tmp_path / "lda" / "arrays.npz").write_bytes(b"PK\3\4 and no more")
    with pytest.raises(ValueError, match="arrays.npz is damaged"):
        Topics.load(tmp_path / "lda")
    with pytest.raises(ValueError, match="holds no fitted topics"):
        Topics.load(tmp_path)


def test_which_words_count(monkeypatch):
    """No function words, no words of most chunks, no words of a single document, however frequent."""
    monkeypatch.setattr(topic_model, "CHUNK_WORDS", 10)
    monkeypatch.setattr(topic_model, "MAX_CHUNK_SHARE", 0.6)
    monkeypatch.setattr(topic_model, "MIN_DOCUMENT_SHARE", 0.5)
    documents = [
        "common Cobb Cobb Cobb river river the and it of " + "common Cobb river x1 12 ab who then them very",
        "common field rivers and the common field river in on " + "common field it was so there not nor but yet",
        "common field",
    ]
    counts = count_words(documents)
    assert counts.documents == 3
    assert counts.vocabulary.tolist() == ["field", "river"]
    assert counts.matrix.toarray().tolist() == [[0, 2], [0, 1], [2, 1], [1, 0], [1, 0]]
    monkeypatch.setattr(topic_model, "MAX_VOCABULARY", 1)
    assert count_words(documents).vocabulary.tolist() == ["field"], "the most frequent; the first in a tie"


def test_what_cannot_be_fitted(counts, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="25 topics cannot be fitted on 24 documents"):
        fit(counts, 25)
    for documents in ([], ["the and of", "12 ab"]):
        with pytest.raises(ValueError, match="there are no words to fit topics on: words have three letters"):
            count_words(documents)
    with pytest.raises(ValueError, match="no word distinguishes chunks of the documents"):
        count_words(["river river"] * 3)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for call in (lambda: count_words(texts()), lambda: Topics.load(tmp_path)):
        with pytest.raises(ImportError, match='pip install "scikit-learn'):
            call()


def test_errors_in_reading_a_text_are_passed_on():
    def broken():
        yield "ship"
        raise ValueError("b.txt is not UTF-8")

    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8"):
        count_words(broken())


def test_divergences_computed_by_hand_and_by_scipy():
    p, q = np.array([[1.0, 0.0], [0.5, 0.5], [1.0, 0.0]]), np.array([[0.0, 1.0], [0.5, 0.5], [0.5, 0.5]])
    # the last: half of ln(4/3), and half of (ln(2/3) + ln 2) / 2
    expected = [math.log(2), 0, math.log(4 / 3) / 2 + (math.log(2 / 3) + math.log(2)) / 4]
    assert divergence(p, q) == pytest.approx(expected)
    p, q = np.random.default_rng(0).dirichlet(np.full(20, 0.1), (2, 50))
    assert divergence(p, q) == pytest.approx([jensenshannon(*pair) ** 2 for pair in zip(p, q, strict=True)])
    assert divergence(p, q) == pytest.approx(divergence(q, p))
    assert (divergence(p, p) == 0).all()


@pytest.mark.parametrize(("closer", "farther"), [(0, 0), (1, 0), (5, 5), (2, 8), (60, 40), (0, 30), (4800, 3100)])
def test_the_sign_test_is_scipys(closer, farther):
    expected = binomtest(closer, closer + farther).pvalue if closer + farther else 1
    assert sign_test(closer, farther) == pytest.approx(expected, rel=1e-9)


def test_comparisons_computed_by_hand():
    comparison = compare([0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.3, 0.3, 0.1, 0.9], seed=1)
    assert comparison.difference == pytest.approx(-0.06)
    assert (comparison.closer, comparison.farther, comparison.equal) == (3, 1, 1)
    rounded = compare([0.3, 0.30001, 0.5], [0.30001, 0.3, 0.4])
    assert (rounded.closer, rounded.farther, rounded.equal) == (0, 1, 2)
    assert comparison.share == 0.6
    assert comparison.p == binomtest(3, 4).pvalue
    assert comparison == compare([0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.3, 0.3, 0.1, 0.9], seed=1)


def test_the_interval_is_about_as_wide_as_the_normal_one():
    random = np.random.default_rng(0)
    divergences, baseline = random.random(400), random.random(400)
    differences = divergences - baseline
    low, high = compare(divergences, baseline).interval
    error = 1.96 * differences.std() / 20
    assert (low, high) == pytest.approx((differences.mean() - error, differences.mean() + error), abs=error / 10)
