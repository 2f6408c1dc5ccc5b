# SPDX-License-Identifier: Apache-2.0
"""Ask of all model types on a GPU whether a CUDA graph captures their windows, with the losses of eager ones.

    PYTHONPATH=src:tests python tests/families/cuda_graphs.py --limit 540

Results go to docs/cuda_graphs.json, type by type, from where `all_types.py` takes a column of docs/models.md. What the
time limit leaves is done by the next run. Types run in a process of their own: an error of a kernel ends it, and the
next type begins another one. Without a GPU windows run eagerly only, and nothing is said about graphs.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import sys
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers
from helpers import families, tiny
from helpers.family_checks import MEMORIES, Check

from carryforward.engine import graph_cache
from carryforward.engine.graph_cache import GraphCache
from carryforward.utils.files import write_json
from carryforward.utils.progress import ProgressBar
from carryforward.utils.provenance import provenance

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "cuda_graphs.json"
CAPTURED, EAGER, REFUSED = "captured", "ran eagerly: no GPU", "refused"
SECONDS_OF_A_TYPE = 90
_STEPS = 4
_TOLERANCE = 1e-3  # of the norm, in single precision


def main(arguments: list[str] | None = None) -> int:
    """Run what has not run, write the results, and count them. The exit status is 1 if a captured window differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="", help="model types, with commas between them; by default all")
    parser.add_argument("--out", type=Path, default=RESULTS, help="the file of the results")
    parser.add_argument("--limit", type=float, default=float("inf"), help="begin no type after so many seconds")
    parser.add_argument("--again", action="store_true", help="run types again that have results on such a device")
    chosen = parser.parse_args(arguments)
    names = [name for name in chosen.types.split(",") if name] or list(families.ALL)
    unknown = [name for name in names if name not in families.ALL]
    if unknown:
        parser.error(f"--types: unknown types: {', '.join(unknown)}. There are {', '.join(families.ALL)}.")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    results = json.loads(chosen.out.read_text()) if chosen.out.exists() else {"types": {}}
    done = [] if chosen.again else [name for name, one in results["types"].items() if one["device"] == device]
    todo = [name for name in names if name in families.INSTALLED and name not in done]
    run(results, todo, device, chosen.out, chosen.limit)
    left = [name for name in todo if name not in results["types"]]
    print(count(results["types"]) + (f" {len(left)} are left." if left else ""))
    return 1 if any("differ" in outcome for one in results["types"].values() for outcome in one["memories"].values()) \
        else 0  # fmt: skip


def run(results: dict[str, Any], names: list[str], device: str, out: Path, limit: float) -> None:
    """Run model types, and write the results after each."""
    made, begin, pool = provenance(device), time.monotonic(), _process()
    with ProgressBar("Model types", len(names), "types") as bar:
        for name in names:
            if time.monotonic() - begin > limit:
                break
            bar.remark = name
            try:
                outcomes = pool.submit(result_of, name, device).result(timeout=SECONDS_OF_A_TYPE)
            except Exception as error:  # the process has ended, or does not
                outcomes = {memory: f"not captured: {_reason(error)}" for memory in asked(name)}
                _end(pool)
                pool = _process()
            results["types"][name] = {"device": device, "commit": made["commit"], "memories": outcomes}
            results.update(made, not_installed=families.NOT_INSTALLED)
            write_json(out, results)
            bar.advance(1)
    _end(pool)


def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), initializer=_prepare)


def _end(pool: ProcessPoolExecutor) -> None:
    for process in list((pool._processes or {}).values()):
        process.kill()
    pool.shutdown(wait=False, cancel_futures=True)


def _prepare() -> None:
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    warnings.simplefilter("ignore")


def asked(name: str) -> list[str]:
    """The memories that are asked for a model type."""
    return Check(lambda *_: None).cases(name)


def result_of(name: str, device: str) -> dict[str, str]:
    """For each memory whether windows of a model type are captured, and why not."""
    return {memory: outcome(name, memory, device) for memory in asked(name)}


def outcome(name: str, memory: str, device: str) -> str:
    """Whether windows with a memory are captured, with the losses and gradients of eager ones."""
    reasons: list[str] = []
    try:
        with _told(reasons):
            eager, fast = (_model(name, memory, device) for _ in range(2))
            eager.fast_path = "off"
            for seed in range(_STEPS):
                ids = tiny.documents(3, 45, seed).to(device)
                difference = _difference(_step(fast, ids), _step(eager, ids))
                if difference:
                    return difference
    except Exception as error:  # of the model itself, without graphs
        if str(error).startswith("Recurrence cannot be added to a model"):
            return REFUSED
        return f"not captured: it does not run ({_reason(error)})"
    if reasons:
        return f"not captured: {reasons[0]}"
    if fast.graph_cache._replays:
        return CAPTURED
    return EAGER if device == "cpu" else "not captured: no window came often enough"


def _model(name: str, memory: str, device: str) -> Any:
    """A model in single precision, whose experts are computed as users have them."""
    model = families.recurrent(name, memory=MEMORIES[memory], precise=False)
    return model.to(device)


@contextlib.contextmanager
def _told(reasons: list[str]) -> Iterator[None]:
    """Inside, windows are captured early, and reasons that stand against it are collected."""
    disable, obstacle = GraphCache.disable, graph_cache._obstacle

    def disabled(cache: GraphCache, reason: str) -> None:
        reasons.append(reason)
        disable(cache, reason)

    def asked_for_obstacle(*arguments: Any) -> str | None:
        reason = obstacle(*arguments)
        reasons.extend([reason] if reason else [])
        return reason

    with (
        mock.patch.object(graph_cache, "CAPTURE_AFTER", 1),
        mock.patch.object(GraphCache, "disable", disabled),
        mock.patch.object(graph_cache, "_obstacle", asked_for_obstacle),
    ):
        yield


def _step(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    loss = model(ids, labels=ids).loss
    loss.backward()
    return loss.detach(), tiny.gradients(model)


def _difference(step: tuple[Any, dict], expected: tuple[Any, dict]) -> str:
    """In words, how a step differs from the eager one; empty if it does not."""
    error = abs(float(step[0] - expected[0])) / abs(float(expected[0]))
    if not error <= _TOLERANCE:
        return f"losses differ by {error:.2g} of the loss"
    ours, theirs = (torch.cat([one.flatten() for _, one in sorted(gradients.items())])
                    for gradients in (step[1], expected[1]))  # fmt: skip
    error = float((ours - theirs).norm() / theirs.norm())
    return "" if error <= _TOLERANCE else f"gradients differ by {error:.2g} of their norm"


def _reason(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")


def count(types: dict[str, Any]) -> str:
    """How many types there are of each outcome, in a sentence."""
    outcomes = [{*one["memories"].values()} for one in types.values()]
    captured, eager, refused = (sum(one == {word} for one in outcomes) for word in (CAPTURED, EAGER, REFUSED))
    return (
        f"Of {len(types)} types {captured} are captured with all memories, {eager} ran eagerly only, {refused} are "
        f"refused, and {len(types) - captured - eager - refused} are not captured with some memory."
    )


if __name__ == "__main__":
    sys.exit(main())
