# SPDX-License-Identifier: Apache-2.0
"""The experiment `reach`: arms are measured once, in pieces, and the page is written from their JSON."""

import importlib
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from helpers import tiny
from helpers.experiments import experiment

import carryforward as cf
from carryforward.data.documents import Documents
from carryforward.evaluation.perplexity import perplexity

FOLDER = Path(__file__).resolve().parents[2] / "experiments" / "other" / "reach"
if not FOLDER.exists():
    pytest.skip("experiments are not part of a source distribution", allow_module_level=True)

COMMIT = "0" * 40
MODULES = (
    "arms", "tokens", "measuring", "comparisons", "aims", "reach_figure", "pages", "prepare", "run", "harness",
)  # fmt: skip


def documents(*lengths, name="books", max_tokens=40):
    rng = np.random.default_rng(0)
    texts = [rng.integers(5, tiny.VOCABULARY, length) for length in lengths]
    made = Documents.of(texts, words=lengths, bytes=lengths, line_ends=[0] * len(lengths))
    made.name, made.split, made.max_tokens = name, "validation", max_tokens
    return made


@pytest.fixture
def reach(monkeypatch, tmp_path):
    """The modules of the experiment, with few arms, a tiny model and results in a temporary folder."""
    monkeypatch.setenv("CARRYFORWARD_COMMIT", COMMIT)
    with experiment(monkeypatch, FOLDER, MODULES, tmp_path) as modules:
        arms, run = modules.arms, modules.run
        monkeypatch.setitem(arms.SELECTIONS, "lookup", {"group": 1, "archive": 8})
        some = (
            *arms.plain({4: (0, 2), 99: (0,)}), *arms.recent(4, (3, 9), control=3, depths=(9,)),
            *arms.far(4, ((3, 5),)), *arms.streaming(4, 3),
        )  # fmt: skip
        for setting in ("smollm2", "bundled"):
            monkeypatch.setitem(arms.SETTINGS, setting, arms.Setting("tiny", some[3].name, some[2].name, "all", some))
        monkeypatch.setattr(run, "RESULTS", tmp_path / "results")
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)
        modules.bases = []

        def load_base(name, device):
            modules.bases.append(name)
            return tiny.base("llama" if "llama" in name else "gpt2")

        monkeypatch.setattr(run, "load_base", load_base)
        modules.tokens.save(tmp_path / "tokens.npz", texts())
        yield modules


def texts():
    return {
        "books": documents(40, 31, 40),
        "deep": documents(33, 33, name="deep"),
        "long": documents(61, name="long"),
        "train": documents(300, 300, name="train"),
    }


def measure(reach, monkeypatch, tmp_path, *more, setting="smollm2", model="llama"):
    command = ["run.py", setting, model, str(tmp_path / "tokens.npz"), "--out", str(tmp_path / "results")]
    monkeypatch.setattr("sys.argv", [*command, "--repeats", "1", *more])
    reach.run.main()
    return {path.stem: json.loads(path.read_text()) for path in (tmp_path / "results" / setting).glob("*.json")}


def test_every_arm_is_measured_as_perplexity_measures_it(reach, monkeypatch, tmp_path):
    results = measure(reach, monkeypatch, tmp_path)
    base, books = tiny.base("llama"), texts()["books"]
    assert set(results) == {arm.name for arm in reach.arms.SETTINGS["smollm2"].arms}
    for name, window, overlap in (("plain-4-0", 4, 0), ("plain-4-2", 4, 2), ("plain-99-0", 40, 0)):
        expected = perplexity(base, books, window=window, overlap=overlap)
        assert results[name]["nats"] == pytest.approx(expected.nats, rel=1e-5)
        assert results[name]["window"] == window
    carried = cf.add_recurrence(base, window=4, memory=cf.KVMemoryConfig(recent=9, sinks=4))
    assert results["recent-4-9+4"]["nats"] == pytest.approx(perplexity(carried, books).nats, rel=1e-5)
    assert results["recent-4-9+4"]["state_bytes"] == 4 * math.prod(carried.config.recurrence.memories[0].state_shape(
        carried.config.base_config, carried.config.architecture))  # fmt: skip
    assert results["recent-4-3+4"]["removed"]["nats"] == pytest.approx(results["plain-4-0"]["nats"], rel=1e-5)
    assert {result["tokens"] for name, result in results.items() if "long" not in name} == {39 + 30 + 39}
    assert set(results["recent-4-9+4"]["depths"]["nats"]) == {"0", "1", "2", "4"}
    assert all(result["commit"] == COMMIT and result["versions"]["torch"] for result in results.values())
    page = (tmp_path / "README.md").read_text()
    assert "| 4 | 3 + 5 dissimilar + 4 |" in page
    assert "| 100 % (100 to 100) |" in page
    assert page.count("Not measured yet") == 1, "the other base model"
    assert "reported |" in page
    assert (tmp_path / "smollm2.png").exists()


def test_books_are_scored_one_by_one(reach, monkeypatch, tmp_path):
    results = measure(reach, monkeypatch, tmp_path, "--arms", "recent-4-3+4", "--repeats", "0")
    result, books = results["recent-4-3+4"], texts()["books"]
    carried = cf.add_recurrence(tiny.base("llama"), window=4, memory=cf.KVMemoryConfig(recent=3, sinks=4))
    for use_state, numbers in ((True, result), (False, result["removed"])):
        each = [perplexity(carried, [books[i]], use_state=use_state).nats for i in range(len(books))]
        assert numbers["books"]["nats"] == pytest.approx(each, rel=1e-6)
        assert numbers["nats"] == pytest.approx(perplexity(carried, books, use_state=use_state).nats, rel=1e-6)
    assert result["books"]["words"] == [40, 31, 40]
    assert not {"seconds", "tokens_per_second", "peak_bytes", "window_peak_bytes"} & {*result}, "no speed, no memory"
    assert (tmp_path / "smollm2.png").exists()


def test_learned_positions_are_measured_with_offsets_from_the_training_text(reach, monkeypatch, tmp_path):
    results = measure(reach, monkeypatch, tmp_path, "--arms", "plain-4-0", "*+4", setting="bundled", model="gpt2")
    assert len(results) == 7
    assert all(math.isfinite(result["nats"]) for result in results.values())


def test_what_is_measured_is_not_measured_again(reach, monkeypatch, tmp_path):
    measure(reach, monkeypatch, tmp_path, "--arms", "plain-4-*")
    assert len(measure(reach, monkeypatch, tmp_path, "--arms", "plain-4-0")) == 2 + 1  # and one of the long book
    assert len(reach.bases) == 1, "the model is loaded only if something is missing"
    monkeypatch.setenv("CARRYFORWARD_COMMIT", "1" * 40)
    again = measure(reach, monkeypatch, tmp_path, "--arms", "plain-4-0")
    assert {name: result["commit"][0] for name, result in again.items()}["plain-4-0"] == "1"


def test_no_arm_is_started_that_would_end_too_late(reach, monkeypatch, tmp_path, capsys):
    results = measure(reach, monkeypatch, tmp_path, "--seconds", "0")
    assert [*results] == ["plain-4-0"]
    assert "no time left for 11 arms, plain-4-2 and after" in capsys.readouterr().out


def test_results_on_different_texts_are_not_put_into_one_table(reach, monkeypatch, tmp_path):
    measure(reach, monkeypatch, tmp_path, "--arms", "plain-4-0")
    with pytest.raises(SystemExit, match="different texts"):
        measure(reach, monkeypatch, tmp_path, "--arms", "plain-4-2", "--documents", "2")


def book_results(**arms):
    """Results as the page reads them: by name, the kind of arm, its FLOPs and the nats of each of four books."""
    words = [100, 200, 300, 400]
    made = {}
    for name, (kind, window, flops, nats, memory) in arms.items():
        made[name] = {
            "arm": {"name": name.replace("_", "-"), "kind": kind, "memory": memory, "overlap": 0, "window": window},
            "window": window, "flops": {"base": flops, "recurrence": 0.0},
            "word_perplexity": math.exp(sum(nats) / sum(words)), "books": {"nats": nats, "words": words},
        }  # fmt: skip
    return made


def test_arms_are_compared_book_by_book(reach):
    """Against an independent bootstrap, one resample at a time; books that differ much do not widen the interval."""
    ours, theirs = [480.0, 1010.0, 1460.0, 2010.0], [500.0, 1030.0, 1500.0, 2040.0]
    results = book_results(a=("recent", 4, 1.0, ours, {}), b=("recent", 4, 1.0, theirs, {}))
    found = reach.comparisons.change(results["a"], results["b"])
    words = np.array([100, 200, 300, 400])
    rng, drawn = np.random.default_rng(5), []
    for _ in range(4000):
        books = rng.integers(4, size=4)
        drawn.append(math.exp((np.array(ours)[books] - np.array(theirs)[books]).sum() / words[books].sum()) - 1)
    assert found.value == pytest.approx(math.exp((sum(ours) - sum(theirs)) / 1000) - 1)
    assert [found.low, found.high] == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=5e-3)
    assert found.high < 0
    same = reach.comparisons.change(results["a"], results["a"])
    assert (same.value, same.low, same.high) == (0, 0, 0)
    assert reach.comparisons.share_of_the_way(results["a"], results["b"], results["a"]).low == pytest.approx(1)
    results["b"]["books"]["words"] = [1, 2, 3, 4]
    with pytest.raises(ValueError, match="different books"):
        reach.comparisons.change(results["a"], results["b"])


@pytest.mark.parametrize(
    ("far", "beats", "by_two_percent", "share"),
    [
        ([470, 950, 1430, 1890], "met", "met", "met"),
        ([499, 998, 1497, 1996], "met", "not met", "not met"),  # 1 % on every book, 28 % of the way
        ([470, 1030, 1500, 1870], "undecided", "undecided", "undecided"),
        ([510, 1010, 1510, 2010], "not met", "not met", "not met"),
    ],
)
def test_what_was_aimed_at_is_decided_from_the_results(reach, far, beats, by_two_percent, share):
    memory = {"recent": 9, "sinks": 4}
    results = book_results(
        plain_4_0=("plain", 4, 100.0, [540.0, 1080.0, 1620.0, 2160.0], None),
        recent_4_3=("recent", 4, 110.0, [510.0, 1020.0, 1530.0, 2040.0], {**memory, "recent": 3}),
        recent_4_9=("recent", 4, 120.0, [500.0, 1000.0, 1500.0, 2000.0], memory),
        recent_4_99=("recent", 4, 130.0, [100.0, 200.0, 300.0, 400.0], {**memory, "recent": 99}),  # beyond the budget
        far=("attention", 4, 124.0, [float(nats) for nats in far], {**memory, "far": 5}),
        goal=("plain", 99, 200.0, [470.0, 940.0, 1410.0, 1880.0], None),
    )
    setting = reach.arms.Setting("tiny", "recent-4-3", "goal", "all", ())
    answers = [judge(setting, [*results.values()]) for judge in reach.aims.AIMS["smollm2"].values()]
    assert [answer.verdict for answer in answers] == ["reported", beats, by_two_percent, share]
    assert [answer.rival and answer.rival["arm"]["name"] for answer in answers] == [
        None, "recent-4-9", "recent-4-9", None,
    ]  # fmt: skip
    fits = reach.aims.AIMS["bundled"]["far and recent positions beat as many recent ones as fit"]
    assert fits(setting, [*results.values()]).rival["arm"]["name"] == "recent-4-99"
    assert fits(setting, [results["plain_4_0"]]) is None, "not measured"


def test_tokens_are_read_as_they_were_written(reach, tmp_path):
    written, read = texts(), reach.tokens.load(tmp_path / "tokens.npz")
    assert written.keys() == read.keys()
    for name, expected in written.items():
        assert all(np.array_equal(a, b) for a, b in zip(expected, read[name], strict=True))
        assert expected.about() == read[name].about()


def test_pieces_of_a_file_are_joined_if_none_is_missing(reach, tmp_path):
    whole = tmp_path / "model.gguf"
    content = bytes(range(256)) * 10
    whole.write_bytes(content)
    (tmp_path / "travel").mkdir()
    reach.tokens.split_file(whole, tmp_path / "travel", 1000)
    reach.tokens.join_file(tmp_path / "travel" / "model.gguf")
    assert (tmp_path / "travel" / "model.gguf").read_bytes() == content
    (tmp_path / "travel" / "model.gguf").unlink()
    (tmp_path / "travel" / "model.gguf.part-01").unlink()
    with pytest.raises(SystemExit, match="2 pieces"):
        reach.tokens.join_file(tmp_path / "travel" / "model.gguf")


def test_only_token_ids_and_counts_are_prepared(reach, tmp_path):
    text = "It was a dark and stormy night; the rain fell in torrents. " * 40
    for split in ("validation", "train"):
        for i in range(3):
            path = tmp_path / "books" / split / f"{i}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text * (i + 1))
    arguments = SimpleNamespace(model="bundled", data=str(tmp_path / "books"), out=tmp_path / "out.npz",
                                split="validation", documents=2, tokens=50, deep_documents=1, deep_tokens=80,
                                long_tokens=3000, pieces=None)  # fmt: skip
    reach.prepare.prepare(arguments)
    prepared = reach.tokens.load(tmp_path / "out.npz")
    assert {name: len(documents) for name, documents in prepared.items()} == {
        "books": 2, "deep": 1, "long": 1, "train": 3,
    }  # fmt: skip
    assert prepared["books"].lengths.tolist() == [50, 50]
    assert prepared["long"].lengths[0] > 1000
    assert b"stormy" not in (tmp_path / "out.npz").read_bytes()


def test_nothing_is_imported_that_only_the_command_line_needs():
    """The machine that measures may lack it."""
    code = "import sys; sys.modules['typer'] = sys.modules['pydantic'] = None; import run"
    source = {**os.environ, "PYTHONPATH": str(Path(cf.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=FOLDER, env=source, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_arms_fit_the_positions_of_the_bundled_model():
    """Window, sinks, recent and far positions, and those that wait to be merged."""
    spec = importlib.util.spec_from_file_location("reach_arms", FOLDER / "arms.py")
    arms = importlib.util.module_from_spec(spec)
    sys.modules["reach_arms"] = arms
    spec.loader.exec_module(arms)
    for setting in (arms.SMOLLM2, arms.BUNDLED):
        names = [arm.name for arm in setting.arms]
        assert len(set(names)) == len(names)
        assert {setting.start, setting.goal} <= {*names}
        for arm in setting.arms:
            carried = arm.memory and cf.KVMemoryConfig(**arm.memory).carried
            assert setting is arms.SMOLLM2 or arm.window + (carried or 0) <= 512
