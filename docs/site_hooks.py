# SPDX-License-Identifier: Apache-2.0
"""Hooks of the documentation site (`mkdocs.yml`): pages that are not in `docs/`, and links to them.

The pages of `docs/` link to experiments, benchmarks and code by paths of the repository, so that the links work where
people read the repository itself. The site gets these pages and figures too, and the code as pages with line numbers.
Links are rewritten to where things are on the site. Two pages of reference are made from the package itself: one of all
commands, one of all public names. Notebooks become pages without results.
"""

import json
import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

ROOT = Path(__file__).resolve().parent.parent
# With pages, figures and results:
FOLDERS = ["experiments", "benchmarks", "pretraining", "examples", "src/carryforward/bundled"]
FILES = ["CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"]
SUFFIXES = {".md", ".png", ".svg", ".json", ".yaml", ".txt", ".py", ".ipynb"}
LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)\s]+)(?=\))")  # not to a host, nor to a place on the same page
CODE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.DOTALL | re.MULTILINE)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the repository's other pages, the code, and the two pages of reference."""
    paths = [ROOT / name for name in FILES]
    paths += [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if path.suffix in SUFFIXES]
    paths += sorted((ROOT / "src").rglob("*.py"))
    for path in paths:
        name = path.relative_to(ROOT).as_posix()
        if path.suffix == ".py":
            files.append(File.generated(config, f"{name}.html", content=source_page(name, path.read_text())))
        elif path.suffix == ".ipynb":
            files.append(File.generated(config, f"{name}.md", content=notebook_page(path.read_text())))
        elif path.is_file():
            files.append(File.generated(config, name, abs_src_path=str(path)))
    files.append(File.generated(config, "reference/commands.md", content=commands_page()))
    files.append(File.generated(config, "reference/python.md", content=names_page()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite a page's links to files of the repository, but none in code blocks."""
    here = page.file.src_uri
    parts, end = [], 0
    for block in CODE.finditer(markdown):
        parts += [rewrite_links(markdown[end : block.start()], here, files.src_uris), block[0]]
        end = block.end()
    return "".join([*parts, rewrite_links(markdown[end:], here, files.src_uris)])


def rewrite_links(text: str, here: str, pages) -> str:
    """The text of the page `here` with links as the site has them; `pages` are the site's files."""
    return LINK.sub(lambda match: site_link(match[1], here, pages), text)


def site_link(link: str, here: str, pages) -> str:
    """Where a link of the page `here` leads on the site; the link itself if the site has nothing there."""
    path, hash_sign, place = link.partition("#")
    in_repository = here if here in FILES or here.startswith(tuple(FOLDERS)) else f"docs/{here}"
    target = posixpath.normpath(posixpath.join(posixpath.dirname(in_repository), path))
    target = target.removeprefix("docs/")
    if target == "README.md":
        target = "index.md"
    if target.endswith(".py"):
        target = f"{target}.html"
        place = place.replace("L", "line-")
    elif target.endswith(".ipynb"):
        target = f"{target}.md"
    elif target not in pages and f"{target}/README.md" in pages:
        target = f"{target}/README.md"
    if target not in pages:
        return link
    return os.path.relpath(target, posixpath.dirname(here) or ".") + hash_sign + place


def source_page(name: str, code: str) -> str:
    """A file of code as a page; its lines have anchors `line-1`, `line-2` ..."""
    formatter = HtmlFormatter(full=True, title=name, linenos="table", lineanchors="line", anchorlinenos=True)
    return highlight(code, PythonLexer(), formatter)


def notebook_page(notebook: str) -> str:
    """A notebook as a page: its texts, and its code in blocks."""
    parts = []
    for cell in json.loads(notebook)["cells"]:
        text = "".join(cell["source"])
        parts.append(f"```python\n{text}\n```" if cell["cell_type"] == "code" else text)
    return "\n\n".join(parts) + "\n"


SECTIONS = {  # of the page of public names, by package
    "models": "Models", "config": "Settings of a recurrence", "memories": "Memories", "state": "States",
    "data": "Texts", "evaluation": "Evaluation", "training": "Training", "embeddings": "Embeddings",
    "qa": "Question answering",
}  # fmt: skip
FIELDS_ONLY = {"config", "memories"}  # settings: their fields are what people use


def names_page() -> str:
    """All public names with their docstrings, by package."""
    import carryforward

    lines = ["# Python", "", "Every name here can be imported from `carryforward` itself.", ""]
    homes = carryforward._HOME
    missing = {home.partition(".")[0] for home in homes.values()} - SECTIONS.keys()
    assert not missing, f"packages without a section: {missing}"
    for package, title in SECTIONS.items():
        lines += [f"## {title}", ""]
        names = [name for name, home in homes.items() if home.partition(".")[0] == package]
        options = ["    options: {members: false}"] if package in FIELDS_ONLY else []
        lines += [line for name in names for line in (f"::: carryforward.{homes[name]}.{name}", *options, "")]
    return "\n".join(lines)


def commands_page() -> str:
    """All commands with their arguments and options, as `--help` shows them."""
    import typer

    from carryforward.cli.main import app

    lines = ["# Commands", "", "This page is made from the command line itself: `carryforward COMMAND --help`.", ""]
    for name, command in _commands(typer.main.get_command(app), "carryforward"):
        lines += [f"## {name}", "", _one_line(command.help), ""]
        parameters = [parameter for parameter in command.params if not getattr(parameter, "hidden", False)]
        if parameters:
            lines += ["| option | default | what it does |", "| --- | --- | --- |"]
            lines += [_row(parameter) for parameter in parameters] + [""]
    return "\n".join(lines)


def _commands(command, name: str):
    """A command, or those of a group, each with its full name."""
    if not hasattr(command, "commands"):
        yield name, command
        return
    for part, child in command.commands.items():
        yield from _commands(child, f"{name} {part}")


def _row(parameter) -> str:
    """A row of a command's table."""
    is_argument = parameter.param_type_name == "argument"
    names = [parameter.name.upper()] if is_argument else [*parameter.opts, *parameter.secondary_opts]
    default = "required" if parameter.required else _default(parameter)
    return f"| {', '.join(f'`{name}`' for name in names)} | {default} | {_one_line(parameter.help).replace('|', '/')} |"


def _default(parameter) -> str:
    """The default as a person would write it; nothing for flags and options without one."""
    if isinstance(parameter.show_default, str):
        return parameter.show_default
    default = parameter.default
    nothing = default is None or isinstance(default, bool) or default == () or callable(default)
    return "" if nothing else f"`{default}`"


def _one_line(text: str | None) -> str:
    """Help text without its line breaks."""
    return " ".join((text or "").replace("\b", "").split())
