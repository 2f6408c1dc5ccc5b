# SPDX-License-Identifier: Apache-2.0
"""What trust costs: digests of files, syncing them to disk, fingerprints of models, memory of tokenising a long text.

    python benchmarks/integrity.py

Writes benchmarks/results/integrity-cpu.json and the table in docs/reliability.md. Times are the best of five; memory is
the peak of a process's resident set, above what it has before a text is read.
"""

import argparse
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from measurements import RESULTS, collect_cases, run_case, short, write_section

from carryforward.utils.markdown import markdown_table
from carryforward.utils.provenance import provenance

OUT = RESULTS / "integrity-cpu.json"
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"
CHECKPOINT_MB = 1500  # GPT-2 small in float32, with Adam's two moments
TOKENS_MB = 200  # WikiText-103
TEXT_MB = 20


def best_of(function: Callable[[], Any], times: int = 5) -> float:
    """The shortest time of a function, in seconds."""
    seconds = []
    for _ in range(times):
        begun = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)


def measure_files() -> dict[str, float]:
    """Seal and check a checkpoint, write it to disk, check a cache entry."""
    from carryforward.utils import checkpoints, files
    from carryforward.utils.digests import digest_file

    with tempfile.TemporaryDirectory(dir=RESULTS) as folder:
        checkpoint, entry = Path(folder) / "checkpoint-1", Path(folder) / "tokens.bin"
        checkpoint.mkdir()
        block = bytes(range(256)) * 4096
        for number in range(3):
            with (checkpoint / f"{number}.bin").open("wb") as file:
                for _ in range(CHECKPOINT_MB // 3):
                    file.write(block)
        synced = best_of(lambda: files._sync_tree(checkpoint), 1)
        sealed = best_of(lambda: checkpoints.seal(checkpoint))
        checked = best_of(lambda: checkpoints.find_damage(checkpoint))
        entry.write_bytes(block * TOKENS_MB)
        return {"sync": synced, "seal": sealed, "check": checked, "cache": best_of(lambda: digest_file(entry))}


def measure_fingerprint() -> dict[str, float]:
    """The digest of a model's weights that its states carry, the first time and from the cache."""
    import torch
    from transformers import GPT2Config, GPT2LMHeadModel

    import carryforward as cf

    torch.manual_seed(0)
    model = cf.add_recurrence(GPT2LMHeadModel(GPT2Config()).eval(), preset="paper", window=300)
    weight = model.base.transformer.ln_f.weight

    def change_and_compute() -> None:
        with torch.no_grad():
            weight.mul_(1.0)  # a new version of the weights
            model.fresh_state(1)

    with torch.no_grad():
        model.fresh_state(1)
        return {"first": best_of(change_and_compute), "cached": best_of(lambda: model.fresh_state(1))}


def measure_tokenising(max_tokens: int | None) -> dict[str, float]:
    """The peak memory of tokenising one long text, in MB."""
    from carryforward.data.corpora import open_corpus
    from carryforward.data.documents import tokenise
    from carryforward.models.loading import load_bundled

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "text.txt"
        words = "".join(f"Sentence {i} says that {i * i} is the square of {i}.\n" for i in range(20_000))
        with path.open("w") as file:
            while file.tell() < TEXT_MB * 1_000_000:
                file.write(words)
        _, tokenizer = load_bundled()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        tokenise(open_corpus(str(path), "train"), tokenizer, cache=Path(folder) / "cache", max_tokens=max_tokens)
        return {"peak": (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1000}


CASES: dict[str, Callable[[], dict[str, float]]] = {
    "files": measure_files,
    "fingerprint": measure_fingerprint,
    "tokenising": lambda: measure_tokenising(None),
    "tokenising the beginning": lambda: measure_tokenising(2000),
}


def table(report: dict[str, Any]) -> str:
    """The table of the page."""
    cases = {case["name"]: case for case in report["cases"]}
    files, fingerprint = cases["files"], cases["fingerprint"]
    rows = [
        (f"digests of a checkpoint of {CHECKPOINT_MB:,} MB, when it is saved", f"{files['seal']:.1f} s"),
        ("its digests compared, when training resumes", f"{files['check']:.1f} s"),
        ("the checkpoint synced to disk", f"{files['sync']:.1f} s"),
        (f"digest of {TOKENS_MB} MB of cached tokens, at every start", f"{files['cache'] * 1000:.0f} ms"),
        ("fingerprint of GPT-2 small, at a call's first state", f"{fingerprint['first'] * 1000:.1f} ms"),
        ("the same, weights unchanged", f"{fingerprint['cached'] * 1000:.2f} ms"),
        (f"memory to tokenise a text of {TEXT_MB} MB", f"{cases['tokenising']['peak']:,.0f} MB"),
        ("its first 2,000 tokens", f"{cases['tokenising the beginning']['peak']:,.0f} MB"),
    ]
    where = f"Commit {short(report['commit'])}, {report['hardware']['cpu']}, {report['hardware']['cores']} cores"
    return f"{markdown_table(['', 'cost'], rows)}\n\n{where} ([JSON](../benchmarks/results/{OUT.name}))."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", choices=CASES, help=argparse.SUPPRESS)  # one case, in its own process
    parser.add_argument("--page", action="store_true", help="only write the table, from the results there are")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(CASES[arguments.case]()))
        return
    if not arguments.page:
        with collect_cases(OUT, {**provenance("cpu"), "seed": 0}) as add:
            for name in CASES:
                add({"name": name, **run_case(__file__, "--case", name, env={"TRANSFORMERS_VERBOSITY": "error"})})
    write_section(PAGE, "integrity", table(json.loads(OUT.read_text())))


if __name__ == "__main__":
    main()
