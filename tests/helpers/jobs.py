# SPDX-License-Identifier: Apache-2.0
"""Jobs that write files: small forms of the commands, their inputs, and what of their results must be equal."""

import contextlib
import csv
import hashlib
import importlib
import json
import os
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers.processors import TemplateProcessing

import carryforward as cf
from carryforward.cli.main import main
from carryforward.data.documents import load_documents
from carryforward.embeddings import document_groups
from carryforward.evaluation import report
from carryforward.models.loading import load_causal, load_question_answering
from carryforward.utils import plotting

from . import prose, tiny

_MODULES = ("carryforward.embeddings.embed", "carryforward.evaluation.evaluate", "carryforward.evaluation.report",
            "carryforward.qa.train", "carryforward.training.train", "matplotlib.backends.backend_agg",
            "matplotlib.figure", "pyarrow.parquet", "pydantic.type_adapter")  # fmt: skip
VOLATILE = {"seconds", "date", "command", "commit", "sha256"}  # differ between two runs of one command


# --- inputs ----------------------------------------------------------------------------------------------------------


def prepare(home: Path) -> Path:
    """Write models, texts, questions and documents to a folder; import what the jobs need before they are forked."""
    for module in _MODULES:
        with contextlib.suppress(ImportError):
            importlib.import_module(module)
    tokenizer = prose.tokenizer()
    prose.save_model(home / "model")
    prose.save_topics(home / "texts", 8)
    model = tiny.recurrent("gpt2", settings={"vocab_size": prose.VOCABULARY})
    model.save_pretrained(home / "recurrent")
    tokenizer.save_pretrained(home / "recurrent")
    rows = [{"id": f"doc {i}", "text": prose.TOPICS[i][:60]} for i in range(7)]
    (home / "docs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    _save_encoder(home / "encoder", tokenizer)
    (home / "questions.json").write_text(json.dumps({"data": [{"paragraphs": _paragraphs()}]}))
    return home


def _save_encoder(folder: Path, tokenizer: Any) -> None:
    tokenizer.add_special_tokens({"cls_token": "<|cls|>", "sep_token": "<|sep|>"})
    special = [("<|cls|>", tokenizer.cls_token_id), ("<|sep|>", tokenizer.sep_token_id)]
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|cls|> $A <|sep|>", pair="<|cls|> $A <|sep|> $B:1 <|sep|>:1", special_tokens=special
    )
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
    config = transformers.BertConfig(vocab_size=len(tokenizer), max_position_embeddings=64, **shape)
    transformers.BertModel(config).save_pretrained(folder)


def _paragraphs() -> list[dict]:
    """Beginnings of topics with a question each, which their fifth word answers."""
    data = []
    for number, topic in enumerate(prose.TOPICS[:4]):
        words = topic[:300].split()
        answer = {"text": words[4], "answer_start": len(" ".join(words[:4])) + 1}
        data.append({
            "context": " ".join(words),
            "qas": [{"id": str(number), "question": f"After {words[3]}?", "answers": [answer]}],
        })  # fmt: skip
    return data


# --- jobs ------------------------------------------------------------------------------------------------------------


class Job:
    """A job on the inputs in `home` that writes to `folder`; every file it writes lies there."""

    def __init__(self, home: Path, folder: Path, out: str, arguments: Callable[[Path, Path], list]):
        self.home, self.folder, self.out, self._arguments = home, folder, folder / out, arguments

    def __call__(self, *more: Any) -> None:
        """Run the command, in a process of its own: this changes settings of the process."""
        os.environ |= {"CARRYFORWARD_CACHE": str(self.folder / "cache"), "CARRYFORWARD_COMMIT": "0"}
        document_groups.DOCUMENTS_PER_GROUP = 2
        report.perplexity_figure = lambda *_: plotting.new_figure(1)[0]  # a file is written, whatever it shows
        self._work([*self.arguments(), *more])

    def arguments(self) -> list:
        return self._arguments(self.home, self.out)

    def _work(self, arguments: list) -> None:
        main([str(argument) for argument in arguments])

    def clear(self) -> None:
        """Begin with an empty folder."""
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.mkdir(parents=True)

    def contents(self) -> dict[str, Any]:
        """Every file and folder by its relative path, hidden ones too, with what must be equal of it.

        The cache may lose its content with the power: it is made anew when it is read again.
        """
        paths = {str(path.relative_to(self.folder)): path for path in sorted(self.folder.rglob("*"))}
        cached = "cache/" if self.out.name != "cache" else "none"
        return {name: "cached" if name.startswith(cached) else _comparable(path) for name, path in paths.items()}

    def load_announced(self) -> None:
        """Load the model in the output, and the newest checkpoint: each is whole, or an error says why not."""
        load = load_question_answering if "qa" in self.arguments() else load_causal
        sealed = sorted(self.out.glob("checkpoint-*/complete.json"), key=lambda path: int(path.parts[-2][11:]))
        announced = [path.parent for path in (self.out / "config.json", *sealed[-1:]) if path.exists()]
        for folder in announced:
            try:
                load(str(folder))
            except (ValueError, OSError) as error:
                assert "\n" not in str(error).strip(), error  # noqa: PT017


class FunctionJob(Job):
    """A job that is a function of its home and its output."""

    def _work(self, arguments: list) -> None:
        function, *rest = arguments
        function(*rest)


def _train(home: Path, out: Path, rates: tuple[float, ...] = (0.5,), length: tuple = ("--train-tokens", 280)) -> list:
    """With the rate 0.5 the first checkpoint is the best one, with 0.03 the last one."""
    return ["train", "--model", home / "model", "--data", home / "texts", "--window", 12, "--windows-per-sample", 3,
            "--batch-size", 2, *length, "--eval-tokens", 70, "--warmup-steps", 0,
            "--max-document-tokens", 80, "--max-validation-tokens", 20, "--device", "cpu", "--out", out,
            "--learning-rate", *rates]  # fmt: skip


def _search(home: Path, out: Path) -> list:
    return [*_train(home, out, (0.5, 1.0)), "--search-tokens", 140, "--train-tokens", 140]


def _qa_train(home: Path, out: Path) -> list:
    data = ["--data", home / "questions.json", "--validation-data", home / "questions.json"]
    return ["qa", "train", "--model", home / "encoder", *data, "--epochs", 3, "--batch-size", 2, "--device", "cpu",
            "--learning-rate", 0.3, "--out", out]  # fmt: skip


def _embed(home: Path, out: Path) -> list:
    return ["embed", home / "recurrent", home / "docs.jsonl", "--device", "cpu", "--out", out]


def _evaluate(home: Path, out: Path) -> list:
    return ["evaluate", home / "recurrent", home / "model", "--data", home / "texts", "--max-document-tokens", 20,
            "--device", "cpu", "--out", out]  # fmt: skip


def _add(home: Path, out: Path) -> list:
    return ["add", home / "model", "--data", home / "texts", "--out", out]


def _state(home: Path, out: Path) -> list:
    return [_save_states, home, out]


def _save_states(home: Path, out: Path) -> None:
    """Save a state, and another one in its place."""
    model = cf.RecurrentForCausalLM.from_pretrained(home / "recurrent")
    for seed in (0, 1):
        with torch.no_grad():
            state = model(tiny.documents(2, 20, seed)).state
        state.save(out)


def _tokenise(home: Path, out: Path) -> list:
    return [_load_documents, home, out]


def _load_documents(home: Path, out: Path) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(home / "model")
    tokens = load_documents(str(home / "texts"), "train", tokenizer)
    print("tokens", hashlib.sha256(b"".join(ids.tobytes() for ids in tokens)).hexdigest())


JOBS: dict[str, Callable[[Path, Path], Job]] = {
    "train": partial(Job, out="run", arguments=_train),
    "train to the best": partial(Job, out="run", arguments=partial(_train, rates=(0.03,))),
    "train by epochs": partial(Job, out="run", arguments=partial(_train, length=())),
    "search": partial(Job, out="run", arguments=_search),
    "qa train": partial(Job, out="run", arguments=_qa_train),
    "embed parquet": partial(Job, out="v.parquet", arguments=_embed),
    "embed npy": partial(Job, out="v.npy", arguments=_embed),
    "evaluate": partial(Job, out="results", arguments=_evaluate),
    "add": partial(Job, out="added", arguments=_add),
    "state": partial(FunctionJob, out="story.state", arguments=_state),
    "tokenise": partial(FunctionJob, out="cache", arguments=_tokenise),
}
DIFFERENT = [name for name in JOBS if not name.startswith("train ")]  # that write files in different ways


# --- results ---------------------------------------------------------------------------------------------------------


def _comparable(path: Path) -> Any:
    if path.is_dir():
        return "folder"
    if path.name == "complete.json":  # sizes and digests, of files that hold times too
        return "seal"
    if path.suffix == ".csv":
        return [_stable(row) for row in csv.DictReader(path.read_text().splitlines())]
    if path.suffix == ".json":
        with contextlib.suppress(ValueError):  # damaged: compared as bytes
            return _stable(json.loads(path.read_text()))
    content = path.read_bytes()
    if path.suffix in (".safetensors", ".state") and content:
        return _safetensors(content)
    return hashlib.sha256(content).hexdigest()


def _safetensors(content: bytes) -> Any:
    """The header, whose metadata has no fixed order, and the digest of the tensors."""
    end = 8 + int.from_bytes(content[:8], "little")
    with contextlib.suppress(ValueError):
        return json.loads(content[8:end]), hashlib.sha256(content[end:]).hexdigest()
    return hashlib.sha256(content).hexdigest()


def _stable(value: Any) -> Any:
    """JSON without times."""
    if isinstance(value, dict):
        return {key: _stable(inner) for key, inner in value.items() if key not in VOLATILE and "runtime" not in key}
    return [_stable(inner) for inner in value] if isinstance(value, list) else value
