# SPDX-License-Identifier: Apache-2.0
"""What the scripts of these experiments share: their command line, and how they write results and pages.

Every `run.py` has two modes. `run.py ARGUMENTS` measures, writes JSON and then the page; `run.py --tables-only` writes
the page and its figures from the JSON that is there.
"""

import argparse
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from carryforward.utils.files import write_text
from carryforward.utils.provenance import provenance

OTHER = Path(__file__).parent
REPOSITORY = OTHER.parents[1]


def command_line(
    description: str,
    add_arguments: Callable[[argparse.ArgumentParser], None],
    measure: Callable[[argparse.Namespace], None],
    write_pages: Callable[[], None],
) -> None:
    """Run a script: measure and write the pages, or one of the two.

    Args:
        description: the script's docstring, shown by `--help`.
        add_arguments: declares the arguments of `measure`. `--tables-only` needs none of them.
        measure: runs the experiment and writes its JSON.
        write_pages: writes README.md and the figures from the JSON.
    """
    switches = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    choice = switches.add_mutually_exclusive_group()
    choice.add_argument("--tables-only", action="store_true", help="measure nothing, write the page from the JSON")
    choice.add_argument("--no-pages", action="store_true", help="measure, and leave the page as it is")
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, parents=[switches],
        allow_abbrev=False,
    )  # fmt: skip
    add_arguments(parser)
    arguments, rest = switches.parse_known_args()
    if arguments.tables_only and rest:
        parser.error(f"--tables-only takes no other arguments, got {' '.join(rest)}")
    if not arguments.tables_only:
        arguments = parser.parse_args()
        measure(arguments)
    if not arguments.no_pages:
        write_pages()


def new_result(kind: str, *, seed: int = 0, device: str = "cpu") -> dict[str, Any]:
    """The fields that every result starts with: its kind, versions, commit, hardware and seed."""
    return {"kind": kind, **provenance(device), "seed": seed}


def write_result(path: Path, result: dict[str, Any], *, indent: int | None = 1) -> None:
    """Write a result as JSON, with its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(result, indent=indent) + "\n")


def strip_folders(fields: dict[str, Any], *names: str) -> None:
    """Cut paths down to their last part, in place: results are published, and folders differ between machines."""
    for name in names:
        if fields[name] is not None:
            fields[name] = Path(fields[name]).name


def write_page(folder: Path, lines: Iterable[str]) -> None:
    """Write an experiment's README.md, with the command that regenerates it as the last line."""
    script = (folder / "run.py").relative_to(REPOSITORY)
    write_text(folder / "README.md", "\n".join([*lines, "", f"Written by `python {script} --tables-only`."]) + "\n")


def write_readme_section(folder: Path, text: str) -> None:
    """Replace an experiment's section of the main README, between two comments that name it."""
    readme, script = REPOSITORY / "README.md", (folder / "run.py").relative_to(REPOSITORY)
    begin, end = f"<!-- {folder.name}: written by {script} -->", f"<!-- end of {folder.name} -->"
    before, found, rest = readme.read_text().partition(begin)
    _, found_end, after = rest.partition(end)
    if not found or not found_end:
        raise SystemExit(f"{readme} has no section between {begin} and {end}.")
    write_text(readme, f"{before}{begin}\n\n{text}\n{end}{after}")


def paragraph(text: str) -> str:
    """Text that is wrapped in the source, on one line."""
    return " ".join(text.split())
