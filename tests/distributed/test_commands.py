# SPDX-License-Identifier: Apache-2.0
"""evaluate, embed and qa evaluate in several processes: the result of one, whoever is killed."""

import json
import shutil

import pytest
import torch
import transformers
from helpers import crash, jobs, launcher

import carryforward as cf
from carryforward.cli.main import main
from carryforward.embeddings import document_groups
from carryforward.evaluation import report

SECOND = 1  # the rank that is killed


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    folder = jobs.prepare(tmp_path_factory.mktemp("home"))
    torch.manual_seed(0)
    encoder = transformers.BertForQuestionAnswering.from_pretrained(folder / "encoder")
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "encoder")
    model = cf.add_recurrence(encoder, tokenizer=tokenizer, window=24, memory="vector")
    model.save_pretrained(folder / "answering")
    tokenizer.save_pretrained(folder / "answering")
    (folder / "answering" / "config.json").write_text(
        (folder / "answering" / "config.json").read_text().replace('"use_state": false', '"use_state": true')
    )
    rows = [{"id": f"{i}", "text": jobs.prose.TOPICS[i % 12][: 40 + 37 * i]} for i in range(11)]
    (folder / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def _texts(home):
    return ["--data", home / "texts", "--split", "train"]


COMMANDS = {
    "evaluate": lambda home: ["evaluate", home / "recurrent", *_texts(home), "--max-document-tokens", 60,
                              "--overlap", 0, 2, "--batch-size", 2],
    "evaluate plain": lambda home: ["evaluate", home / "model", *_texts(home), "--max-document-tokens", 90,
                                    "--window", 16, "--batch-size", 2],
    "evaluate samples": lambda home: ["evaluate", home / "recurrent", *_texts(home), "--reset-every", 2,
                                      "--max-document-tokens", 60, "--batch-size", 2],
    "embed": lambda home: ["embed", home / "recurrent", home / "docs.jsonl"],
    "embed tokens": lambda home: ["embed", home / "recurrent", home / "docs.jsonl", "--what", "tokens"],
    "qa evaluate": lambda home: ["qa", "evaluate", home / "answering", "--data", home / "questions.json",
                                 "--batch-size", 1],
}  # fmt: skip


class Command:
    """A command with an output folder that is emptied between runs."""

    def __init__(self, home, folder, name, *more):
        self.folder, self.out = folder, folder / "results"
        suffix = {"embed": "v.npy", "embed tokens": "v.parquet"}.get(name, "")
        cache = jobs.Job(home, folder.parent, "", None)
        arguments = [*COMMANDS[name](home), "--device", "cpu", "--out", self.out / suffix, "--json", *more]

        def work():
            cache._work = lambda _: main([str(argument) for argument in arguments])
            cache.arguments = list
            report.perplexity_figure = lambda *_: jobs.plotting.new_figure(1)[0]
            document_groups.CHARACTERS_PER_GROUP = dict.fromkeys(document_groups.CHARACTERS_PER_GROUP, 300)
            cache()

        self.work = work

    def clear(self):
        shutil.rmtree(self.folder, ignore_errors=True)
        self.out.mkdir(parents=True)

    def run(self, count, operations=None):
        return launcher.launch(self.work, count, operations)

    def contents(self):
        """What the files hold, without times and the number of processes."""
        paths = {str(path.relative_to(self.folder)): path for path in sorted(self.folder.rglob("*"))}
        found = {}
        for name, path in paths.items():
            if path.suffix != ".csv":  # as the JSON file
                found[name] = _without_count(jobs._comparable(path))
        return found


def _without_count(content):
    return (
        {key: value for key, value in content.items() if key != "processes"} if isinstance(content, dict) else content
    )


def succeed(results):
    """Each process ended well, and only the first printed."""
    assert [result.code for result in results] == [0] * len(results), "\n".join(result.output for result in results)
    assert results[0].output
    assert not any(result.output for result in results[1:]), results[1].output


@pytest.mark.parametrize("name", COMMANDS)
def test_two_processes_and_one_give_the_same_bits(home, tmp_path, name):
    if name == "embed tokens":
        pytest.importorskip("pyarrow")
    command = Command(home, tmp_path / "out", name)
    found = []
    for count in (1, 2) if name != "evaluate" else (1, 2, 3):
        command.clear()
        succeed(command.run(count))
        found.append(command.contents())
    assert len(found[0]) > 1
    for other in found[1:]:
        assert other == found[0]


@pytest.mark.parametrize("name", ["evaluate", "embed", "qa evaluate"])
def test_a_killed_process_loses_nothing(home, tmp_path, name):
    """The second process is killed while it works. Any number of processes finishes what is left."""
    command = Command(home, tmp_path / "out", name)
    command.clear()
    watched = crash.Operations(command.folder)
    results = command.run(2, {SECOND: watched})
    succeed(results)
    whole, log = command.contents(), results[SECOND].log
    last = max(i for i, line in enumerate(log, 1) if ".json" in line or "part-" in line)
    for count in (1, 3):
        command.clear()
        results = command.run(2, {SECOND: crash.Operations(command.folder, last, crash.kill)})
        assert results[SECOND].code == -9
        assert results[0].code, "the first ends too"
        assert not any("Traceback" in result.output for result in results)
        assert not list(command.out.glob("v.npy")), "nothing is finished"
        succeed(command.run(count))
        assert command.contents() == whole


@pytest.mark.parametrize("name", ["evaluate", "embed", "qa evaluate"])
def test_an_error_is_told_once(home, tmp_path, name):
    """By all processes at once, and by one that is not the first."""
    command = Command(home, tmp_path / "out", name, "--overlap", 1000)
    command.clear()
    everywhere = command.run(2)
    command = Command(home, tmp_path / "out", name)
    fail = crash.fail_with(28)  # no space left, for the second process only
    one = command.run(2, {SECOND: crash.Operations(command.folder, 1, fail)})
    for results, message in ((everywhere, "overlap=1000"), (one, "disk is full")):
        text = "".join(result.output for result in results)
        assert all(result.code for result in results), text
        assert " ".join(text.split()).count(message) == 1, text
        assert "Traceback" not in text
    succeed(command.run(2))
