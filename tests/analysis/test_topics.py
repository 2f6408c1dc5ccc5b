# SPDX-License-Identifier: Apache-2.0
"""Topics against scikit-learn's own, divergences and tests against scipy's and by hand."""

import math
import sys

import numpy as np
import pytest
from scipy.spatial.distance import jensenshannon
from scipy.stats import binomtest
from sklearn.decomposition import LatentDirichletAllocation

from carryforward.analysis import topics
from carryforward.analysis.topics import Topics, compare, count_words, divergence, fit, sign_test

SEA = ["ship", "captain", "sails", "harbour", "waves", "anchor", "storm", "island", "deck", "cargo"]
FARM = ["cattle", "wheat", "plough", "barn", "harvest", "meadow", "shepherd", "fences", "orchard", "horses"]


def texts(count=24, words=40):
    """Half of them about the sea, half about a farm; each with words of its own kind only."""
    random = np.random.default_rng(0)
    return [" ".join(["the", *random.choice(SEA if i % 2 else FARM, words)]) for i in range(count)]


@pytest.fixture(scope="module")
def counts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(topics, "EVERYWHERE", 0.6)
        return count_words(texts())


@pytest.fixture(scope="module")
def fitted(counts):
    return fit(counts, 2)


def test_texts_about_different_things_are_told_apart(fitted):
    assert {frozenset(words) for words in fitted.top_words(10)} == {frozenset(SEA), frozenset(FARM)}
    found = fitted.distributions(["The ship's captain saw waves", "WHEAT and horses, and a barn", "xyz 12 of"])
    assert np.allclose(found.sum(axis=1), 1)
    assert found[0].argmax() != found[1].argmax()
    assert found[:2].max(axis=1).min() > 0.8
    assert np.allclose(found[2], 0.5), "no word that is known"


def test_fitted_as_scikit_learn_does(counts, fitted, monkeypatch):
    monkeypatch.setattr(topics, "BATCH", 7)
    monkeypatch.setattr(topics, "UPDATES", 10)
    seen = []
    found = fit(counts, 3, seed=5, progress=lambda done, total: seen.append((done, total)))
    reference = LatentDirichletAllocation(
        3, learning_method="online", batch_size=7, max_iter=3, random_state=5, total_samples=24
    ).fit(counts.matrix)
    assert np.allclose(found.weights, reference.components_)
    assert np.allclose(found.distributions(texts()), reference.transform(counts.matrix), rtol=1e-6)
    assert seen[-1] == (72, 72)
    assert seen == sorted(set(seen))


def test_saved_is_fitted(fitted, tmp_path):
    made = Topics(fitted.vocabulary, fitted.weights, {"documents": 24})
    made.save(tmp_path / "lda")
    loaded = Topics.load(tmp_path / "lda")
    assert (loaded.distributions(texts()) == fitted.distributions(texts())).all()
    assert loaded.about == {"documents": 24}
    assert loaded.top_words() == fitted.top_words()
    (tmp_path / "lda" / "arrays.npz").write_bytes(b"PK\3\4 and no more")
    with pytest.raises(ValueError, match="arrays.npz is damaged"):
        Topics.load(tmp_path / "lda")
    with pytest.raises(ValueError, match="holds no fitted topics"):
        Topics.load(tmp_path)


def test_which_words_count(monkeypatch):
    """Not function words, not what is everywhere, not what a single document has, however often."""
    monkeypatch.setattr(topics, "STRETCH", 10)
    monkeypatch.setattr(topics, "EVERYWHERE", 0.6)
    monkeypatch.setattr(topics, "NAMES", 0.5)
    documents = [
        "common Cobb Cobb Cobb river river the and it of " + "common Cobb river x1 12 ab who then them very",
        "common field rivers and the common field river in on " + "common field it was so there not nor but yet",
        "common field",
    ]
    found = count_words(documents)
    assert found.documents == 3
    assert found.vocabulary.tolist() == ["field", "river"]
    assert found.matrix.toarray().tolist() == [[0, 2], [0, 1], [2, 1], [1, 0], [1, 0]]
    monkeypatch.setattr(topics, "VOCABULARY", 1)
    assert count_words(documents).vocabulary.tolist() == ["field"], "the commonest, the first of several"


def test_what_cannot_be_fitted(counts, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="25 topics cannot be fitted on 24 documents"):
        fit(counts, 25)
    for documents in ([], ["the and of", "12 ab"]):
        with pytest.raises(ValueError, match="there are no words to fit topics on: words are three letters"):
            count_words(documents)
    with pytest.raises(ValueError, match="no word tells stretches of the documents apart"):
        count_words(["river river"] * 3)
    monkeypatch.setitem(sys.modules, "sklearn", None)
    for call in (lambda: count_words(texts()), lambda: Topics.load(tmp_path)):
        with pytest.raises(ImportError, match=r"pip install carryforward\[topics\]"):
            call()


def test_an_error_in_a_text_is_not_taken_for_another():
    def broken():
        yield "ship"
        raise ValueError("b.txt is not UTF-8")

    with pytest.raises(ValueError, match=r"b\.txt is not UTF-8"):
        count_words(broken())


def test_divergences_by_hand_and_as_scipy_has_them():
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


def test_comparisons_by_hand():
    found = compare([0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.3, 0.3, 0.1, 0.9], seed=1)
    assert found.difference == pytest.approx(-0.06)
    assert (found.closer, found.farther, found.equal) == (3, 1, 1)
    rounded = compare([0.3, 0.30001, 0.5], [0.30001, 0.3, 0.4])
    assert (rounded.closer, rounded.farther, rounded.equal) == (0, 1, 2)
    assert found.share == 0.6
    assert found.p == binomtest(3, 4).pvalue
    assert found == compare([0.1, 0.2, 0.3, 0.4, 0.5], [0.2, 0.3, 0.3, 0.1, 0.9], seed=1)


def test_the_interval_is_about_as_wide_as_the_normal_one():
    random = np.random.default_rng(0)
    one, other = random.random(400), random.random(400)
    low, high = compare(one, other).interval
    error = 1.96 * (one - other).std() / 20
    assert (low, high) == pytest.approx(((one - other).mean() - error, (one - other).mean() + error), abs=error / 10)
