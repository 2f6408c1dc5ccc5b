# SPDX-License-Identifier: Apache-2.0
"""Claim C6: continuations by the recurrent model stay closer to the topics of their contexts than the plain model's.

    python run.py bundled-kv runs/kv runs/plain path/to/books --contexts 8000   # writes results/bundled-kv.json
    python run.py --tables-only                                                 # writes README.md and figures

Topics are fitted on the training books, contexts are drawn from the validation books. Continuations are written to
`topics-work/`, from which an interrupted run resumes; the result holds no text of the books.
"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import command_line, strip_folders, write_page, write_result

from carryforward.analysis import samples, topic_model, topics
from carryforward.analysis.continuations import PLAIN, RECURRENT
from carryforward.reproduction.claims import Verdict
from carryforward.settings.commands import ContinuationSettings

HERE = Path(__file__).parent
NAMES = {
    "bundled-kv": "The bundled model, keys and values of half a window carried",
    "bundled-paper": "The bundled model, the paper's vector",
    "smollm2-kv-untrained": "SmolLM2-135M, keys and values of half a window carried, untrained",
    "smollm2-kv": "SmolLM2-135M, keys and values of half a window carried",
    "smollm2-paper": "SmolLM2-135M, the paper's vector",
}
MIN_SHARE, MAX_P = 0.6, 1e-5  # what the paper claims
PAPER = (
    "The paper (GPT-2 small, PG-19, 8000 contexts): 0.5331 recurrent, 0.5951 plain, closer at least 60 % of the time."
)
WORDS = {True: "holds", False: "does not hold", None: "undecided"}


def main() -> None:
    command_line(__doc__, add_arguments, measure, write_pages)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("setting", choices=NAMES, help="name of the result")
    parser.add_argument("model", help="folder of the recurrent model")
    parser.add_argument("plain", help="folder of the plain model")
    parser.add_argument("books", help="folder with train/ and validation/")
    parser.add_argument("--contexts", type=int, default=300)
    parser.add_argument("--fit-documents", type=int, help="fit topics on so many books; all by default")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--topics-from", help="folder `lda` of an earlier run: use its topics, fit none")


def measure(arguments: argparse.Namespace) -> None:
    settings = ContinuationSettings(
        data=arguments.books, plain=arguments.plain, contexts=arguments.contexts, batch_size=arguments.batch_size,
        fit_documents=arguments.fit_documents, topics_from=arguments.topics_from,
    )  # fmt: skip
    work = Path("topics-work") / arguments.setting
    work.mkdir(parents=True, exist_ok=True)
    result = topics.topics(arguments.model, settings, work)
    result["people"] = samples.samples(arguments.model, settings, work)["people"]
    strip_folders(result["settings"], "data", "plain", "topics_from")
    write_result(HERE / "results" / f"{arguments.setting}.json", result, indent=None)


def c6(result: dict[str, Any]) -> Verdict:
    """Closer on average, in at least 60 % of contexts, and not by chance."""
    comparison, means = result["against"][PLAIN], result["writers"]
    (low, high), share = comparison["interval"], comparison["share"]
    noise = 1.96 * math.sqrt(share * (1 - share) / len(result["contexts"]))
    text = (
        f"{means[RECURRENT]['mean']:.4f} against {means[PLAIN]['mean']:.4f} nats ({means[RECURRENT]['bits']:.4f} and "
        f"{means[PLAIN]['bits']:.4f} bits), closer in {share:.1%} of contexts "
        f"({share - noise:.1%} to {share + noise:.1%}), p = {comparison['p']:.1g}"
    )
    if PLAIN in result["worded"]:
        text += f"; where both contain a word of the topics, in {result['worded'][PLAIN]['share']:.1%}"
    if high < 0 and share - noise >= MIN_SHARE and comparison["p"] < MAX_P:
        return Verdict(True, text)
    return Verdict(False if low > 0 or share + noise < MIN_SHARE else None, text)


def compare(result: dict[str, Any], writer: str) -> dict[str, Any]:
    """Compare the recurrent model with a writer again: what counts as equal may have changed since the result."""
    pair = (result["divergences"][name] for name in (RECURRENT, writer))
    return dataclasses.asdict(topic_model.compare(*pair, seed=result["settings"]["seed"]))


def write_pages() -> None:
    lines = ["# Topics", "", __doc__.splitlines()[0], PAPER, ""]
    for setting, name in NAMES.items():
        path = HERE / "results" / f"{setting}.json"
        if path.exists():
            lines += [f"## {name}", "", *section(setting, json.loads(path.read_text()))]
    lines += ["[How it is measured](../../../docs/seeing.md). Ties count for neither side; intervals are 95 %."]
    write_page(HERE, lines)


def section(setting: str, result: dict[str, Any]) -> list[str]:
    result["model"]["name"] = "Recurrent"
    result["against"] = {writer: compare(result, writer) for writer in result["against"]}
    verdict = c6(result)
    topics.draw(result, HERE / f"{setting}.png")
    table, _, words = topics.markdown(result).partition("\n\nTopics, ")
    trained = [result[model]["trained_tokens"] or 0 for model in ("model", "plain")]
    books = len({name for name, _ in result["contexts"]})
    return [
        f"C6 **{WORDS[verdict.holds]}** here: {verdict.reason}.", "", table, "",
        f"Fine-tuned on {trained[0]:,} tokens; the plain model on {trained[1]:,}.",
        f"Contexts come from {books} books and some overlap. Intervals and p-values treat them as independent, so they "
        "are too small.", "",
        f"![divergences]({setting}.png)", "",
        samples.markdown(result), "", f"Topics, {words}", "",
    ]  # fmt: skip


if __name__ == "__main__":
    main()
