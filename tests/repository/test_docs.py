# SPDX-License-Identifier: Apache-2.0
"""The documentation refers to code, commands and options that exist, its examples run, and packages stay in order."""

import ast
import contextlib
import importlib
import importlib.util
import io
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from helpers.cli_runner import invoke

import carryforward as cf
from carryforward.cli.main import app
from carryforward.utils import install
from carryforward.utils.install import install_command

ROOT = Path(__file__).resolve().parents[2]


def script(path):
    """A script of the repository, as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


anchors, install_commands = script(ROOT / "docs" / "anchors.py"), script(ROOT / "docs" / "install_commands.py")

PAGES = sorted((ROOT / "docs").glob("*.md"))
ALL_PAGES = [ROOT / "README.md", *PAGES]


def code_blocks(text, language):
    """The fenced blocks of a page in a language."""
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [code for name, code in blocks if name == language]


def all_pages(test):
    return pytest.mark.parametrize("page", ALL_PAGES, ids=lambda page: page.name)(test)


# --- links and names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_to_code_point_at_their_lines(page):
    text = page.read_text()
    assert anchors.refreshed(text) == text, "run `python docs/anchors.py`"
    assert len(re.findall(r"\.py#L\d+", text)) == len(anchors.LINK.findall(text)), "a link has another form"


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("memories/vector.VectorMemory.pol", "no 'pol' in memories/vector.py"),
        ("memories/vectors.VectorMemory.pool", "no module memories/vectors.py"),
    ],
)
def test_wrong_links_to_code_are_found(name, message):
    with pytest.raises(LookupError, match=message):
        anchors.refreshed(f"[`{name}`](../src/carryforward/memories/vector.py#L1)")


@all_pages
def test_links_to_files_exist(page):
    missing = [
        target
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text())
        if not target.startswith("http") and not (page.parent / target).exists()
    ]
    assert not missing


@all_pages
def test_python_examples_use_names_that_exist(page):
    for code in code_blocks(page.read_text(), "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("carryforward"):
                module = importlib.import_module(node.module)
                assert all(hasattr(module, name.name) for name in node.names), ast.unparse(node)
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "cf":
                assert hasattr(cf, node.attr), ast.unparse(node)


@all_pages
def test_commands_have_the_options_that_are_shown(page):
    text = page.read_text()
    lines = [line for block in code_blocks(text, "") for line in re.findall(r"carryforward (.+)", block)]
    lines += re.findall(r"`carryforward ([a-z][^`]*)`", text)
    for line in lines:
        command, arguments = typer.main.get_command(app), shlex.split(line, comments=True)
        while arguments and hasattr(command, "commands"):
            name = arguments.pop(0)
            assert name in command.commands, line
            command = command.commands[name]
        if command.context_settings.get("ignore_unknown_options"):  # another program reads them
            continue
        known = {"--help", *(option for parameter in command.params for option in parameter.opts)}
        known |= {option for parameter in command.params for option in parameter.secondary_opts}
        assert {argument for argument in arguments if argument.startswith("--")} <= known, line


# --- packages --------------------------------------------------------------------------------------------------------

# Every package imports only packages before it. Modules of the root are named like packages.
ORDER = [
    "windows", "presets", "settings", "utils", "distributed", "data", "backbones", "state", "memories", "config",
    "engine", "models", "evaluation", "training", "analysis", "qa", "embeddings", "tasks", "integrations",
    "reproduction", "registration", "cli", "__main__",
]  # fmt: skip
MAX_ROOT_MODULES, MAX_FILES = 8, 16


def test_packages_import_one_way():
    present = {path.relative_to(anchors.SOURCE).parts[0].removesuffix(".py") for path in anchors.SOURCE.rglob("*.py")}
    assert sorted(ORDER) == sorted(present - {"__init__"})
    wrong = {}
    for path in anchors.SOURCE.rglob("*.py"):
        package = path.relative_to(anchors.SOURCE).parts[0].removesuffix(".py")
        if package != "__init__":
            later = imported_packages(path) - set(ORDER[: ORDER.index(package) + 1])
            wrong |= {path.relative_to(anchors.SOURCE).as_posix(): sorted(later)} if later else {}
    assert not wrong


def imported_packages(path):
    """The packages of carryforward, or modules of its root, that a file imports."""
    parents = path.relative_to(anchors.SOURCE).parts[:-1]
    packages = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.level:
            target = [*parents[: len(parents) - node.level + 1], *(node.module or "").split(".")]
            names = [target[0]] if target[0] else [name.name for name in node.names]
            packages |= {name for name in names if not name.startswith("__")}
    return packages


def test_packages_stay_small():
    """The root has few modules and every folder few files. Commands are not counted: each has a file in `cli`."""
    assert len([*anchors.SOURCE.glob("*.py")]) <= MAX_ROOT_MODULES
    names = [name.replace("-", "_") for name in typer.main.get_command(app).commands]
    commands = {anchors.SOURCE / "cli" / f"{name}.py" for name in names}
    assert all(path.exists() for path in commands)
    files = [path for path in anchors.SOURCE.rglob("*") if path.is_file() and path.parent.name != "__pycache__"]
    folders = {path.parent for path in files} - {anchors.SOURCE}
    sizes = {folder.name: len([path for path in files if path.parent == folder and path not in commands])
             for folder in folders}  # fmt: skip
    assert {name: size for name, size in sizes.items() if size > MAX_FILES} == {}


def test_every_module_can_be_imported_first():
    """Whatever a user imports first, the Auto classes know the models afterwards.

    Modules that import no model are tried no further than to there: what follows is the same as after `windows`.
    """
    modules = {path.relative_to(anchors.SOURCE).with_suffix("") for path in anchors.SOURCE.rglob("*.py")}
    names = sorted(".".join(module.parts) for module in modules if module.stem not in ("__init__", "__main__"))
    if importlib.util.find_spec("lm_eval") is None:  # make test-all installs it
        names.remove("evaluation.lm_eval")
    assert "windows" in names
    script = f"""
import gc, importlib, importlib.util, os, sys
gc.disable()
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "peft" else find(name, *rest)  # it imports them itself
import torch, transformers.modeling_utils, transformers.tokenization_utils_base, transformers.trainer_callback
assert "transformers.models.auto.modeling_auto" not in sys.modules
for name in {names}:
    child = os.fork()  # torch is imported once
    if not child:
        importlib.import_module(f"carryforward.{{name}}")
        models = {{module for module in sys.modules if module.startswith("carryforward.models.")}}
        if name != "windows" and models == {{"carryforward.models.auto"}}:
            assert any(type(finder).__module__ == "carryforward.registration" for finder in sys.meta_path)
            os._exit(0)
        from transformers import AutoConfig, AutoModel
        AutoModel.register
        AutoConfig.for_model("carryforward")
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0, name
"""
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.returncode == 0, process.stderr[-2000:]


# --- the README ------------------------------------------------------------------------------------------------------

README = (ROOT / "README.md").read_text()


def test_the_readmes_example_runs_and_the_next_command_reads_what_it_saves(monkeypatch, tmp_path):
    """As printed, but for the number of tokens that are generated."""
    (code,) = code_blocks(README, "python")
    (command,) = re.findall(r"^carryforward (generate my-model .+) --max-new-tokens", README, re.MULTILINE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CARRYFORWARD_CACHE", str(tmp_path / "cache"))
    names, printed = {}, io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, names)
    alone, carried = map(float, re.search(r"perplexity ([\d.]+) .*, ([\d.]+) with what", printed.getvalue()).groups())
    assert carried < alone
    assert names["model"].config.recurrence.memories == (cf.KVMemoryConfig(recent=28, sinks=4),), "what is recommended"
    generated = invoke(*shlex.split(command), "--max-new-tokens", "5")
    assert generated.exit_code == 0, generated.stderr
    assert "5 tokens" in generated.stderr


def test_the_readmes_tables_are_those_of_the_results(monkeypatch):
    """Sections that scripts write are as the scripts would write them from the JSON that is there."""
    monkeypatch.syspath_prepend(ROOT / "experiments" / "other")
    written = {}
    for name in re.findall(r"<!-- end of ([\w-]+) -->", README):
        module = script(ROOT / "experiments" / "other" / name / "run.py")
        monkeypatch.setattr(module, "write_readme_section", lambda folder, text: written.update({folder.name: text}))
        monkeypatch.setattr(module, "write_page", lambda folder, lines: None, raising=False)
        if hasattr(module, "report"):
            monkeypatch.setattr(module.report, "figure", lambda *arguments: None)
        (module.write_pages if hasattr(module, "write_pages") else module.main)()
    assert sorted(written) == ["demo", "overview"]
    for name, text in written.items():
        assert f"-->\n\n{text}\n<!-- end of {name} -->" in README, f"run experiments/other/{name}/run.py"


def test_the_first_numbers_are_not_perplexities_of_words():
    assert not re.search(r"word perplexity", README[: README.index("## The paper")])


# --- how to install --------------------------------------------------------------------------------------------------


def test_the_documentation_installs_as_the_package_says():
    texts = {page.name: page.read_text() for page in install_commands.pages()}
    stale = [name for name, text in texts.items() if install_commands.refreshed(text) != text]
    assert stale == [], "run `python docs/install_commands.py`"
    assert install_command() in README
    assert install_command("topics", "figures") in texts["seeing.md"]


def test_a_release_changes_all_forms(monkeypatch):
    monkeypatch.setattr(install, "SOURCE", "carryforward")
    text = 'pip install . and `pip install -e ".[hub]"` and pip install "lm-eval[hf]>=0.4.13"'
    expected = 'pip install carryforward and `pip install "carryforward[hub]"` and pip install "lm-eval[hf]>=0.4.13"'
    assert install_commands.refreshed(text) == install_commands.refreshed(expected) == expected
