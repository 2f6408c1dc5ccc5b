# SPDX-License-Identifier: Apache-2.0
"""How far can a state reach, and what do larger plain windows reach at the same cost?

    python prepare.py path/to/smollm2.gguf path/to/books travel/smollm2.npz         # token ids, once; see there
    python run.py smollm2 path/to/smollm2.gguf travel/smollm2.npz                   # measures what is missing
    python run.py smollm2 travel/smollm2.gguf travel/smollm2.npz --seconds 480 --no-pages   # in pieces
    python run.py --tables-only                                                     # writes README.md and the figures

Untrained models, on the first tokens of each validation book. Every arm (`arms.py`) writes its own JSON when it is
done. An arm that was measured at the same commit in the same way is skipped, so a run can be stopped and started again,
also on a machine that is lent for minutes:

- $CARRYFORWARD_COMMIT names the commit where there is no repository. Without a clean commit nothing is skipped.
- `--seconds` starts no arm that would probably end later.
- `--arms` takes patterns of names, such as "plain-*".
- `--repeats 0` measures perplexity alone: figures of speed and memory from a machine that is in use are worth nothing.
- A model's file may come in pieces (`prepare.py --pieces`): they are joined at the first run. To read a .gguf file the
  package gguf must be found (pip install --target FOLDER gguf, PYTHONPATH=FOLDER). No tokenizer is needed.
"""

import argparse
import json
import sys
import time
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import tokens
from arms import SETTINGS, Arm
from harness import command_line, new_result, write_result
from measuring import Bench, load_base, measure
from pages import RESULTS, write_pages

MARGIN = 1.5  # an arm is expected to take so much longer than the longest one so far
SAME = ("kind", "commit", "arm", "data", "settings")  # what must agree for an arm to be skipped


def main() -> None:
    command_line(__doc__, add_arguments, measure_arms, write_pages)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("setting", choices=SETTINGS, help="which arms")
    parser.add_argument("model", help="the plain model: bundled, a folder, a Hub name or a .gguf file")
    parser.add_argument("tokens", type=Path, help="what prepare.py wrote")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--arms", nargs="+", default=["*"], metavar="PATTERN", help="measure these arms only")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="start no arm that would end later")
    parser.add_argument("--documents", type=int, help="read only so many books of each text")
    parser.add_argument("--batch-size", type=int, default=64, help="documents whose windows run in a batch")
    parser.add_argument("--repeats", type=int, default=3, help="timed passes; 0 measures neither speed nor memory, for "
                        "a machine that is in use")  # fmt: skip
    parser.add_argument("--fast-path", default="off", choices=("off", "auto", "compiled"))


def measure_arms(arguments: argparse.Namespace) -> None:
    begun, device = time.monotonic(), "cuda" if torch.cuda.is_available() else "cpu"
    texts = tokens.load(arguments.tokens)
    texts |= {name: texts[name][: arguments.documents] for name in ("books", "deep")}
    folder = arguments.out / arguments.setting
    results = {arm: describe(arm, arguments, texts, device) for arm in chosen(arguments)}
    missing = [arm for arm, result in results.items() if not is_measured(folder / f"{arm.name}.json", result)]
    print(f"{len(missing)} of {len(results)} arms to measure", flush=True)
    if not missing:
        return
    tokens.join_file(Path(arguments.model))
    bench = Bench(load_base(arguments.model, device), texts, arguments.batch_size, arguments.repeats,
                  arguments.fast_path)  # fmt: skip
    longest = 0.0
    for i, arm in enumerate(missing):
        arm_begun = time.monotonic()
        if i and arm_begun - begun + MARGIN * longest > arguments.seconds:
            print(f"no time left for {len(missing) - i} arms, {arm.name} and after", flush=True)
            break
        write_result(folder / f"{arm.name}.json", {**results[arm], **measure(bench, arm)})
        longest = max(longest, time.monotonic() - arm_begun)
        print(f"{arm.name}: {time.monotonic() - arm_begun:.1f} s", flush=True)


def chosen(arguments: argparse.Namespace) -> list[Arm]:
    """The arms whose names match a pattern."""
    arms = [arm for arm in SETTINGS[arguments.setting].arms if any(fnmatch(arm.name, p) for p in arguments.arms)]
    if not arms:
        raise SystemExit(f"--arms {' '.join(arguments.arms)} matches no arm of {arguments.setting}.")
    return arms


def describe(arm: Arm, arguments: argparse.Namespace, texts: dict[str, Any], device: str) -> dict[str, Any]:
    """A result without its numbers: how and on what an arm is measured."""
    settings = {name: getattr(arguments, name) for name in ("batch_size", "repeats", "fast_path")}
    return {
        **new_result("reach", device=device),
        "setting": arguments.setting,
        "model": Path(arguments.model).name,
        "settings": {**settings, "device": device},
        "data": texts[arm.text].about(),
        "arm": arm.fields(),
    }


def is_measured(path: Path, result: dict[str, Any]) -> bool:
    """Whether a file holds this result, with its numbers, from the same clean commit."""
    commit = result["commit"]
    if not path.exists() or commit == "unknown" or commit.endswith("-dirty"):
        return False
    earlier = json.loads(path.read_text())
    return all(earlier.get(key) == result[key] for key in SAME)


if __name__ == "__main__":
    main()
