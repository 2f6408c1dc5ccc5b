# SPDX-License-Identifier: Apache-2.0
"""The page of `carryforward inspect`: its content, that texts are escaped, and the command.

`test_browser` tests the page in a browser.
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
from helpers.html_reports import random_report

import carryforward as cf
from carryforward.analysis.token_gains import measure_token_gains
from carryforward.cli.main import main
from carryforward.models.loading import load_causal

ROOT = Path(__file__).resolve().parents[2]


class Reader(HTMLParser):
    """Parses a page: the text of each window, the data, and all tags."""

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


def test_texts_are_escaped_and_numbers_are_exact():
    tokens, pieces, page = random_report(1000)
    read = Reader(page)
    text = "".join(pieces).replace("\0", "\ufffd")
    assert "".join(read.texts) == text
    assert [len(text) for text in read.texts[1:]] == [
        len("".join(pieces[w.score_from : w.score_to])) for w in tokens.windows[1:]
    ]
    scripts = [attributes for tag, attributes in read.tags if tag == "script"]
    assert len(scripts) == 2, "the data and the page's own script"
    data = json.loads(read.data)
    assert data["vocabulary"][3] == "<b>3</b></script>"
    assert "<b>" not in page
    assert "<h1>&lt;script&gt;document.title=&#x27;2&#x27;&lt;/script&gt;</h1>" in page
    assert unpacked(data, "lengths", "<u4").tolist() == [len(piece.encode("utf-16-le")) // 2 for piece in pieces]
    for number, side in enumerate((tokens.with_state, tokens.without)):
        np.testing.assert_allclose(unpacked(data, "logProbs", "<u2", number)[1:] / -1000, side.log_probs[1:], atol=6e-4)
        tops = unpacked(data, "topTokens", "<u2", number).reshape(-1, 5)  # every id occurs: the index is the id
        np.testing.assert_array_equal(tops, side.top_ids)
        np.testing.assert_allclose(
            unpacked(data, "topLogProbs", "<u2", number).reshape(-1, 5) / -1000, side.top_log_probs, atol=6e-4
        )
    assert data["attention"][0] == [None] * 3
    np.testing.assert_allclose(data["attention"][1:], tokens.attention[1:], atol=1e-5)
    assert data["summary"]["tokens"] == 1000


def test_nothing_is_fetched_and_no_other_script_may_run():
    _, _, page = random_report(300)
    read = Reader(page)
    (policy,) = [a["content"] for tag, a in read.tags if tag == "meta" and "http-equiv" in a]
    assert policy.startswith("default-src 'none'")
    assert "'unsafe-inline'" not in policy.split("script-src")[1].split(";")[0]
    addresses = [value for _, a in read.tags for name, value in a.items() if name in ("src", "href")]
    assert sorted(addresses) == ["#document", "data:,"], "an empty icon, and a place of the page itself"
    assert "http://" not in re.sub(r"http://www\.w3\.org/2000/svg", "", page)  # the SVG namespace is not fetched
    assert "https://" not in page
    ids = [a["id"] for _, a in read.tags if "id" in a]
    assert len(ids) == len(set(ids))
    script = (ROOT / "src" / "carryforward" / "analysis" / "assets" / "page.js").read_text()
    for used in re.findall(r'byId\("([\w-]+)"\)', script):
        assert used in ids, used
    assert "innerHTML" not in script


def test_fifty_thousand_tokens_are_a_few_megabytes():
    _, _, page = random_report(50_000, pieces=[" abcd"])
    assert 1e6 < len(page.encode()) < 5e6


def test_the_wheel_contains_the_assets(tmp_path):
    pytest.importorskip("hatchling", reason="make test-all: it installs hatchling, which builds wheels")
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
    """A folder with a plain model, a recurrent model and texts."""
    folder = tmp_path_factory.mktemp("models")
    prose.save_model(folder / "plain")
    model = cf.add_recurrence(
        load_causal(str(folder / "plain")).model, window=16, memory=cf.VectorMemoryConfig(hidden_sizes=(8,))
    )
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
    result = json.loads(capsys.readouterr().out)
    read = Reader(out.read_text(encoding="utf-8"))
    text = (models / "text.txt").read_text()
    assert "".join(read.texts) == text
    data = json.loads(read.data)
    loaded = load_causal(str(models / "model"))
    ids = loaded.tokenizer(text)["input_ids"]
    tokens = measure_token_gains(loaded.model, ids, top=3)
    assert result["tokens"] == len(ids)
    assert result["perplexity"] == data["summary"]["perplexity"] == pytest.approx(tokens.with_state.perplexity)
    assert result["perplexity_without"] == pytest.approx(tokens.without.perplexity)
    assert result["bytes"] == out.stat().st_size
    assert result["commit"] == data["provenance"]["commit"]
    assert "<h1>text.txt</h1>" in out.read_text(encoding="utf-8")
    occur = np.unique([*ids, *tokens.with_state.top_ids.flat, *tokens.without.top_ids.flat])
    assert data["vocabulary"] == [loaded.tokenizer.decode([i]) for i in occur]
    np.testing.assert_allclose(np.array(data["attention"][1], float), tokens.attention[1], atol=2e-5)


def test_options_in_any_order_and_standard_input(models, tmp_path, capsys, monkeypatch):
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
        ("model --text short.md --out out.html",
         "fewer than two windows (32): the second window is the first one with a state"),
        ("model --text text.txt --out out.html --max-tokens 20", "the text has 20 tokens"),
        ("plain --text text.txt --out out.html", "is a plain model: it has no state. Make it recurrent"),
        ("model --text empty.txt --out out.html", "empty.txt is empty or only white space"),
        ("model --text latin.txt --out out.html", "is not UTF-8"),
        ("model --text missing.txt --out out.html", "missing.txt cannot be read"),
        ("model --text plain --out out.html", "cannot be read"),
        ("model --text text.txt --out plain", "--out plain is a folder"),
        ("model --text text.txt --out out.html --top 0", "--top 0: it must be at least 1"),
        ("model --text text.txt --out out.html --max-tokens 0", "--max-tokens 0: it must be at least 1"),
        ("model --text text.txt --out out.html --overlap 16", "overlap=16"),
    ],
)  # fmt: skip
def test_errors_are_one_message(models, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(models)
    assert run(*arguments.split()) in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert not (models / "out.html").exists()


def test_the_folder_of_the_page_is_created(models, monkeypatch):
    monkeypatch.chdir(models)
    assert run("model", "--text", "text.txt", "--out", "new/folder/out.html") == 0
    assert (models / "new" / "folder" / "out.html").exists()
