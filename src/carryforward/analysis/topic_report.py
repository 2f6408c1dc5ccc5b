# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward topics`: do continuations stay with the topics of their contexts?

The result is plain JSON, without any text but the topics' words. Divergences are in nats. A text without known words
has all topics alike, which is not far from anything: "nothing" is how far on average, and "worded" compares only where
both have one.

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
from ..models.loading import usable_device
from ..settings import ContinuationSettings
from ..utils.files import write_json
from ..utils.markdown import markdown_table
from ..utils.plotting import COLOURS, dress, empty, save
from ..utils.progress import Progress, bar
from ..utils.provenance import provenance
from . import topics
from .continuations import RECURRENT, TEXT, Continuations, continued
from .topics import Topics

SHOWN_WORDS = 8  # of a topic, in the table


def measure(name: str, settings: ContinuationSettings, out: Path, *, device: str | None = None) -> dict[str, Any]:
    """Fit topics, let models continue contexts, and compare; what is done is kept in `out`."""
    device = usable_device(device)
    found, fitted = continued_and_fitted(name, settings, out, device)
    divergences, known = diverging(fitted, found)
    others = [writer for writer in divergences if writer not in (RECURRENT, TEXT)]
    both = {writer: known[RECURRENT] & known[writer] for writer in others}

    def against(writer: str, contexts: Any) -> dict[str, Any]:
        pair = (divergences[one][contexts] for one in (RECURRENT, writer))
        return dataclasses.asdict(topics.compare(*pair, seed=settings.seed))

    result = {
        "kind": "topics",
        **origin(device),
        "settings": {**dataclasses.asdict(settings), "topics": len(fitted)},
        **found.about,
        "topics": {**fitted.about, "words": len(fitted.vocabulary), "top_words": fitted.top_words()},
        "writers": {writer: {"mean": float(values.mean()), "bits": float(values.mean() / math.log(2)),
                             "wordless": int((~known[writer]).sum())} for writer, values in divergences.items()},
        "nothing": float(topics.divergence(fitted.distributions(found.contexts), 1 / len(fitted)).mean()),
        "against": {writer: against(writer, slice(None)) for writer in others},
        "worded": {writer: against(writer, both[writer]) for writer in others if both[writer].any()},
        "contexts": [[name, int(start)] for name, (_, start) in zip(found.names, found.places, strict=True)],
        "divergences": {writer: [round(value, 5) for value in values] for writer, values in divergences.items()},
    }  # fmt: skip
    write_json(out / "topics.json", result)
    return result


def origin(device: str) -> dict[str, Any]:
    """As every result has it, with scikit-learn's version."""
    known = provenance(device)
    return {**known, "versions": {**known["versions"], "scikit-learn": metadata.version("scikit-learn")}}


def continued_and_fitted(
    name: str, settings: ContinuationSettings, out: Path, device: str
) -> tuple[Continuations, Topics]:
    """What models wrote, and topics to hold it against. What can be refused soon comes before what takes long."""
    topics.need_scikit_learn()
    given = None if settings.topics_from is None else Topics.load(Path(settings.topics_from))
    if given is None:
        corpus = open_corpus(settings.data, settings.fit_on, text_field=settings.text_field)
        enough = islice(corpus, min(settings.topics, settings.fit_documents or settings.topics))
        topics.check_documents(sum(1 for _ in enough), settings.topics)
    found = continued(name, settings, out, device=device)
    return found, fitted_topics(settings, out) if given is None else given


def fitted_topics(settings: ContinuationSettings, out: Path) -> Topics:
    """Those of this run if it was interrupted, or new ones."""
    folder, corpus = out / "lda", open_corpus(settings.data, settings.fit_on, text_field=settings.text_field)
    about = {"topics": settings.topics, "seed": settings.seed, "data": corpus.name, "split": corpus.split,
             "fit_documents": settings.fit_documents, "fingerprint": corpus.fingerprint()}  # fmt: skip
    if (folder / topics.ARRAYS).exists():
        before = Topics.load(folder)
        if {key: before.about.get(key) for key in about} != about:
            raise ValueError(f"{folder} holds topics of other settings or data. Use another --out, or take it away.")
        return before
    with bar(None, f"counting the words of {corpus.name} ({corpus.split})", after=1) as report:
        counts = topics.count_words(islice(_texts(corpus, report), settings.fit_documents))
    with bar(None, "fitting topics", after=1) as report:
        fitted = topics.fit(counts, settings.topics, seed=settings.seed, progress=report)
    made = Topics(fitted.vocabulary, fitted.weights, {**about, "documents": counts.documents})
    made.save(folder)
    return made


def _texts(corpus: Corpus, report: Progress) -> Iterator[str]:
    done = 0
    for text in corpus:
        yield text.text
        done += len(text.text.encode())
        report(done, corpus.size)


def diverging(fitted: Topics, found: Continuations) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """How far from its context each continuation is, by writer, and whether it has a word that the topics know."""
    contexts = fitted.distributions(found.contexts)
    divergences = {
        writer: topics.divergence(contexts, fitted.distributions(texts)) for writer, texts in found.written.items()
    }
    return divergences, {writer: fitted.knows(texts) for writer, texts in found.written.items()}


def markdown(result: dict[str, Any]) -> str:
    """A line for each writer, and what the topics are."""
    data, model = result["data"], result["model"]
    lines = [
        f"{model['name']} on {data['name']}, {data['split']}: {len(result['contexts']):,} contexts of "
        f"{result['context_tokens']} tokens, {result['settings']['new_tokens']} tokens written after each; "
        f"Jensen-Shannon divergence of {len(result['topics']['top_words'])} topics.",
        "",
        markdown_table(
            ["", "nats", "bits", "recurrent is closer in", "farther in", "equal in", "sign test", "difference in nats"],
            [
                [writer, f"{one['mean']:.4f}", f"{one['bits']:.4f}", *_beside(result["against"].get(writer))]
                for writer, one in result["writers"].items()
            ],
        ),
    ]
    wordless = ", ".join(f"{one['wordless']:,} ({writer})" for writer, one in result["writers"].items())
    told = f"Without a word that the topics know, which is {result['nothing']:.4f} nats from a context on average: "
    lines += ["", f"{told}{wordless}." + " Where both have one, the recurrent model is closer" * bool(result["worded"])]
    lines += [""] * bool(result["worded"])
    for writer, one in result["worded"].items():
        low, high = one["interval"]
        lines.append(
            f"* than {writer} in {one['share']:.1%} of {one['closer'] + one['farther'] + one['equal']:,} contexts, "
            f"p = {one['p']:.2g}, {one['difference']:+.4f} nats ({low:+.4f} to {high:+.4f})"
        )
    words = [f"{number}. {', '.join(top[:SHOWN_WORDS])}" for number, top in enumerate(result["topics"]["top_words"], 1)]
    fitted = result["topics"].get("documents")  # not said by those that were fitted in Python
    return "\n".join([*lines, "", f"Topics, fitted on {fitted:,} documents:" if fitted else "Topics:", "", *words])


def _beside(found: dict[str, Any] | None) -> list[str]:
    if found is None:
        return ["–"] * 5
    low, high = found["interval"]
    counts = [f"{found['closer']:,} ({found['share']:.1%})", f"{found['farther']:,}", f"{found['equal']:,}"]
    return [*counts, f"p = {found['p']:.2g}", f"{found['difference']:+.4f} ({low:+.4f} to {high:+.4f})"]


def draw(result: dict[str, Any], path: Path) -> None:
    """Two panels: the divergences of each writer, and how much closer the recurrent one is, context by context."""
    drawn, (shares, differences) = empty(2)
    own = np.array(result["divergences"][RECURRENT])
    colours = {RECURRENT: COLOURS[0], **dict(zip(result["against"], COLOURS[1:], strict=False)), TEXT: "#979797"}
    for writer, values in result["divergences"].items():
        mean, colour = result["writers"][writer]["mean"], colours[writer]
        share = np.arange(1, len(values) + 1) / len(values)
        shares.plot(np.sort(values), share, color=colour, linewidth=1.9, label=f"{writer}, mean {mean:.3f}")
    dress(shares, "How far continuations are from their contexts", "Jensen-Shannon divergence in nats",
          "share of contexts at most so far")  # fmt: skip
    shares.set_ylim(0, 1)
    shares.legend(fontsize=8.5, edgecolor="none")
    borders = np.linspace(-math.log(2), math.log(2), 42)  # none lies at 0: equal ones are in the middle
    for writer, found in result["against"].items():
        values, (low, high) = own - np.array(result["divergences"][writer]), found["interval"]
        differences.hist(
            values,
            borders,
            histtype="step",
            color=colours[writer],
            linewidth=1.7,
            label=f"{writer}: closer in {found['share']:.1%}, equal in {found['equal'] / len(values):.1%}",
        )
        differences.axvspan(low, high, color=colours[writer], alpha=0.25, linewidth=0)
    differences.axvline(0, color="#454545", linewidth=0.8)
    dress(differences, "Recurrent against the others, context by context", "difference in nats; shaded: its mean",
          "contexts")  # fmt: skip
    differences.legend(fontsize=8.5, edgecolor="none")
    save(drawn, path)
