# SPDX-License-Identifier: Apache-2.0
"""The page of an inspected text: what is in it, that it is whole and safe, and the command that writes it.

Whether it works in a browser is tested in `test_browser`.
"""

import base64
import json
import re
import subprocess
import sys
import zipfile
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from helpers import prose

import carryforward as cf
from carryforward.analysis.html_report import page
from carryforward.analysis.token_gains import Inspection, Side, inspect
from carryforward.cli.main import main
from carryforward.models.loading import load_causal
from carryforward.windows import schedule

ROOT = Path(__file__).resolve().parents[2]
NASTY = ["</script><script>document.title='1'</script>", "<script>", "<!--", " {{data}}", "&amp;", "\r\n", "\0", "🙂",
         "", " a"]  # fmt: skip


def invented(count, window=128, seed=0, pieces=None):
    """An inspection made of random numbers, and its page: nothing to be read by a model."""
    random = np.random.default_rng(seed)
    pieces = [(pieces or NASTY)[i % len(pieces or NASTY)] for i in range(count)]
    ids, windows = np.arange(count) % 400, list(schedule(count, window))

    def side(log_probs):
        return Side(log_probs, random.integers(0, 400, (count, 5)), -np.sort(random.exponential(2.0, (count, 5))))

    without = -random.exponential(3.0, count)
    with_state = np.minimum(without + random.normal(0.1, 0.8, count), -1e-3)
    with_state[: windows[0].score_to] = without[: windows[0].score_to]
    without[0] = with_state[0] = np.nan
    attention = random.random((4, 3))
    attention[0] = np.nan
    found = Inspection(ids, side(with_state), side(without), windows, attention, random.random(4))
    origin = {"carryforward": "0", "commit": "unknown", "date": "today", "command": "carryforward inspect <a>",
              "versions": {"python": "3"}, "hardware": {"cpu": "one"}}  # fmt: skip
    made = page(found, pieces, lambda ids: [f"<b>{i}</b></script>" for i in ids],
                title="<script>document.title='2'</script>", model="m", provenance=origin)  # fmt: skip
    return found, pieces, made


class Reader(HTMLParser):
    """The text of each window, the data, and every tag."""

    def __init__(self, content):
        super().__init__()
        self.tags, self.texts, self.data, self.inside = [], [], "", ""
        self.feed(content)

    def handle_starttag(self, tag, attributes):
        attributes = dict(attributes)
        self.tags.append((tag, attributes))
        self.inside = attributes.get("class") or attributes.get("id") or tag
        if self.inside == "text":
            self.texts.append("")

    def handle_endtag(self, tag):
        self.inside = ""

    def handle_data(self, data):
        if self.inside == "text":
            self.texts[-1] += data
        elif self.inside == "data":
            self.data += data


def unpacked(data, name, dtype, side=None):
    packed = data[name] if side is None else data[name][side]
    return np.frombuffer(base64.b64decode(packed), dtype=dtype)


def test_text_stays_text_and_numbers_are_what_they_were():
    found, pieces, made = invented(1000)
    read = Reader(made)
    text = "".join(pieces).replace("\0", "\ufffd")
    assert "".join(read.texts) == text
    assert [len(one) for one in read.texts[1:]] == [
        len("".join(pieces[w.score_from : w.score_to])) for w in found.windows[1:]
    ]
    scripts = [attributes for tag, attributes in read.tags if tag == "script"]
    assert len(scripts) == 2, "the data and the page's own"
    data = json.loads(read.data)
    assert data["vocabulary"][3] == "<b>3</b></script>"
    assert "<b>" not in made
    assert "<h1>&lt;script&gt;document.title=&#x27;2&#x27;&lt;/script&gt;</h1>" in made
    assert unpacked(data, "lengths", "<u4").tolist() == [len(one.encode("utf-16-le")) // 2 for one in pieces]
    for number, side in enumerate((found.with_state, found.without)):
        np.testing.assert_allclose(unpacked(data, "logProbs", "<u2", number)[1:] / -1000, side.log_probs[1:], atol=6e-4)
        tops = unpacked(data, "topTokens", "<u2", number).reshape(-1, 5)  # every id occurs: a place is the id
        np.testing.assert_array_equal(tops, side.top_ids)
        np.testing.assert_allclose(
            unpacked(data, "topLogProbs", "<u2", number).reshape(-1, 5) / -1000, side.top_log_probs, atol=6e-4
        )
    assert data["attention"][0] == [None] * 3
    np.testing.assert_allclose(data["attention"][1:], found.attention[1:], atol=1e-5)
    assert data["summary"]["tokens"] == 1000


def test_nothing_is_fetched_and_no_other_script_may_run():
    _, _, made = invented(300)
    read = Reader(made)
    (policy,) = [a["content"] for tag, a in read.tags if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'")
    assert "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]
    addresses = [value for _, a in read.tags for name, value in a.items() if name in ("src", "href")]
    assert addresses == ["data:,"]
    assert "http://" not in re.sub(r"http://www\.w3\.org/2000/svg", "", made)  # the name of SVG is no address
    assert "https://" not in made
    ids = [a["id"] for _, a in read.tags if "id" in a]
    assert len(ids) == len(set(ids))
    script = (ROOT / "src" / "carryforward" / "analysis" / "assets" / "page.js").read_text()
    for wanted in re.findall(r'byId\("([\w-]+)"\)', script):
        assert wanted in ids, wanted
    assert "innerHTML" not in script


def test_fifty_thousand_tokens_are_a_few_megabytes():
    _, _, made = invented(50_000, pieces=[" abcd"])
    assert 1e6 < len(made.encode()) < 5e6


def test_the_pages_files_are_in_what_is_installed(tmp_path):
    pytest.importorskip("hatchling", reason="hatchling builds the package: pip install hatchling")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)],
        cwd=ROOT, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    for name in ("page.html", "page.css", "page.js"):
        assert f"carryforward/analysis/assets/{name}" in names


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """A folder with a plain and a recurrent model, and texts."""
    folder = tmp_path_factory.mktemp("models")
    prose.save_model(folder / "plain")
    model = cf.add_recurrence(load_causal(str(folder / "plain")).model, window=16, hidden_sizes=(8,))
    model.save_pretrained(folder / "model")
    prose.tokenizer().save_pretrained(folder / "model")
    (folder / "text.txt").write_text(prose.TOPICS[0][:500] + "<script>document.title='3'</script>")
    (folder / "short.md").write_text("Too short.")
    (folder / "empty.txt").write_text(" \n")
    (folder / "latin.txt").write_bytes(b"caf\xe9 " * 100)
    return folder


def run(*arguments):
    with pytest.raises(SystemExit) as end:
        main(["inspect", *map(str, arguments)])
    return end.value.code


def test_the_command_writes_a_page(models, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert run(models / "model", "--text", models / "text.txt", "--out", out, "--top", "3", "--json") == 0
    told = json.loads(capsys.readouterr().out)
    read = Reader(out.read_text(encoding="utf-8"))
    text = (models / "text.txt").read_text()
    assert "".join(read.texts) == text
    data = json.loads(read.data)
    loaded = load_causal(str(models / "model"))
    ids = loaded.tokenizer(text)["input_ids"]
    found = inspect(loaded.model, ids, top=3)
    assert told["tokens"] == len(ids)
    assert told["perplexity"] == data["summary"]["perplexity"] == pytest.approx(found.with_state.perplexity)
    assert told["perplexity_without"] == pytest.approx(found.without.perplexity)
    assert told["bytes"] == out.stat().st_size
    assert told["commit"] == data["provenance"]["commit"]
    assert "<h1>text.txt</h1>" in out.read_text(encoding="utf-8")
    occur = np.unique([*ids, *found.with_state.top_ids.flat, *found.without.top_ids.flat])
    assert data["vocabulary"] == [loaded.tokenizer.decode([i]) for i in occur]
    np.testing.assert_allclose(np.array(data["attention"][1], float), found.attention[1], atol=2e-5)


def test_options_order_and_standard_input(models, tmp_path, capsys, monkeypatch):
    out, limits = tmp_path / "report.html", ("--max-tokens", "40", "--overlap", "4")
    assert run("--text", models / "text.txt", models / "model", "--out", out, *limits) == 0
    assert "40 tokens in 3 windows" in capsys.readouterr().out
    with (models / "text.txt").open() as file:
        monkeypatch.setattr(sys, "stdin", file)
        assert run(models / "model", "--text", "-", "--out", out) == 0
    assert "standard input" in out.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("model --text short.md --out out.html", "fewer than two windows (32): a state is first used in the second"),
        ("model --text text.txt --out out.html --max-tokens 20", "the text has 20 tokens"),
        ("plain --text text.txt --out out.html", "is a plain model: it has no state. Make it recurrent"),
        ("model --text empty.txt --out out.html", "empty.txt is empty or only white space"),
        ("model --text latin.txt --out out.html", "is not UTF-8"),
        ("model --text missing.txt --out out.html", "missing.txt cannot be read"),
        ("model --text plain --out out.html", "cannot be read"),
        ("model --text text.txt --out plain", "--out plain is a folder"),
        ("model --text text.txt --out out.html --top 0", "top=0: it must be from 1"),
        ("model --text text.txt --out out.html --max-tokens 0", "--max-tokens 0: it must be at least 1"),
        ("model --text text.txt --out out.html --overlap 16", "overlap=16"),
    ],
)  # fmt: skip
def test_what_goes_wrong_is_said_in_a_sentence(models, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(models)
    assert run(*arguments.split()) in (1, 2)
    told = capsys.readouterr().err
    assert message in told
    assert "Traceback" not in told
    assert not (models / "out.html").exists()


def test_the_pages_folder_is_made(models, monkeypatch):
    monkeypatch.chdir(models)
    assert run("model", "--text", "text.txt", "--out", "new/folder/out.html") == 0
    assert (models / "new" / "folder" / "out.html").exists()
