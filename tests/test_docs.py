# SPDX-License-Identifier: Apache-2.0
"""The documentation points at code that exists, and its Python examples run."""

import ast
import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
import transformers as hf

import carryforward as cf

ROOT = Path(__file__).resolve().parent.parent
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


def test_imports_point_one_way():
    """In the order of the list in docs/design.md."""
    listed = re.findall(r"^([\w/]+)\.py ", (ROOT / "docs" / "design.md").read_text(), re.MULTILINE)
    present = {path.relative_to(anchors.SOURCE).with_suffix("").as_posix() for path in anchors.SOURCE.rglob("*.py")}
    assert sorted(listed) == sorted(name for name in present if not name.endswith("__init__"))
    for position, module in enumerate(listed):
        assert imports_of(module) <= set(listed[:position]), module


def imports_of(module):
    """The modules of ours that a module imports, as paths from the package."""
    found = set()
    for node in ast.walk(ast.parse((anchors.SOURCE / f"{module}.py").read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            folder = Path(module).parents[node.level - 1] / (node.module or "").replace(".", "/")
            if (anchors.SOURCE / folder).is_dir():
                found |= {(folder / name.name).as_posix() for name in node.names}
            else:
                found.add(folder.as_posix())
    return {name for name in found if (anchors.SOURCE / f"{name}.py").exists()}


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
