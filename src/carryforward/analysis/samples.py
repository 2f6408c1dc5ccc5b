# SPDX-License-Identifier: Apache-2.0
"""`carryforward samples`: tables of continuations as in the paper's appendix, one by topic and one by people.

Rows are not selected by hand: they are the first contexts that were drawn. `samples.md` and `samples.html` contain
texts. `samples.json` contains only where they come from, and how many continuations mention people of their contexts.
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
from ..settings.commands import ContinuationSettings
from ..utils.files import write_json, write_text
from ..utils.markdown import markdown_table
from .continuations import Continuations
from .mentions import People, find_mentions, find_people, mentioned_people
from .topic_model import Topics
from .topics import continuations_and_topics, divergences_by_writer, topic_provenance

CONTEXT_WORDS = 60  # shown of a context, from its end
_TOPIC_WORDS = 5  # shown of a topic
_WITHOUT_TEXT = ("document", "start", "about", "notes")
_INTRO = (
    "Greedy continuations of contexts of {tokens} tokens; only the end of a context is shown. Rows are the first "
    "contexts that were drawn: one for each of the most frequent topics, and those that name people. Underlined: names "
    "and pronouns of the context that are mentioned again. Models: {models}. Data: {data}, seed {seed}."
)


@dataclass(frozen=True)
class Row:
    """A row of a table: a context and its continuations.

    Attributes:
        number: index of the context.
        about: words of its topic, or its people.
        notes: a note on the continuation of each writer.
    """

    number: int
    about: str
    notes: dict[str, str]


def samples(
    name: str, settings: ContinuationSettings, out: Path, *, rows: int = 10, device: str | None = None
) -> dict[str, Any]:
    """Continue contexts and write the tables to `out`; returns the content of `samples.json`.

    Args:
        rows: of each table.
    """
    device = usable_device(device)
    continuations, fitted = continuations_and_topics(name, settings, out, device)
    people = [find_people(context) for context in continuations.contexts]
    tables = {"topic": by_topic(fitted, continuations)[:rows], "people": by_people(continuations, people)[:rows]}
    result = {
        "kind": "samples",
        **topic_provenance(device),
        "settings": {**dataclasses.asdict(settings), "topics": len(fitted)},
        **continuations.metadata,
        "people": count_mentions(continuations, people),
        "rows": {
            table: [{key: row[key] for key in _WITHOUT_TEXT} for row in with_texts(table_rows, continuations)]
            for table, table_rows in tables.items()
        },
    }
    write_json(out / "samples.json", result)
    write_text(out / "samples.md", _page(_MARKDOWN, result, tables, continuations, people))
    write_text(out / "samples.html", _page(_HTML, result, tables, continuations, people))
    return result


def by_topic(fitted: Topics, continuations: Continuations) -> list[Row]:
    """For each topic, the first context in which it is the strongest; the most frequent topics come first."""
    strongest = fitted.distributions(continuations.contexts).argmax(axis=1)
    known = fitted.has_known_words(continuations.contexts)
    divergences, _ = divergences_by_writer(fitted, continuations)
    words = fitted.top_words(_TOPIC_WORDS)
    rows = []
    for topic, _ in Counter(strongest[known].tolist()).most_common():
        number = int(np.flatnonzero((strongest == topic) & known)[0])
        notes = {writer: f"divergence {values[number]:.2f}" for writer, values in divergences.items()}
        rows.append(Row(number, ", ".join(words[topic]), notes))
    return rows


def by_people(continuations: Continuations, people: list[People]) -> list[Row]:
    """The contexts that name someone; `people` are those of each context."""
    rows = []
    for number, in_context in enumerate(people):
        if in_context.names:
            notes = {}
            for writer, texts in continuations.written.items():
                mentioned = mentioned_people(in_context, texts[number])
                notes[writer] = ", ".join((*mentioned.names, *mentioned.pronouns)) or "nobody"
            rows.append(Row(number, ", ".join((*in_context.names, *in_context.pronouns)), notes))
    return rows


def with_texts(rows: list[Row], continuations: Continuations) -> list[dict[str, Any]]:
    """Rows with their texts, as dictionaries for a DataFrame."""
    return [
        {
            "document": continuations.names[row.number],
            "start": int(continuations.starts[row.number, 1]),
            "about": row.about,
            "context": continuations.contexts[row.number],
            **{writer: texts[row.number] for writer, texts in continuations.written.items()},
            "notes": row.notes,
        }
        for row in rows
    ]


def count_mentions(continuations: Continuations, people: list[People]) -> dict[str, Any]:
    """Count the contexts with names and with pronouns, and for each writer the continuations that use them again."""
    mentioned = {
        writer: [mentioned_people(in_context, text) for in_context, text in zip(people, texts, strict=True)]
        for writer, texts in continuations.written.items()
    }
    return {
        "with_names": sum(bool(one.names) for one in people),
        "with_pronouns": sum(bool(one.pronouns) for one in people),
        "taken_up": {
            writer: {"names": sum(bool(one.names) for one in each), "pronouns": sum(bool(one.pronouns) for one in each)}
            for writer, each in mentioned.items()
        },
    }


def markdown(result: dict[str, Any]) -> str:
    """A table of how many continuations mention people of their contexts."""
    return _markdown_table(*_mentions_table(result))


def _mentions_table(result: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    counts = result["people"]
    names, pronouns = counts["with_names"], counts["with_pronouns"]
    head = ["", f"uses a name of the context, of {names:,}", f"uses a pronoun of the context, of {pronouns:,}"]
    rows = [
        [writer, _count_and_share(row["names"], names), _count_and_share(row["pronouns"], pronouns)]
        for writer, row in counts["taken_up"].items()
    ]
    return head, rows


def _count_and_share(count: int, total: int) -> str:
    return f"{count:,} ({count / total:.1%})" if total else "–"


# --- pages: all texts are escaped, so that none of their characters is read as markup --------------------------------


@dataclass(frozen=True)
class _Format:
    """How to write a page in a markup language."""

    escape: Callable[[str], str]
    table: Callable[[list[str], list[list[str]]], str]
    heading: str
    start: str
    end: str = ""


def _escape_markdown(text: str) -> str:
    return re.sub(r"([\\`*_\[\]|~$#])", r"\\\1", html.escape(text, quote=False))


def _markdown_table(head: list[str], rows: list[list[str]]) -> str:
    return markdown_table(head, rows, text_columns=len(head))


def _html_table(head: list[str], rows: list[list[str]]) -> str:
    lines = [_html_row("th", head), *(_html_row("td", cells) for cells in rows)]
    return "<div class=wide><table>\n" + "\n".join(lines) + "\n</table></div>"


def _html_row(tag: str, cells: list[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{cell}</{tag}>" for cell in cells) + "</tr>"


_MARKDOWN = _Format(_escape_markdown, _markdown_table, "\n\n## {}\n\n", "# Continuations\n\n{}\n\n{}", "\n")
_HTML = _Format(
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


def _describe(model: dict[str, Any]) -> str:
    tokens = model["trained_tokens"]
    return model["name"] + (f" (trained on {tokens:,} tokens)" if tokens else "")


def _page(
    markup: _Format,
    result: dict[str, Any],
    tables: dict[str, list[Row]],
    continuations: Continuations,
    people: list[People],
) -> str:
    data, models = result["data"], [_describe(model) for model in (result["model"], result["plain"]) if model]
    intro = markup.escape(
        _INTRO.format(
            tokens=result["context_tokens"], models=" and ".join(models), data=f"{data['name']}, {data['split']}",
            seed=result["settings"]["seed"],
        )
    )  # fmt: skip
    parts = [markup.start.format(intro, markup.table(*_mentions_table(result)))]
    for name, table in tables.items():
        rows = [_row_cells(markup, row, continuations, people[row.number]) for row in table]
        parts += [markup.heading.format(f"By {name}"), markup.table(["context", *continuations.written, name], rows)]
    return "".join(parts) + markup.end


def _row_cells(markup: _Format, row: Row, continuations: Continuations, people: People) -> list[str]:
    def cell(text: str, note: str) -> str:
        return f"{text} <small>{markup.escape(note)}</small>"

    context = f"… {' '.join(continuations.contexts[row.number].split()[-CONTEXT_WORDS:])}"
    source = f"{continuations.names[row.number]}, context from token {continuations.starts[row.number, 1]:,}"
    written = (
        cell(_underlined(" ".join(texts[row.number].split()), people, markup.escape), row.notes[writer])
        for writer, texts in continuations.written.items()
    )
    return [cell(markup.escape(context), source), *written, markup.escape(row.about)]


def _underlined(text: str, people: People, escape: Callable[[str], str]) -> str:
    """Escape a text and underline its mentions of people."""
    parts, end = [], 0
    for start, stop, _ in find_mentions(people, text):
        parts += [escape(text[end:start]), f"<u>{escape(text[start:stop])}</u>"]
        end = stop
    return "".join([*parts, escape(text[end:])])
