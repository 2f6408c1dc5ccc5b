# SPDX-License-Identifier: Apache-2.0
"""The experiment `encoders`: its measures, what arms read, and each command from data to page on a tiny encoder."""

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from helpers import prose, tiny
from helpers.embedding import TOKENIZER
from helpers.experiments import experiment

import carryforward as cf

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "other" / "encoders"
if not FOLDER.exists():
    pytest.skip("experiments are not part of a source distribution", allow_module_level=True)
MODULES = ("arms", "classifier", "needles", "pages", "ranking", "retrieval", "run", "harness")
ARMS = {
    "alone": {"window": 40, "alone": True},
    "windows-512": {"window": 40},
    "left": {"window": 26, "memory": {"kind": "kv", "recent": 10, "sinks": 2}},
    "left-removed": {"window": 26, "memory": {"kind": "kv", "recent": 10, "sinks": 2}, "use_state": False},
}


@pytest.fixture
def encoders(monkeypatch, tmp_path):
    """The modules of the experiment, with pages in a temporary folder."""
    with experiment(monkeypatch, FOLDER, MODULES, tmp_path) as modules:
        yield modules


@pytest.fixture
def model(tmp_path):
    TOKENIZER.save_pretrained(tmp_path / "model")
    tiny.base("bert", "none", vocab_size=len(TOKENIZER)).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def run(encoders, monkeypatch, tmp_path, settings, *arguments):
    """Run the command with settings; returns the results by arm and the page."""
    (tmp_path / "settings.yaml").write_text(yaml.safe_dump({"arms": ARMS, "seed": 0, "batch_size": 4, **settings}))
    command = ["run.py", *map(str, arguments), "--device", "cpu", "--out", str(tmp_path / "results")]
    command += ["--settings", str(tmp_path / "settings.yaml"), "--model", str(tmp_path / "model")]
    monkeypatch.setattr("sys.argv", command)
    encoders.run.main()
    results = {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results").rglob("*.json")}
    return results, (tmp_path / "README.md").read_text()


def test_arms_of_the_settings_are_complete(encoders):
    settings = yaml.safe_load((FOLDER / "settings.yaml").read_text())
    arms = {arm.name: arm for arm in encoders.arms.arms_of(settings)}
    for arm in arms.values():
        fields = {"memory": arm.memory} if arm.memory else {}
        cf.RecurrenceConfig(window=arm.window, overlap=arm.overlap, **fields)
        if arm.memory and arm.use_state:
            control = arms[f"{arm.name}-removed"]
            assert (control.window, control.memory, control.use_state) == (arm.window, arm.memory, False)
    assert encoders.pages.BASE in arms
    with pytest.raises(SystemExit, match="the arms are alone"):
        encoders.arms.arms_of(settings, ["both"])


def test_rankings_are_scored(encoders):
    ranking = encoders.ranking
    assert ranking.ndcg(["a", "b"], {"a"}) == 1
    assert ranking.ndcg(["b", "a"], {"a"}) == pytest.approx(1 / np.log2(3))
    assert ranking.ndcg(["b", "b", "a", "c"], {"a", "c"}) == pytest.approx(
        (1 / np.log2(3) + 1 / np.log2(4)) / (1 + 1 / np.log2(3))
    )
    assert ranking.ndcg([*range(10), "a"], {"a"}) == 0
    items, query = np.array([[0, 3.0], [2, 2], [5, 0]]), np.array([[1.0, 0.1]])
    assert ranking.rankings(query, items, 9).tolist() == [[2, 1, 0]]
    text = " one two  three four\nfive"
    assert [text[a:b] for a, b in ranking.word_spans(text, 2)] == ["one two", "three four", "five"]
    assert ranking.word_spans(" ", 2) == []
    low, high = ranking.interval([0, 0, 1, 1], ["x", "x", "y", "y"])
    assert (low, high) == (0, 1), "groups are drawn whole"


def squad(path):
    rows = []
    for number, text in enumerate(prose.TOPICS[:3]):
        text = " ".join(text.split())[:500]
        answer = " ".join(text.split()[20:24])
        assert answer in text
        qas = [{"id": str(number), "question": text[:40],
                "answers": [{"text": answer, "answer_start": text.index(answer)}]}]  # fmt: skip
        rows.append({"paragraphs": [{"context": text, "qas": qas}]})
    path.write_text(json.dumps({"data": rows}))


def hotpotqa(path):
    rows = []
    for number in range(4):
        context = [[f"title {number} {i}", [prose.TOPICS[number][60 * i : 60 * i + 60], " more."]] for i in range(3)]
        facts = [[f"title {number} 1", 0], [f"title {number} 2", 1]]
        rows.append({"_id": str(number), "question": f"title {number} 1", "context": context, "answer": "more",
                     "supporting_facts": facts})  # fmt: skip
    path.write_text(json.dumps(rows))


def test_retrieval(encoders, model, monkeypatch, tmp_path):
    squad(tmp_path / "covid.json")
    hotpotqa(tmp_path / "hotpot.json")
    about = {"words_per_chunk": 10, "questions_per_document": 2, "documents": 2}
    files = ["--covid-qa", tmp_path / "covid.json", "--hotpotqa", tmp_path / "hotpot.json"]
    results, page = run(encoders, monkeypatch, tmp_path, {"retrieval": about}, "retrieval", *files)
    assert set(results) == set(ARMS)
    collection = encoders.retrieval.hotpotqa(tmp_path / "hotpot.json", about)
    assert [len(keys) for keys in collection.keys] == [6, 6]
    for text, spans, keys in zip(collection.texts, collection.spans, collection.keys, strict=True):
        assert all(text[a:b].startswith(f"{key}\n") for (a, b), key in zip(spans, keys, strict=True))
    covid = encoders.retrieval.covid_qa(tmp_path / "covid.json", about)
    assert len(covid.texts) == 2, "as many documents as the settings allow"
    for _, relevant, number in covid.queries:
        text, (index, *_) = covid.texts[number], sorted(int(key.split()[1]) for key in relevant)
        a, b = covid.spans[number][index]
        assert text.split()[20] in text[a:b]
    assert "| left | 0." in page
    assert page.count("Not measured yet.") == 2
    written = {path: path.stat().st_mtime_ns for path in (tmp_path / "results").rglob("*.json")}
    run(encoders, monkeypatch, tmp_path, {"retrieval": about}, "retrieval", *files)
    assert all(path.stat().st_mtime_ns == time for path, time in written.items()), "measured once"


def test_chunks_alone_are_read_alone_and_states_are_used(encoders, model):
    texts = [text[:150] for text in prose.TOPICS[:2]]
    spans = [encoders.ranking.word_spans(text, 8) for text in texts]
    vectors = {}
    for name, fields in ARMS.items():
        reader = encoders.arms.Reader(str(model), encoders.arms.Arm(name, **fields), device="cpu", batch_size=2)
        vectors[name] = reader.chunks(texts, spans)
    chunks = [text[a:b] for text, ends in zip(texts, spans, strict=True) for a, b in ends]
    np.testing.assert_allclose(vectors["alone"], cf.encode(model, chunks), rtol=1e-4, atol=1e-5)
    plain = cf.encode(model, texts, output="chunks", chunks=spans)
    np.testing.assert_allclose(vectors["windows-512"], np.concatenate([one.vectors for one in plain]), atol=1e-5)
    assert np.abs(vectors["left"] - vectors["left-removed"]).max() > 1e-3, "the state is used"


def test_needles(encoders, model, monkeypatch, tmp_path):
    about = {"lengths": [60, 150], "documents": 4, "words_per_chunk": 12}
    results, page = run(encoders, monkeypatch, tmp_path, {"needles": about}, "needles", "--only", "alone", "left")
    assert set(results) == {"alone", "left"}
    assert set(results["left"]["lengths"]["150"]) == {"document", "best chunk"}
    assert set(results["alone"]["lengths"]["150"]) == {"best chunk"}
    assert "| left, document | " in page
    filler = encoders.needles.filler_of("python-docs", 2000)
    documents = encoders.needles.documents_of(filler, TOKENIZER, 300, about, 0)
    assert len({query for _, query in documents}) == 4
    for text, query in documents:
        name = query.removeprefix("What is the pass key of ").removesuffix("?")
        assert text.count(f"The pass key of {name} is ") == 1
        assert len(TOKENIZER(text)["input_ids"]) == pytest.approx(300, abs=60)


def test_classifier(encoders, model, monkeypatch, tmp_path):
    (tmp_path / "books" / "train").mkdir(parents=True)
    born = yaml.safe_load((FOLDER / "authors.yaml").read_text())
    rows = ["id,author,title,words"]
    for number, author in enumerate([*sorted(born)[:9], "Nobody"]):
        (tmp_path / "books" / "train" / f"{number}.txt").write_text(prose.TOPICS[number % 5][:900])
        rows.append(f'{number},"{author}",A title,10')
    (tmp_path / "train.csv").write_text("\n".join(rows))
    about = {"words": 40, "books": 2, "borders": [1800, 1850], "folds": 3, "ridge": 1.0}
    arguments = ["classifier", "--books", tmp_path / "books", "--table", tmp_path / "train.csv"]
    results, page = run(encoders, monkeypatch, tmp_path, {"classifier": about}, *arguments)
    assert set(results) == set(ARMS) - {"alone"}
    assert results["left"]["books"] == 9
    assert "| left-removed | " in page
    books = encoders.classifier.read_books(
        tmp_path / "books" / "train", tmp_path / "train.csv", FOLDER / "authors.yaml", about, 0
    )
    folds = {}
    for book in books:
        assert folds.setdefault(book["author"], book["fold"]) == book["fold"], "an author is in one fold"
        assert book["class"] == sum(born[book["author"]] >= year for year in (1800, 1850))


def test_the_classifier_finds_what_is_there(encoders):
    rng = np.random.default_rng(0)
    classes = np.array([0] * 40 + [1] * 10 + [2] * 30)
    centres = rng.normal(size=(3, 6))
    vectors = centres[classes] + 0.1 * rng.normal(size=(80, 6))
    found = encoders.classifier.predict(vectors[::2], classes[::2], vectors[1::2], 3, 1.0)
    assert (found == classes[1::2]).mean() > 0.95
