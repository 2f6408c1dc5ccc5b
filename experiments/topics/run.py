# SPDX-License-Identifier: Apache-2.0
"""Claim C6: continuations by the recurrent model stay closer to the topics of their contexts than the plain model's.

    python run.py bundled-kept runs/kept runs/plain path/to/books --contexts 8000   # writes results/bundled-kept.json
    python run.py --tables                                                          # writes README.md and figures

Topics are fitted on the training books, contexts are drawn from the validation books. What is written lies in
`topics-work/`, in which an interrupted run goes on; the result holds no text of the books.
"""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path
from typing import Any

from carryforward.analysis import samples, topic_report, topics
from carryforward.analysis.continuations import PLAIN, RECURRENT
from carryforward.reproduction.claims import Verdict
from carryforward.settings import ContinuationSettings

HERE = Path(__file__).parent
NAMES = {
    "bundled-kept": "The bundled model, keys and values of half a window carried",
    "bundled-paper": "The bundled model, the paper's vector",
    "smollm2-kept-untrained": "SmolLM2-135M, keys and values of half a window carried, untrained",
    "smollm2-kept": "SmolLM2-135M, keys and values of half a window carried",
    "smollm2-paper": "SmolLM2-135M, the paper's vector",
}
SHARE, P = 0.6, 1e-5  # what the paper claims: at least, at most
PAPER = (
    "The paper (GPT-2 small, PG-19, 8000 contexts): 0.5331 recurrent, 0.5951 plain, closer at least 60 % of the time."
)
WORDS = {True: "holds", False: "does not hold", None: "undecided"}


def main() -> None:
    if sys.argv[1:] == ["--tables"]:
        tables()
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("setting", choices=NAMES)
    parser.add_argument("model")
    parser.add_argument("plain")
    parser.add_argument("books")
    parser.add_argument("--contexts", type=int, default=300)
    parser.add_argument("--fit-documents", type=int)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--topics-from")
    given = vars(parser.parse_args())
    setting, model, data = (given.pop(name) for name in ("setting", "model", "books"))
    run(setting, model, ContinuationSettings(data=data, **given))


def run(setting: str, model: str, settings: ContinuationSettings) -> None:
    work = Path("topics-work") / setting
    work.mkdir(parents=True, exist_ok=True)
    result = topic_report.measure(model, settings, work)
    result["people"] = samples.tabulate(model, settings, work)["people"]
    for place in ("data", "plain", "topics_from"):  # where things lie on this machine
        result["settings"][place] = result["settings"][place] and Path(result["settings"][place]).name
    (HERE / "results").mkdir(exist_ok=True)
    (HERE / "results" / f"{setting}.json").write_text(json.dumps(result, indent=None, ensure_ascii=False) + "\n")


def c6(result: dict[str, Any]) -> Verdict:
    """Closer on average, in at least 60 % of contexts, and not by chance."""
    found, means = result["against"][PLAIN], result["writers"]
    (low, high), share = found["interval"], found["share"]
    noise = 1.96 * math.sqrt(share * (1 - share) / len(result["contexts"]))
    told = (
        f"{means[RECURRENT]['mean']:.4f} against {means[PLAIN]['mean']:.4f} nats ({means[RECURRENT]['bits']:.4f} and "
        f"{means[PLAIN]['bits']:.4f} bits), closer in {share:.1%} of contexts "
        f"({share - noise:.1%} to {share + noise:.1%}), p = {found['p']:.1g}"
    )
    if PLAIN in result["worded"]:
        told += f"; where both have a word that the topics know, in {result['worded'][PLAIN]['share']:.1%}"
    if high < 0 and share - noise >= SHARE and found["p"] < P:
        return Verdict(True, told)
    return Verdict(False if low > 0 or share + noise < SHARE else None, told)


def compare(result: dict[str, Any], writer: str) -> dict[str, Any]:
    """As the result has it, but by what counts as equal today."""
    pair = (result["divergences"][one] for one in (RECURRENT, writer))
    return dataclasses.asdict(topics.compare(*pair, seed=result["settings"]["seed"]))


def _independence(result: dict[str, Any]) -> str:
    books = len({name for name, _ in result["contexts"]})
    return f"Contexts are of {books} books and some overlap; intervals and p-values do not know, and are too small."


def tables() -> None:
    lines = ["# Topics", "", __doc__.splitlines()[0], PAPER, ""]
    for setting, name in NAMES.items():
        path = HERE / "results" / f"{setting}.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        result["model"]["name"] = "Recurrent"
        result["against"] = {writer: compare(result, writer) for writer in result["against"]}
        verdict = c6(result)
        topic_report.draw(result, HERE / f"{setting}.png")
        table, _, words = topic_report.markdown(result).partition("\n\nTopics, ")
        trained = [result[one]["trained_tokens"] or 0 for one in ("model", "plain")]
        lines += [f"## {name}", "", f"C6 **{WORDS[verdict.holds]}** here: {verdict.told}.", "", table, ""]
        lines += [f"Fine-tuned on {trained[0]:,} tokens; the plain model on {trained[1]:,}.", _independence(result), ""]
        lines += [f"![divergences]({setting}.png)", ""]
        lines += [samples.markdown(result), "", f"Topics, {words}", ""]
    lines += ["[How it is measured](../../docs/seeing.md). Equal ones count for neither side; intervals are at 95 %."]
    lines += ["", "Written by `python experiments/topics/run.py --tables`."]
    (HERE / "README.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
