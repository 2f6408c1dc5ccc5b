# SPDX-License-Identifier: Apache-2.0
"""`carryforward topics`: do continuations stay with the topics of their contexts?

The result is plain JSON. Its only text is the topics' words. Divergences are in nats. A text without known words has a
uniform topic mixture, which is not far from any other: "nothing" is its mean divergence from the contexts, and "worded"
compares only the contexts in which both continuations have known words.

    {"kind": "topics", "commit": "...", ..., "settings": {...}, "model": {"name": "runs/a", ...}, "plain": {...},
     "data": {...}, "topics": {"documents": 1250, "words": 10000, "top_words": [["sea", ...], ...]},
     "writers": {"recurrent": {"mean": 0.31, "bits": 0.45, "wordless": 3}, "state removed": {...}, "plain": {...}},
     "nothing": 0.32, "against": {"plain": {"difference": -0.02, "interval": [-0.03, -0.01], "closer": 180, ...}, ...},
     "worded": {...},
     "contexts": [["a.txt", 1200], ...], "divergences": {"recurrent": [0.3, ...], ...}}
"""

import dataclasses
import math
from collections.abc import Iterator
from importlib import metadata
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from ..data.corpora import open_corpus
from ..data.texts import Corpus
from ..models.loading import need_state, usable_device
from ..settings.commands import ContinuationSettings
from ..utils.files import write_json
from ..utils.markdown import escape_markdown, markdown_table
from ..utils.plotting import COLOURS, new_figure, save_figure, style_axes
from ..utils.progress import ProgressBar
from ..utils.provenance import provenance
from . import topic_model
from .continuations import RECURRENT, TEXT, Continuations, generate_continuations
from .topic_model import Topics

SHOWN_WORDS = 8  # of each topic, in the printed list


def topics(name: str, settings: ContinuationSettings, out: Path, *, device: str | None = None) -> dict[str, Any]:
    """Fit topics, let models continue contexts, and compare their topics.

    Continuations, topics and the result are written to `out`; an interrupted run is resumed from there.
    """
    device = usable_device(device)
    continuations, fitted = continuations_and_topics(name, settings, out, device)
    divergences, worded = divergences_by_writer(fitted, continuations)
    baselines = [writer for writer in divergences if writer not in (RECURRENT, TEXT)]
    both_worded = {writer: worded[RECURRENT] & worded[writer] for writer in baselines}

    def against(writer: str, contexts: Any) -> dict[str, Any]:
        pair = (divergences[compared][contexts] for compared in (RECURRENT, writer))
        return dataclasses.asdict(topic_model.compare(*pair, seed=settings.seed))

    uniform = 1 / len(fitted)
    result = {
        "kind": "topics",
        **topic_provenance(device),
        "settings": {**dataclasses.asdict(settings), "topics": len(fitted)},
        **continuations.metadata,
        "topics": {**fitted.metadata, "words": len(fitted.vocabulary), "top_words": fitted.top_words()},
        "writers": {writer: {"mean": float(values.mean()), "bits": float(values.mean() / math.log(2)),
                             "wordless": int((~worded[writer]).sum())} for writer, values in divergences.items()},
        "nothing": float(topic_model.divergence(fitted.distributions(continuations.contexts), uniform).mean()),
        "against": {writer: against(writer, slice(None)) for writer in baselines},
        "worded": {writer: against(writer, both_worded[writer]) for writer in baselines if both_worded[writer].any()},
        "contexts": [[document, int(start)]
                     for document, (_, start) in zip(continuations.names, continuations.starts, strict=True)],
        "divergences": {writer: [round(value, 5) for value in values] for writer, values in divergences.items()},
    }  # fmt: skip
    write_json(out / "topics.json", result)
    return result


def topic_provenance(device: str) -> dict[str, Any]:
    """Provenance with the version of scikit-learn."""
    common = provenance(device)
    return {**common, "versions": {**common["versions"], "scikit-learn": metadata.version("scikit-learn")}}


def continuations_and_topics(
    name: str, settings: ContinuationSettings, out: Path, device: str
) -> tuple[Continuations, Topics]:
    """Generate continuations, and fit or load topics. Checks that can fail early run before the slow parts."""
    topic_model.need_scikit_learn()
    need_state(name)
    loaded = None if settings.topics_from is None else Topics.load(Path(settings.topics_from))
    if loaded is None:
        corpus = open_corpus(settings.data, settings.fit_on, text_field=settings.text_field)
        needed = islice(corpus, min(settings.topics, settings.fit_documents or settings.topics))
        topic_model.check_documents(sum(1 for _ in needed), settings.topics)
    continuations = generate_continuations(name, settings, out, device=device)
    return continuations, fit_or_resume(settings, out) if loaded is None else loaded


def fit_or_resume(settings: ContinuationSettings, out: Path) -> Topics:
    """Load the topics that an interrupted run in `out` has fitted, or fit them."""
    folder, corpus = out / "lda", open_corpus(settings.data, settings.fit_on, text_field=settings.text_field)
    identity = {"topics": settings.topics, "seed": settings.seed, "data": corpus.name, "split": corpus.split,
                "fit_documents": settings.fit_documents, "fingerprint": corpus.fingerprint()}  # fmt: skip
    if (folder / topic_model.ARRAYS).exists():
        saved = Topics.load(folder)
        if {key: saved.metadata.get(key) for key in identity} != identity:
            raise ValueError(f"{folder} holds topics of other settings or data. Use another --out, or delete it.")
        return saved
    counting = f"counting the words of {corpus.name} ({corpus.split})"
    with ProgressBar(counting, corpus.size, "bytes", library=True) as bar:
        counts = topic_model.count_words(islice(_texts(corpus, bar), settings.fit_documents))
    with ProgressBar("fitting topics", None, "passes", library=True) as bar:
        fitted = topic_model.fit(counts, settings.topics, seed=settings.seed, progress=bar.update)
    fitted = dataclasses.replace(fitted, metadata={**identity, "documents": counts.documents})
    fitted.save(folder)
    return fitted


def _texts(corpus: Corpus, bar: ProgressBar) -> Iterator[str]:
    for text in corpus:
        yield text.text
        bar.advance(len(text.text.encode()))


def divergences_by_writer(
    fitted: Topics, continuations: Continuations
) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """For each writer, the divergence of each continuation from its context, and whether it has known words."""
    contexts, written = fitted.distributions(continuations.contexts), continuations.written
    divergences = {
        writer: topic_model.divergence(contexts, fitted.distributions(texts)) for writer, texts in written.items()
    }
    return divergences, {writer: fitted.has_known_words(texts) for writer, texts in written.items()}


def markdown(result: dict[str, Any]) -> str:
    """The result as text: a table with a row for each writer, and the words of the topics."""
    data, model, worded = result["data"], result["model"], result["worded"]
    lines = [
        f"{escape_markdown(model['name'])} on {escape_markdown(data['name'])}, {data['split']}: "
        f"{len(result['contexts']):,} contexts of {result['context_tokens']} tokens, each continued by "
        f"{result['settings']['new_tokens']} tokens; "
        f"Jensen-Shannon divergence of {len(result['topics']['top_words'])} topics.",
        "",
        markdown_table(
            ["", "nats", "bits", "recurrent is closer in", "farther in", "equal in", "sign test", "difference in nats"],
            [
                [writer, f"{row['mean']:.4f}", f"{row['bits']:.4f}", *_comparison_cells(result["against"].get(writer))]
                for writer, row in result["writers"].items()
            ],
        ),
    ]
    wordless = ", ".join(f"{row['wordless']:,} ({writer})" for writer, row in result["writers"].items())
    lines += [
        "",
        f"Continuations without a word that the topics know: {wordless}. Such a text has a divergence of "
        f"{result['nothing']:.4f} nats from a context on average."
        + " Where both continuations have a known word, the recurrent model is closer"
        * bool(worded),
    ]
    lines += [""] * bool(worded)
    for writer, row in worded.items():
        low, high = row["interval"]
        lines.append(
            f"* than {writer} in {row['share']:.1%} of {row['closer'] + row['farther'] + row['equal']:,} contexts, "
            f"p = {row['p']:.2g}, {row['difference']:+.4f} nats ({low:+.4f} to {high:+.4f})"
        )
    words = [f"{number}. {', '.join(top[:SHOWN_WORDS])}" for number, top in enumerate(result["topics"]["top_words"], 1)]
    documents = result["topics"].get("documents")  # unknown for topics that were fitted in Python
    heading = f"Topics, fitted on {documents:,} documents:" if documents else "Topics:"
    return "\n".join([*lines, "", heading, "", *words])


def _comparison_cells(comparison: dict[str, Any] | None) -> list[str]:
    if comparison is None:
        return ["–"] * 5
    low, high = comparison["interval"]
    return [
        f"{comparison['closer']:,} ({comparison['share']:.1%})",
        f"{comparison['farther']:,}",
        f"{comparison['equal']:,}",
        f"p = {comparison['p']:.2g}",
        f"{comparison['difference']:+.4f} ({low:+.4f} to {high:+.4f})",
    ]


def draw(result: dict[str, Any], path: Path) -> None:
    """Draw two panels: the divergences of each writer, and the differences from the recurrent model's."""
    figure, (cumulative, differences) = new_figure(2)
    recurrent = np.array(result["divergences"][RECURRENT])
    colours = {RECURRENT: COLOURS[0], **dict(zip(result["against"], COLOURS[1:], strict=False)), TEXT: "#979797"}
    for writer, values in result["divergences"].items():
        mean, colour = result["writers"][writer]["mean"], colours[writer]
        share = np.arange(1, len(values) + 1) / len(values)
        cumulative.plot(np.sort(values), share, color=colour, linewidth=1.9, label=f"{writer}, mean {mean:.3f}")
    title, x_label = "Divergence of continuations from their contexts", "Jensen-Shannon divergence in nats"
    style_axes(cumulative, title, x_label, "cumulative share of contexts")
    cumulative.set_ylim(0, 1)
    cumulative.legend(fontsize=8.5, edgecolor="none")
    edges = np.linspace(-math.log(2), math.log(2), 42)  # no edge at 0: equal contexts are in the middle bin
    for writer, comparison in result["against"].items():
        values, (low, high) = recurrent - np.array(result["divergences"][writer]), comparison["interval"]
        differences.hist(
            values,
            edges,
            histtype="step",
            color=colours[writer],
            linewidth=1.7,
            label=f"{writer}: closer in {comparison['share']:.1%}, equal in {comparison['equal'] / len(values):.1%}",
        )
        differences.axvspan(low, high, color=colours[writer], alpha=0.25, linewidth=0)
    differences.axvline(0, color="#454545", linewidth=0.8)
    title, x_label = "Recurrent model compared with the others", "difference in nats; shaded: interval of its mean"
    style_axes(differences, title, x_label, "contexts")
    differences.legend(fontsize=8.5, edgecolor="none")
    save_figure(figure, path)
