# SPDX-License-Identifier: Apache-2.0
"""Ask the equivalences of all model types and all memories: `make test-families`.

Results go to docs/models.json, type by type, and from there into the table of docs/models.md. A run that was
interrupted goes on where it was; `--again` begins anew, and names of types run these only.
"""

import argparse
import contextlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from helpers import families
from helpers.family_checks import CHECKS

import carryforward as cf
from carryforward.backbones.architectures import ARCHITECTURES, store_architecture
from carryforward.backbones.discovery import NotUnderstood, discover
from carryforward.models.verification import verify
from carryforward.utils.files import write_json, write_text
from carryforward.utils.markdown import markdown_table
from carryforward.utils.progress import ProgressBar
from carryforward.utils.provenance import provenance

ROOT = Path(__file__).resolve().parents[2]
RESULTS, PAGE = ROOT / "docs" / "models.json", ROOT / "docs" / "models.md"
GRAPHS = ROOT / "docs" / "cuda_graphs.json"  # made by cuda_graphs.py on a GPU
HOLDS, NOT_ASKED = "holds", "refused"


def main() -> int:
    """Run what has not run, write the results, and say what does not hold. The exit status is 1 if something fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("types", nargs="*", help="model types to run; by default all that have not run")
    parser.add_argument("--again", action="store_true", help="run all types again")
    parser.add_argument("--page", action="store_true", help="run nothing, only write the page")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.types if name not in families.ALL]
    if unknown:
        parser.error(f"unknown types: {', '.join(unknown)}. There are {', '.join(families.ALL)}.")
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")
    results = _read(arguments.again)
    todo = arguments.types or [name for name in families.INSTALLED if name not in results["types"]]
    if not arguments.page:
        run(results, todo)
    write_text(PAGE, page(results))
    failing = [name for name, result in results["types"].items() if failures(result)]
    for name in failing:
        print(f"{name}: {'; '.join(failures(results['types'][name]))}")
    print(f"{_count(results['types'])} See {PAGE.relative_to(ROOT)}.")
    return 1 if failing else 0


def _read(again: bool) -> dict[str, Any]:
    if again or not RESULTS.exists():
        return {"types": {}}
    return json.loads(RESULTS.read_text())


def run(results: dict[str, Any], names: list[str]) -> None:
    """Run model types, and write the results after each."""
    made = provenance("cpu")  # before the results that are written change the tree
    with ProgressBar("Model types", len(names), "types") as bar:
        for name in names:
            bar.remark = name
            results["types"][name] = {**result_of(name), "commit": made["commit"]}
            in_order = {one: results["types"][one] for one in families.ALL if one in results["types"]}
            results.update(made, seed=0, not_installed=families.NOT_INSTALLED, types=in_order)
            write_json(RESULTS, results)
            bar.advance(1)


def result_of(name: str) -> dict[str, Any]:
    """What holds for a model type, and how long discovery and verification take."""
    torch.manual_seed(0)
    model = families.base(name)
    result: dict[str, Any] = {
        "causal": families.is_causal(name),
        "in_table": model.config.model_type in ARCHITECTURES,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(families.precise_base(name).dtype).removeprefix("torch."),
        "checks": {},
        **_structure(model),
    }
    if "refused" in result:
        return result
    for title, check in CHECKS.items():
        asked = check.cases(name)
        outcomes = {memory: _outcome(check.holds, name, memory) for memory in asked}
        if asked:
            outcomes |= {memory: NOT_ASKED for memory in check.memories if memory not in asked}
            result["checks"][title] = outcomes
    return result


def _structure(model: Any) -> dict[str, Any]:
    """Seconds of discovery and of verification, or why a model is refused."""
    begin = time.perf_counter()
    try:
        found = discover(model)
    except NotUnderstood as error:
        return {"refused": str(error)}
    discovered = time.perf_counter()
    if model.config.model_type not in ARCHITECTURES:
        store_architecture(model.config, found)
    with contextlib.suppress(ValueError):  # which a check reports
        verify(model, cf.RecurrentForCausalLM if found.causal else cf.RecurrentForMaskedLM)
    verified = time.perf_counter()
    return {
        "discovery_seconds": round(discovered - begin, 3),
        "verification_seconds": round(verified - discovered, 3),
    }


def _outcome(holds: Any, name: str, memory: str) -> str:
    torch.manual_seed(0)
    try:
        holds(name, memory)
    except Exception as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return HOLDS


def failures(result: dict[str, Any]) -> list[str]:
    """What does not hold, in words: the checks, and of which memories if not of all."""
    problems = []
    for title, outcomes in result["checks"].items():
        failing = [memory for memory, outcome in outcomes.items() if outcome not in (HOLDS, NOT_ASKED)]
        if failing:
            some = any(outcome == HOLDS for outcome in outcomes.values())
            problems.append(f"{title} ({', '.join(failing)})" if some else title)
    return problems


def _count(types: dict[str, Any]) -> str:
    """How many types there are of each status, in a sentence."""
    refused = sum("refused" in result for result in types.values())
    failing = sum(bool(failures(result)) for result in types.values())
    return (
        f"Of {len(types)} types {len(types) - refused - failing} hold in everything that was asked, {failing} fail in "
        f"something, and {refused} are refused."
    )


# --- the page --------------------------------------------------------------------------------------------------------

_INTRODUCTION = """# Model types

Which model types were tried, and what holds for them. This page is written by `make test-families` from
[models.json](models.json), with transformers {transformers} and torch {torch}, on a CPU{commits}.

Each type is built as a tiny model whose config differs from the defaults (multipliers, layers without rotation, mixed
layer types, norms), with all its parameters random. A type is *in the table* of known ones, or *discovered*. It is
verified as `add_recurrence` does it; then equivalences are asked of it, each with each kind of memory where the memory
matters:

{checks}

{count}{missing} Seconds are
those of the tiny model, on one thread.
"""


_GRAPHS = """
*CUDA graph* says whether windows are captured, with the losses and gradients of eager ones: on {gpu}, with transformers
{transformers} and torch {torch}, by [cuda_graphs.json](cuda_graphs.json).
"""


def page(results: dict[str, Any], graphs: dict[str, Any] | None = None) -> str:
    """The page, from the results.

    Args:
        graphs: those of cuda_graphs.py; by default from its file, if there is one.
    """
    types = results["types"]
    if graphs is None and GRAPHS.exists():
        graphs = json.loads(GRAPHS.read_text())
    of_graphs = {} if graphs is None else graphs["types"]
    commits = sorted({result["commit"][:10] for result in types.values()})
    missing = results.get("not_installed", [])
    checks = "\n".join(f"* *{title}*: {_first_sentence(check.holds)}" for title, check in CHECKS.items())
    text = _INTRODUCTION.format(
        **{name: results["versions"][name] for name in ("transformers", "torch")},
        commits=f", at commit {', '.join(commits)}", checks=checks, count=_count(types),
        missing=f" Not in this version of transformers: {', '.join(missing)}." if missing else "",
    )  # fmt: skip
    header = ["type", "structure", "what does not hold", "equivalences", "discovery", "verification"]
    if graphs is not None:
        text += _GRAPHS.format(gpu=graphs["hardware"].get("gpu", "no GPU"), **graphs["versions"])
        header.insert(3, "CUDA graph")
    for title, causal in (("Decoders", True), ("Encoders", False)):
        rows = [_row(name, result) for name, result in types.items() if result["causal"] == causal]
        if graphs is not None:
            for row, name in zip(rows, (name for name in types if types[name]["causal"] == causal), strict=True):
                row.insert(3, _captured(of_graphs.get(name)))
        text += f"\n## {title}\n\n{markdown_table(header, rows, text_columns=len(header) - 3)}\n"
    return text + _reasons(types) + _reasons_of_graphs(of_graphs)


def _row(name: str, result: dict[str, Any]) -> list[str]:
    if "refused" in result:
        return [f"`{name}`", "refused", result["refused"], "", "", ""]
    outcomes = [one for by_memory in result["checks"].values() for one in by_memory.values() if one != NOT_ASKED]
    refused = sorted({memory for one in result["checks"].values() for memory in one if one[memory] == NOT_ASKED})
    problems = failures(result) + ([f"memories that are refused: {', '.join(refused)}"] if refused else [])
    seconds = [result.get(f"{what}_seconds") for what in ("discovery", "verification")]
    return [
        f"`{name}`",
        "in the table" if result["in_table"] else "discovered",
        "; ".join(problems),
        f"{outcomes.count(HOLDS)} of {len(outcomes)}",
        *("" if one is None else f"{one:.2f} s" for one in seconds),
    ]


def _captured(result: dict[str, Any] | None) -> str:
    """Whether the windows of a type are captured: with all memories, with none, or without which."""
    if result is None or {*result["memories"].values()} <= {"refused"}:
        return ""
    missing = [memory for memory, outcome in result["memories"].items() if outcome != "captured"]
    if not missing:
        return "captured"
    return "no" if len(missing) == len(result["memories"]) else f"not {', '.join(missing)}"


def _reasons_of_graphs(types: dict[str, Any]) -> str:
    """A line for each type that is not captured, with the first reason."""
    outcomes = {name: [*one["memories"].values()] for name, one in types.items()}
    reasons = {name: [one for one in of_type if one not in ("captured", "refused")]
               for name, of_type in outcomes.items()}  # fmt: skip
    lines = [f"* `{name}`: {of_type[0].removeprefix('not captured: ')}" for name, of_type in reasons.items() if of_type]
    return "\n## What is not captured\n\n" + "\n".join(lines) + "\n" if lines else ""


def _reasons(types: dict[str, Any]) -> str:
    """A line for each type that fails, with the first reason."""
    lines = []
    for name, result in types.items():
        outcomes = [one for by_memory in result["checks"].values() for one in by_memory.values()]
        reasons = [one for one in outcomes if one not in (HOLDS, NOT_ASKED)]
        if reasons:
            lines.append(f"* `{name}`: {reasons[0].partition(': ')[2] or reasons[0]}")
    return "\n## What fails\n\n" + "\n".join(lines) + "\n" if lines else ""


def _first_sentence(function: Any) -> str:
    """What a check says it asks, without its full stop."""
    sentence = " ".join(function.__doc__.split()).partition(". ")[0].rstrip(".")
    return sentence[0].lower() + sentence[1:]


if __name__ == "__main__":
    sys.exit(main())
