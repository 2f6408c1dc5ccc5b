# SPDX-License-Identifier: Apache-2.0
"""The documentation points at code that exists, and its Python examples run."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers as hf
from helpers import tiny

import carryforward as cf

ROOT = Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("anchors", ROOT / "docs" / "anchors.py")
anchors = importlib.util.module_from_spec(spec)
spec.loader.exec_module(anchors)

PAGES = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_references_to_code_point_at_their_lines(page):
    text = page.read_text()
    assert anchors.refreshed(text) == text, "run `python docs/anchors.py`"
    assert len(re.findall(r"\.py#L\d+", text)) == len(anchors.LINK.findall(text)), (
        "a reference is not in the known form"
    )


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_a_wrong_reference_is_found():
    with pytest.raises(LookupError, match="no 'pol' in recurrence.py"):
        anchors.refreshed("[`recurrence.Recurrence.pol`](../src/carryforward/recurrence.py#L1)")


# Every package imports only packages before it. Modules of the root are named like packages.
ORDER = [
    "windows", "settings", "utils", "data", "backbones", "state", "memories", "config", "engine", "models",
    "evaluation", "training", "analysis", "qa", "embeddings", "reproduction", "cli", "__main__",
]  # fmt: skip


def test_packages_import_one_way():
    present = {path.relative_to(anchors.SOURCE).parts[0].removesuffix(".py") for path in anchors.SOURCE.rglob("*.py")}
    assert sorted(ORDER) == sorted(present - {"__init__"})
    wrong = {}
    for path in anchors.SOURCE.rglob("*.py"):
        package = path.relative_to(anchors.SOURCE).parts[0].removesuffix(".py")
        if package != "__init__":
            later = packages_imported(path) - set(ORDER[: ORDER.index(package) + 1])
            wrong |= {path.relative_to(anchors.SOURCE).as_posix(): sorted(later)} if later else {}
    assert not wrong


def packages_imported(path):
    """The packages of ours (or modules of the root) that a file imports."""
    here = path.relative_to(anchors.SOURCE).parts[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            target = [*here[: len(here) - node.level + 1], *(node.module or "").split(".")]
            names = [target[0]] if target[0] else [name.name for name in node.names]
            found |= {name for name in names if not name.startswith("__")}
    return found


def test_every_module_can_be_imported_first():
    """Whatever a user imports first, the Auto classes know the models afterwards."""
    modules = {path.relative_to(anchors.SOURCE).with_suffix("") for path in anchors.SOURCE.rglob("*.py")}
    names = sorted(".".join(module.parts) for module in modules if module.stem not in ("__init__", "__main__"))
    script = f"""
import importlib, importlib.util, os, sys
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "peft" else find(name, *rest)  # it imports them itself
import torch, transformers.modeling_utils, transformers.trainer_callback
assert "transformers.models.auto.modeling_auto" not in sys.modules
for name in {names}:
    child = os.fork()  # torch is imported once
    if not child:
        importlib.import_module(f"carryforward.{{name}}")
        from transformers import AutoConfig, AutoModel
        AutoModel.register
        AutoConfig.for_model("carryforward")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]


def test_the_readmes_example_runs(monkeypatch, tmp_path):
    """As printed, with a tiny model in place of the hub's."""
    (code,) = re.findall(r"```python\n(.+?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    load = hf.AutoModelForCausalLM.from_pretrained
    config = hf.GPT2Config(vocab_size=tiny.VOCABULARY, n_positions=1024, n_embd=16, n_layer=2, n_head=2)
    monkeypatch.setattr(
        hf.AutoModelForCausalLM,
        "from_pretrained",
        lambda name: hf.GPT2LMHeadModel(config).eval() if name == "gpt2" else load(name),
    )
    monkeypatch.chdir(tmp_path)
    ids = tiny.documents(2, 700)
    names = {"input_ids": ids, "mask": torch.ones_like(ids), "next_ids": tiny.documents(2, 50, seed=1)}
    exec(code, names)
    assert isinstance(names["model"], cf.RecurrentForCausalLM)
    assert names["more"].n_scored == 100
    assert (tmp_path / "my-model" / "config.json").exists()
