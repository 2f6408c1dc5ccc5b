# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward samples`: tables as in the paper's appendix, one by topic, one by people.

Nothing is picked by hand or for its looks: rows are the first that were drawn. `samples.md` and `samples.html` hold
text, `samples.json` only where it comes from, and how many continuations name or refer to people of their contexts.
"""

import dataclasses
import html
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ..models.loading import usable_device
from ..settings import ContinuationSettings
from ..utils.files import write_json, write_text
from ..utils.markdown import markdown_table
from .continuations import Continuations
from .mentions import People, mentions, people, taken_up
from .topic_report import continued_and_fitted, diverging, origin
from .topics import Topics

TAIL = 60  # words of a context that are shown
_WORDS = 5  # of a topic
_WITHOUT_TEXT = ("document", "start", "about", "notes")
_INTRO = (
    "What models write after a context of {tokens} tokens, of which the end is shown, always the likeliest token. Rows "
    "are the first that were drawn: one for each of the commonest topics, and those whose contexts name people. "
    "Underlined: names and pronouns of the context that are taken up. Written by {models} on {data}, seed {seed}."
)


@dataclass(frozen=True)
class Row:
    """A context and what was written after it.

    Attributes:
        number: which of the contexts that were drawn.
        about: what it is shown for: words of its topic, or names.
        notes: a remark on each writer.
    """

    number: int
    about: str
    notes: dict[str, str]


def tabulate(
    name: str, settings: ContinuationSettings, out: Path, *, rows: int = 10, device: str | None = None
) -> dict[str, Any]:
    """Continue contexts, and write the tables; gives back what `samples.json` holds."""
    device = usable_device(device)
    found, fitted = continued_and_fitted(name, settings, out, device)
    present = [people(context) for context in found.contexts]
    tables = {"topic": by_topic(fitted, found)[:rows], "people": by_people(found, present)[:rows]}
    result = {
        "kind": "samples",
        **origin(device),
        "settings": {**dataclasses.asdict(settings), "topics": len(fitted)},
        **found.about,
        "people": shares(found, present),
        "rows": {
            what: [{key: row[key] for key in _WITHOUT_TEXT} for row in with_texts(table, found)]
            for what, table in tables.items()
        },
    }  # fmt: skip
    write_json(out / "samples.json", result)
    write_text(out / "samples.md", _page(_MARKDOWN, result, tables, found, present))
    write_text(out / "samples.html", _page(_HTML, result, tables, found, present))
    return result


def by_topic(fitted: Topics, found: Continuations) -> list[Row]:
    """For each topic the first context that has more of it than of any other; the commonest topics first."""
    strongest = fitted.distributions(found.contexts).argmax(axis=1)
    known = fitted.knows(found.contexts)
    divergences, _ = diverging(fitted, found)
    words = fitted.top_words(_WORDS)
    rows = []
    for topic, _ in Counter(strongest[known].tolist()).most_common():
        number = int(np.flatnonzero((strongest == topic) & known)[0])
        notes = {writer: f"divergence {values[number]:.2f}" for writer, values in divergences.items()}
        rows.append(Row(number, ", ".join(words[topic]), notes))
    return rows


def by_people(found: Continuations, present: list[People]) -> list[Row]:
    """The contexts that name someone."""
    rows = []
    for number, before in enumerate(present):
        if before.names:
            notes = {}
            for writer, texts in found.written.items():
                taken = taken_up(before, texts[number])
                notes[writer] = ", ".join((*taken.names, *taken.pronouns)) or "nobody"
            rows.append(Row(number, ", ".join((*before.names, *before.pronouns)), notes))
    return rows


def with_texts(table: list[Row], found: Continuations) -> list[dict[str, Any]]:
    """Rows with all that belongs to them: rows for a DataFrame."""
    return [
        {
            "document": found.names[row.number],
            "start": int(found.places[row.number, 1]),
            "about": row.about,
            "context": found.contexts[row.number],
            **{writer: texts[row.number] for writer, texts in found.written.items()},
            "notes": row.notes,
        }
        for row in table
    ]


def shares(found: Continuations, present: list[People]) -> dict[str, Any]:
    """Of the contexts that name people, and of those that use pronouns, how many continuations take some of them up."""
    taken = {
        writer: [taken_up(before, text) for before, text in zip(present, texts, strict=True)]
        for writer, texts in found.written.items()
    }
    return {
        "with_names": sum(bool(one.names) for one in present),
        "with_pronouns": sum(bool(one.pronouns) for one in present),
        "taken_up": {writer: {"names": sum(bool(one.names) for one in those),
                              "pronouns": sum(bool(one.pronouns) for one in those)} for writer, those in taken.items()},
    }  # fmt: skip


def markdown(result: dict[str, Any]) -> str:
    """How many continuations take up people of their contexts."""
    return _markdown_table(*_shares_table(result))


def _shares_table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    counted = result["people"]
    named, referred = counted["with_names"], counted["with_pronouns"]
    head = ["", f"names someone of the context, of {named:,}", f"refers to someone by pronoun, of {referred:,}"]
    rows = [
        [writer, _share(one["names"], named), _share(one["pronouns"], referred)]
        for writer, one in counted["taken_up"].items()
    ]
    return head, rows


def _share(count: int, of: int) -> str:
    return f"{count:,} ({count / of:.1%})" if of else "–"


# --- pages: what comes from a text stays text, nothing in it is markup -----------------------------------------------


@dataclass(frozen=True)
class _Form:
    """How a page is written."""

    escape: Callable[[str], str]
    table: Callable[[list[str], list[list[str]]], str]
    heading: str
    start: str
    end: str = ""


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", html.escape(text, quote=False))


def _markdown_table(head: list[str], rows: list[list[str]]) -> str:
    return markdown_table(head, rows, words=len(head))


def _html_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [_cells("th", head), *(_cells("td", cells) for cells in rows)]
    return "<div class=wide><table>\n" + "\n".join(lines) + "\n</table></div>"


def _cells(tag: str, cells: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


_MARKDOWN = _Form(_escape_markdown, _markdown_table, "\n\n## {}\n\n", "# Continuations\n\n{}\n\n{}", "\n")
_HTML = _Form(
    html.escape,
    _html_table,
    "\n<h2>{}</h2>\n",
    """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Continuations</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem; }}
.wide {{ overflow-x: auto; }}
table {{ border-collapse: collapse; }}
th, td {{ border-top: 1px solid #8886; padding: .5rem .7rem; text-align: left; vertical-align: top; min-width: 9rem; }}
small {{ display: block; opacity: .7; margin-top: .3rem; }}
u {{ text-decoration-color: #d55e00; text-decoration-thickness: 2px; }}
</style></head><body><h1>Continuations</h1><p>{}</p>
{}""",
    "\n</body></html>\n",
)


def _told(model: dict[str, Any]) -> str:
    tokens = model["trained_tokens"]
    return model["name"] + (f" (trained on {tokens:,} tokens)" if tokens else "")


def _page(
    form: _Form, result: dict[str, Any], tables: dict[str, list[Row]], found: Continuations, present: list[People]
) -> str:
    data, models = result["data"], [_told(one) for one in (result["model"], result["plain"]) if one]
    intro = form.escape(
        _INTRO.format(
            tokens=result["context_tokens"], models=" and ".join(models), data=f"{data['name']}, {data['split']}",
            seed=result["settings"]["seed"],
        )
    )  # fmt: skip
    parts = [form.start.format(intro, form.table(*_shares_table(result)))]
    for name, table in tables.items():
        rows = [_row(form, row, found, present[row.number]) for row in table]
        parts += [form.heading.format(f"By {name}"), form.table(["context", *found.written, name], rows)]
    return "".join(parts) + form.end


def _row(form: _Form, row: Row, found: Continuations, before: People) -> list[str]:
    def cell(text: str, note: str) -> str:
        return f"{text} <small>{form.escape(note)}</small>"

    tail = f"… {' '.join(found.contexts[row.number].split()[-TAIL:])}"
    place = f"{found.names[row.number]}, context from token {found.places[row.number, 1]:,}"
    written = (
        cell(_marked(" ".join(texts[row.number].split()), before, form.escape), row.notes[writer])
        for writer, texts in found.written.items()
    )
    return [cell(form.escape(tail), place), *written, form.escape(row.about)]


def _marked(text: str, before: People, escape: Callable[[str], str]) -> str:
    """A text with those underlined that it takes up."""
    parts, end = [], 0
    for start, stop, _ in mentions(before, text):
        parts += [escape(text[end:start]), f"<u>{escape(text[start:stop])}</u>"]
        end = stop
    return "".join([*parts, escape(text[end:])])
