# SPDX-License-Identifier: Apache-2.0
"""The commands `carryforward topics` and `carryforward samples`."""

import importlib.util
import json
import re
import shutil
import sys
from functools import partial
from pathlib import Path
from unittest.mock import ANY

import numpy as np
import pytest
import torch
from helpers import prose
from helpers.commands import fail, succeed
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

import carryforward as cf
from carryforward.analysis import continuations, samples, topic_model
from carryforward.analysis.continuations import PLAIN, RECURRENT, REMOVED, TEXT, draw_contexts
from carryforward.analysis.mentions import find_people
from carryforward.data.corpora import open_corpus
from carryforward.data.documents import tokenise
from carryforward.models.loading import load_causal

SMALL = ["--split", "train", "--contexts", 10, "--new-tokens", 6, "--batch-size", 4, "--device", "cpu"]

TAGS = {
    "html",
    "head",
    "meta",
    "title",
    "style",
    "body",
    "h1",
    "h2",
    "p",
    "div",
    "table",
    "tr",
    "th",
    "td",
    "small",
    "u",
}


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A plain model, a recurrent one with a tokenizer of words and with one of bytes, and texts."""
    folder = tmp_path_factory.mktemp("analysis")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CARRYFORWARD_CACHE", str(folder / "cache"))
        patch.setattr(topic_model, "MAX_CHUNK_SHARE", 0.5)  # ten texts of one chunk each
        prose.save_model(folder / "plain")
        prose.save_topics(folder / "texts", 10)
        plain = load_causal(str(folder / "plain")).model
        model = cf.add_recurrence(plain, window=16, memory=cf.VectorMemoryConfig(hidden_sizes=(8,)))
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=0.5)  # so that the state changes what it writes
        plain.save_pretrained(folder / "plain")
        for name in ("model", "bytes"):
            model.save_pretrained(folder / name)
        for name, tokenizer in {"plain": words(), "model": words(), "bytes": prose.tokenizer()}.items():
            tokenizer.save_pretrained(folder / name)
        yield folder


def words():
    """A tokenizer whose tokens are whole words, so that even an untrained model writes known words."""
    level = Tokenizer(models.WordLevel(unk_token="<|unknown|>"))
    level.pre_tokenizer = pre_tokenizers.Whitespace()
    special = ["<|end|>", "<|unknown|>"]
    level.train_from_iterator(
        prose.TOPICS[:10], trainers.WordLevelTrainer(vocab_size=300, special_tokens=special, show_progress=False)
    )
    return PreTrainedTokenizerFast(tokenizer_object=level, eos_token=special[0], unk_token=special[1])


def command(home, out, *more, verb="topics"):
    fitted = [] if "--topics-from" in more else ["--topics", 3]
    return [verb, home / "model", "--data", home / "texts", *SMALL, *fitted, "--out", out, *more]


@pytest.fixture(scope="module")
def measured(home):
    """The result of a finished run and its printed table. Do not change its folder."""
    printed = succeed(*command(home, home / "out", "--plain", home / "plain"))
    return json.loads((home / "out" / "topics.json").read_text()), printed


# --- topics ----------------------------------------------------------------------------------------------------------


def test_a_result_is_that_of_its_parts(home, measured):
    result, printed = measured
    loaded = load_causal(str(home / "model"))
    decode = partial(loaded.tokenizer.decode, skip_special_tokens=True)
    documents = tokenise(open_corpus(str(home / "texts"), "train"), loaded.tokenizer)
    starts = draw_contexts(documents, 22, 10)
    assert result["contexts"] == [[documents.names[i], start] for i, start in starts.tolist()]
    fitted = topic_model.Topics.load(home / "out" / "lda")
    rows = [documents[i][start : start + 22].astype(int) for i, start in starts]
    written = {
        RECURRENT: [_written(loaded.model, row[:16]) for row in rows],
        REMOVED: [_written(loaded.model, row[:16], use_state=False) for row in rows],
        PLAIN: [_written(loaded.model.base, row[15:16]) for row in rows],
        TEXT: [row[16:] for row in rows],
    }
    contexts = fitted.distributions(decode(row[:16]) for row in rows)
    for writer, new in written.items():
        divergences = topic_model.divergence(contexts, fitted.distributions(map(decode, new)))
        mean = divergences.mean()
        assert result["divergences"][writer] == pytest.approx(divergences, abs=1e-5)
        assert result["writers"][writer]["mean"] == pytest.approx(mean, abs=1e-9)
        assert f"| {writer} | {mean:.4f} | {mean / np.log(2):.4f} |" in printed.out
    assert len({row["mean"] for row in result["writers"].values()}) == 4, "each writer writes something else"
    assert list(result["against"]) == [REMOVED, PLAIN]
    comparison = topic_model.compare(*(result["divergences"][writer] for writer in (RECURRENT, PLAIN)))
    assert result["against"][PLAIN]["closer"] == comparison.closer
    texts = {writer: list(map(decode, new)) for writer, new in written.items()}
    both = [bool(fitted.count([recurrent]).sum() and fitted.count([plain]).sum())
            for recurrent, plain in zip(texts[RECURRENT], texts[PLAIN], strict=True)]  # fmt: skip
    assert 0 < sum(both) < 10
    pair = (np.array(result["divergences"][writer])[both] for writer in (RECURRENT, PLAIN))
    assert result["worded"][PLAIN] == pytest.approx({**vars(topic_model.compare(*pair)), "interval": ANY}, abs=1e-4)
    uniform = np.full((10, 3), 1 / 3)
    assert result["nothing"] == pytest.approx(topic_model.divergence(contexts, uniform).mean())
    assert (home / "out" / "topics.png").stat().st_size > 10_000
    assert {"commit", "versions", "hardware", "settings"} <= result.keys()
    assert result["versions"]["scikit-learn"]


def _written(model, ids, **more):
    ids = np.asarray(ids)[None]
    out = model.generate(
        torch.from_numpy(ids), do_sample=False, min_new_tokens=6, max_new_tokens=6, pad_token_id=0, **more
    )
    return out[0, ids.shape[1] :].tolist()


def test_the_result_contains_no_text(home, measured):
    result, _ = measured
    words = {word for top in result["topics"]["top_words"] for word in top}
    text = json.dumps({key: value for key, value in result.items() if key != "command"})
    for document in (home / "texts").iterdir():
        body = document.read_text().split()
        assert not any(" ".join(body[i : i + 3]) in text for i in range(0, len(body) - 3, 3))
    assert words


def test_an_interrupted_run_is_resumed(home, measured, tmp_path, monkeypatch):
    calls, write = [], continuations.continue_greedily

    def counted(*args, **kwargs):
        calls.append(args)
        if len(calls) == 5:
            raise KeyboardInterrupt
        return write(*args, **kwargs)

    monkeypatch.setattr(continuations, "continue_greedily", counted)
    arguments = command(home, tmp_path, "--plain", home / "plain", "--topics-from", home / "out" / "lda")
    assert "14 of 30 continuations are saved. Run the same command to resume." in fail(*arguments, code=130)
    succeed(*arguments)
    assert len(calls) == 5 + 5, "nine batches: four were saved, the fifth was interrupted and runs again"
    resumed = json.loads((tmp_path / "topics.json").read_text())
    assert resumed["divergences"] == measured[0]["divergences"]
    succeed(*arguments)
    assert len(calls) == 10
    message = fail(*arguments, "--seed", 1, code=2)
    assert "holds continuations of other settings, data or weights (seed: 0 before, 1 now). Use the same" in message
    (tmp_path / "continuations.npz").write_bytes(b"cut short")
    assert "continuations.npz is damaged" in fail(*arguments, code=2)


def test_topics_are_fitted_once(home, measured, tmp_path, monkeypatch):
    monkeypatch.setattr(topic_model, "fit", None)  # a second call fails
    shutil.copytree(home / "out", tmp_path / "out")
    succeed(*command(home, tmp_path / "out", "--plain", home / "plain"))
    arguments = command(home, tmp_path / "out", "--plain", home / "plain", "--topics", 2)
    assert "lda holds topics of other settings or data" in fail(*arguments, code=2)


def test_wrong_arguments_are_refused(home, measured, tmp_path, monkeypatch):
    out = tmp_path / "out"
    fitted = ["--topics-from", home / "out" / "lda"]
    few = ["topics", home / "model", "--data", home / "texts", "--out", out, "--split", "train"]
    assert "20 topics cannot be fitted on 8 documents" in fail(*few, code=2)
    plain = ["topics", home / "plain", "--data", home / "texts", "--out", out, *fitted]
    assert "is a plain model: it has no state" in fail(*plain, code=2)
    assert "is a recurrent model: give a plain one" in fail(
        *command(home, out, *fitted, "--plain", home / "model"), code=2
    )
    assert "no document is that long" in fail(*command(home, out, *fitted, "--context-tokens", 16_000), code=2)
    assert "a context must end where a window ends: use 16, 32" in fail(
        *command(home, out, *fitted, "--context-tokens", 20), code=2
    )
    assert "--contexts 0: it must be at least 1" in fail(*command(home, out, "--contexts", 0), code=2)
    assert "holds no fitted topics" in fail(*command(home, out, "--topics-from", tmp_path), code=2)
    for more in (["--topics", 7], ["--fit-documents", 2], ["--fit-on", "test"]):
        message = fail(*command(home, out, *fitted, *more), code=2)
        assert f"{more[0]} is for fitting topics, and --topics-from reuses others" in " ".join(message.split())
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert 'pip install "scikit-learn' in fail(*command(home, out), code=1)


# --- the claim -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("closer", "contexts", "interval", "holds"),
    [
        (640, 1000, (-0.08, -0.05), True),
        (620, 1000, (-0.08, -0.05), None),  # 60 % is inside the interval
        (59, 90, (-0.08, -0.05), None),  # more than 60 %, but not significant
        (57, 100, (-0.08, -0.05), None),
        (540, 1000, (-0.08, -0.05), False),  # closer on average, but in clearly less than 60 %
        (640, 1000, (0.01, 0.05), False),
    ],
)
def test_claim_c6_is_judged_as_the_paper_states_it(closer, contexts, interval, holds):
    path = Path(__file__).parents[2] / "experiments" / "other" / "topics" / "run.py"
    if not path.exists():
        pytest.skip("experiments are not part of a source distribution")
    spec = importlib.util.spec_from_file_location("topics_experiment", path)
    experiment = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(experiment)
    comparison = {
        "share": closer / contexts,
        "interval": interval,
        "p": topic_model.sign_test(closer, contexts - closer),
    }
    result = {"against": {PLAIN: comparison}, "contexts": [None] * contexts,
              "worded": {PLAIN: comparison},
              "writers": {writer: {"mean": 0.5, "bits": 0.7} for writer in (RECURRENT, PLAIN)}}  # fmt: skip
    assert experiment.c6(result).holds is holds


# --- samples ---------------------------------------------------------------------------------------------------------


def test_texts_are_escaped_in_tables(home, measured, tmp_path):
    """Every context contains markup."""
    markup = "<script>alert(1)</script> | *Anna* [x](y) saw & Anna; then `Anna` he_said_ so & Anna wept. "
    (tmp_path / "texts").mkdir()
    for number in range(4):
        (tmp_path / "texts" / f"<b>{number}.txt").write_text(markup * 20)
    printed = succeed("samples", home / "bytes", "--data", tmp_path / "texts", "--split", "train", "--contexts", 6,
                   "--context-tokens", 160, "--new-tokens", 8, "--topics-from", home / "out" / "lda",
                   "--rows", 3, "--out", tmp_path / "out", "--device", "cpu")  # fmt: skip
    page, table = ((tmp_path / "out" / name).read_text() for name in ("samples.html", "samples.md"))
    for text in (page, table):
        assert "&lt;script&gt;" in text
        assert set(re.findall(r"</?(\w+)", text)) <= TAGS
        assert "&lt;b&gt;" in text, "names of documents are escaped too"
    assert "http" not in page
    rows = [line for line in table.splitlines() if line.startswith("| …")]
    assert len(rows) >= 3
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {6}, "a bar in a text does not start a column"
    result = json.loads((tmp_path / "out" / "samples.json").read_text())
    assert result["people"]["with_names"] == 6
    assert result["settings"]["seed"] == 0
    assert [row["about"] for row in result["rows"]["people"]] == ["Anna, he"] * 3
    count = result["people"]["taken_up"][TEXT]["names"]
    assert f"| {TEXT} | {count} ({count / 6:.1%}) |" in printed.out
    assert "alert" not in json.dumps(result["rows"])


def test_rows_are_the_first_contexts_of_their_topics(home, measured, tmp_path):
    shutil.copytree(home / "out", tmp_path / "out")
    succeed(*command(home, tmp_path / "out", "--plain", home / "plain", verb="samples"))
    result = json.loads((tmp_path / "out" / "samples.json").read_text())
    sources = [[row["document"], row["start"]] for row in result["rows"]["topic"]]
    assert 1 <= len(sources) <= 3
    numbers = [measured[0]["contexts"].index(source) for source in sources]
    assert 0 in numbers, "the first context is the first of its topic"
    for row, number in zip(result["rows"]["topic"], numbers, strict=True):
        for writer, values in measured[0]["divergences"].items():
            assert row["notes"][writer] == f"divergence {values[number]:.2f}"


def test_rows_with_their_texts():
    example = continuations.Continuations(
        starts=np.array([[0, 5], [1, 7]]), names=["a", "b"], contexts=["no one", "Then Anna came, and Anna left."],
        written={RECURRENT: ["x", "Anna"], TEXT: ["y", "z"]}, metadata={},
    )  # fmt: skip
    rows = samples.by_people(example, [find_people(text) for text in example.contexts])
    assert samples.with_texts(rows, example) == [
        {"document": "b", "start": 7, "about": "Anna", "context": example.contexts[1], RECURRENT: "Anna", TEXT: "z",
         "notes": {RECURRENT: "Anna", TEXT: "nobody"}}
    ]  # fmt: skip
