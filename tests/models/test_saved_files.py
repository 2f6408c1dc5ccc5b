# SPDX-License-Identifier: Apache-2.0
"""What is saved beside a model's weights: the loader for `trust_remote_code`, and the model card."""

import dataclasses
import json
import os
import subprocess
import sys
import types
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers as hf
import yaml
from helpers import prose, tiny
from helpers.commands import fail, succeed
from huggingface_hub.errors import EntryNotFoundError

import carryforward as cf
from carryforward.models.loading import load_causal

HEADS = {
    "AutoModelForCausalLM": lambda: tiny.recurrent("gpt2"),
    "AutoModelForMaskedLM": lambda: tiny.recurrent("bert", "masked"),
    "AutoModelForTokenClassification": lambda: tiny.recurrent("bert", "token"),
    "AutoModelForSequenceClassification": lambda: tiny.recurrent("bert", "sequence"),
    "AutoModelForQuestionAnswering": lambda: tiny.answering("bert"),
    "AutoModel": lambda: tiny.recurrent("bert", "none"),
}


def python(code, cache: Path, *, without=""):
    """Run code in a process that has not imported carryforward, and in which `without` cannot be imported."""
    if without:
        code = f"import sys; sys.modules[{without!r}] = None\n{code}"
    environment = {**os.environ, "HF_MODULES_CACHE": str(cache), "HF_HUB_OFFLINE": "1"}
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment)


def test_models_load_without_importing_carryforward(tmp_path):
    for name, make in HEADS.items():
        make().save_pretrained(tmp_path / name)
    process = python(
        f"""
import sys, torch, transformers
for name in {[*HEADS]}:
    path = {str(tmp_path)!r} + "/" + name
    config = transformers.AutoConfig.from_pretrained(path, trust_remote_code=True)
    assert type(config).__name__ == "RecurrentModelConfig"
    model = getattr(transformers, name).from_pretrained(path, trust_remote_code=True)
    assert type(model).__module__.startswith("carryforward.models."), type(model)
    model.save_pretrained(path + "-again")
    print(name, float(sum(weight.detach().double().sum() for weight in model.parameters())))
assert type(transformers.AutoModel.from_pretrained(path)) is type(model)  # carryforward is imported now
""",
        tmp_path / "cache",
    )
    assert process.returncode == 0, process.stderr
    sums = dict(line.split() for line in process.stdout.splitlines())
    for name, make in HEADS.items():
        weights = make().parameters()
        assert float(sums[name]) == pytest.approx(float(sum(w.detach().double().sum() for w in weights)), rel=1e-6)
        files = {path.name: path for path in (tmp_path / name).iterdir()}
        again = {path.name for path in (tmp_path / f"{name}-again").iterdir()}
        assert again == files.keys(), "loaded by its loader, a model is saved with the loader alone"
        source = Path(cf.__file__).parent / "models" / "files" / "modeling_carryforward.py"
        assert files["modeling_carryforward.py"].read_bytes() == source.read_bytes()


def test_where_carryforward_is_missing_the_error_says_so(tmp_path):
    tiny.recurrent("gpt2").save_pretrained(tmp_path / "saved")
    process = python(
        f"""
import transformers
for name in ("AutoConfig", "AutoModelForCausalLM"):
    try:
        getattr(transformers, name).from_pretrained({str(tmp_path / "saved")!r}, trust_remote_code=True)
    except ImportError as error:
        print(error)
""",
        tmp_path / "cache",
        without="carryforward",
    )
    first, second = process.stdout.splitlines()
    assert first == second
    assert first.startswith("This model is recurrent: its code is in the Python package carryforward, which is not")
    assert "pip install" in first


def test_with_carryforward_no_code_of_the_folder_runs(tmp_path):
    tiny.recurrent("gpt2").save_pretrained(tmp_path)
    (tmp_path / "modeling_carryforward.py").write_text("raise SystemExit('code of the folder')")
    for options in ({}, {"trust_remote_code": True}, {"trust_remote_code": False}):
        model = hf.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
        assert isinstance(model, cf.RecurrentForCausalLM)
        assert isinstance(hf.AutoConfig.from_pretrained(tmp_path, **options), cf.RecurrentModelConfig)


def card_of(folder):
    _, metadata, text = (folder / "README.md").read_text().split("---\n", 2)
    return yaml.safe_load(metadata), text


@pytest.mark.parametrize("name", HEADS)
def test_the_card_says_what_the_config_says(name, tmp_path):
    model = HEADS[name]()
    model.save_pretrained(tmp_path / "my-model")
    metadata, text = card_of(tmp_path / "my-model")
    assert metadata["library_name"] == "transformers"
    assert metadata["tags"] == ["carryforward"]
    assert "base_model" not in metadata, "it was never on the Hub"
    assert metadata["pipeline_tag"] in {*hf.pipelines.PIPELINE_REGISTRY.get_supported_tasks()}
    assert f'{name}.from_pretrained("my-model")' in text
    assert f"{model.config.recurrence.window} tokens" in text
    assert model.config.recurrence.describe() in text
    assert f"{model.memory.state_bytes:,} bytes" in text
    assert "No record of a training" in text
    assert str(tmp_path) not in text


def test_an_untrained_memory_is_named_and_a_hub_model_too(tmp_path):
    base = tiny.base("gpt2")
    base.config._name_or_path = "org/some-model"
    model = cf.add_recurrence(base, window=8, memory="vector")
    model.save_pretrained(tmp_path / "a")
    metadata, text = card_of(tmp_path / "a")
    assert metadata["base_model"] == "org/some-model"
    assert "The memory vector is **not trained**" in text
    with torch.no_grad():
        next(model.memory.parameters()).add_(1)
    model.save_pretrained(tmp_path / "a")
    assert "not trained" not in card_of(tmp_path / "a")[1], "written anew"


def test_the_card_s_code_runs(tmp_path, monkeypatch):
    base = hf.AutoModelForCausalLM.from_pretrained(prose.save_model(tmp_path / "base"))
    model = cf.add_recurrence(base, window=8, memory="vector", tokenizer=prose.tokenizer())
    model.save_pretrained(tmp_path / "mine")
    code = card_of(tmp_path / "mine")[1].split("```python\n")[1].split("```")[0]
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(code.replace("max_new_tokens=1000", "max_new_tokens=3"), names)
    assert isinstance(names["model"], cf.RecurrentForCausalLM)
    assert isinstance(names["pipe"], hf.TextGenerationPipeline)


def test_a_card_of_the_user_s_own_is_left_alone(tmp_path):
    model = tiny.recurrent("gpt2")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "README.md").write_text("# Mine")
    model.save_pretrained(tmp_path / "saved")
    assert (tmp_path / "saved" / "README.md").read_text() == "# Mine"
    assert (tmp_path / "saved" / "modeling_carryforward.py").exists()


class Hub:
    """A repository that takes uploads, as far as transformers uses the Hub. Attribute `files`: its content."""

    def __init__(self, monkeypatch, folder, **files):
        self.files, self._folder = files, folder
        monkeypatch.setattr(hf.utils.hub, "hf_api", lambda: self)
        monkeypatch.setattr(hf.modeling_utils, "hf_api", lambda: self)
        monkeypatch.setattr(huggingface_hub, "file_exists", lambda repo, name, token: name in self.files)
        monkeypatch.setattr(huggingface_hub.repocard, "hf_hub_download", self._download)

    def create_repo(self, name, **options):
        return types.SimpleNamespace(repo_id=f"org/{name}")

    def create_commit(self, *, operations, **options):
        self.files |= {one.path_in_repo: Path(one.path_or_fileobj).read_bytes() for one in operations}

    def _download(self, repo, name, **options):
        if name not in self.files:
            raise EntryNotFoundError(name)
        (self._folder / name).write_bytes(self.files[name])
        return self._folder / name


UPLOADS = {
    "push_to_hub": lambda model, folder: model.push_to_hub("my-model", tags=["long"]),
    "save_pretrained": lambda model, folder: model.save_pretrained(folder / "my-model", push_to_hub=True),
}


@pytest.mark.parametrize("how", UPLOADS)
def test_the_card_and_the_loader_are_uploaded(how, tmp_path, monkeypatch):
    model, hub = tiny.recurrent("gpt2"), Hub(monkeypatch, tmp_path)
    model.model_tags = ["long"]
    for windows in (8, 6):
        model.config.recurrence = dataclasses.replace(model.config.recurrence, window=windows)
        UPLOADS[how](model, tmp_path)
        (tmp_path / "README.md").write_bytes(hub.files["README.md"])
        metadata, text = card_of(tmp_path)
        assert metadata["tags"] == ["carryforward", "long"]
        assert 'from_pretrained("org/my-model")' in text
        assert f"{windows} tokens" in text, "written anew"
        assert {"modeling_carryforward.py", "config.json", "model.safetensors"} <= hub.files.keys()


@pytest.mark.parametrize("how", UPLOADS)
def test_a_repository_s_own_card_stays(how, tmp_path, monkeypatch):
    """With the tags that transformers adds. The user's card in the folder stays, too."""
    hub = Hub(monkeypatch, tmp_path, **{"README.md": b"# Theirs"})
    model = tiny.recurrent("gpt2")
    model.model_tags = ["long"]
    (tmp_path / "my-model").mkdir()
    (tmp_path / "my-model" / "README.md").write_text("# Mine")
    UPLOADS[how](model, tmp_path)
    assert hub.files["README.md"].decode().endswith("# Theirs")
    assert b"long" in hub.files["README.md"]
    assert b"carryforward" not in hub.files["README.md"]
    assert (tmp_path / "my-model" / "README.md").read_text() == "# Mine"


def test_a_run_s_card_says_what_was_measured(tmp_path):
    topics = prose.save_topics(tmp_path / "books", 6)
    model = prose.save_model(tmp_path / "gpt2")
    arguments = ("train", "--model", model, "--data", topics, "--validation-data", topics, "--window", "8", "--out",
                 tmp_path / "run", "--preset", "paper", "--device", "cpu", "--warmup-steps", "1")  # fmt: skip
    succeed(*arguments, "--train-tokens", "600")
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    _, text = card_of(tmp_path / "run")
    assert f"| word perplexity, validation | {record['best_word_perplexity']:.2f} |" in text
    assert f"| tokens | {record['tokens']:,} |" in text
    assert "| data | books |" in text
    assert str(tmp_path) not in text
    assert "modeling_carryforward.py" in record["files"]
    # a user's card is no damage, and survives a longer run
    (tmp_path / "run" / "README.md").write_text("# Mine")
    load_causal(str(tmp_path / "run"))
    succeed(*arguments, "--train-tokens", "900")
    assert (tmp_path / "run" / "README.md").read_text() == "# Mine"
    (tmp_path / "run" / "modeling_carryforward.py").write_text("")
    assert "modeling_carryforward.py is damaged" in fail("generate", tmp_path / "run", "--prompt", "a", code=2)
