# SPDX-License-Identifier: Apache-2.0
"""Measure one arm: train it, and score it with its memory and without.

    python measuring.py ARM --out DIR [--device cuda] ...        # as `run.py` starts it

A signal to end stops the training after its step, or the scoring after its size. What there is is then written, with
"finished": false and a checkpoint, from which the next call goes on.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from arms import BUNDLED, GROUPS, Arm, arms_of
from harness import new_result, strip_folders, write_result

from carryforward.models.add_recurrence import add_recurrence
from carryforward.models.loading import BUNDLED as BUNDLED_FOLDER
from carryforward.models.loading import load_causal
from carryforward.tasks.base import TEST, Samples, Task, sample_seed
from carryforward.tasks.copying import Copy, Reverse
from carryforward.tasks.models import make_model
from carryforward.tasks.retrieval import Retrieval
from carryforward.tasks.score import score_task, validate
from carryforward.tasks.train import TaskTraining, TrainingCurve, train_task
from carryforward.utils.signals import STOP_SIGNALS, Interruptible

SYMBOL_TASKS: dict[str, type[Task]] = {"retrieval": Retrieval, "copy": Copy, "reverse": Reverse}
RESULTS = Path(__file__).parent / "results"
DISTANCE_SAMPLES = 8  # times the number of test documents: they are divided by distance
DISTANCE_ROWS = 32, 64  # least and most of a distance; of about the same number, so that captured graphs serve all
Stopping = Callable[[], bool]


def measure(arm: Arm, options: argparse.Namespace, stopping: Stopping = lambda: False) -> dict[str, Any]:
    """Train and score an arm; the result is written to its file."""
    path, checkpoint = options.out / f"{arm.name}.json", checkpoint_of(arm, options.out)
    earlier = json.loads(path.read_text()) if path.exists() and checkpoint.exists() else {}
    model, task = build(arm, options)
    checkpoint.parent.mkdir(parents=True, exist_ok=True)
    training = TaskTraining(seed=arm.seed, **arm.training)
    curve = train_task(model, task, training, interrupted=stopping, library=False, checkpoint=checkpoint)
    result = describe(arm, options) | {
        "about": about(task), "unit": task.unit, "chance": task.chance, "whole_answers": task.whole_answers,
        "model": describe_model(model), "training": curve.as_json(),
        "scores": earlier.get("scores", []), "distances": earlier.get("distances", {}),
    }  # fmt: skip
    score(arm, model, task, result, curve, stopping)
    write_result(path, result)
    if result["finished"]:
        checkpoint.unlink()
    return result


def describe(arm: Arm, options: argparse.Namespace) -> dict[str, Any]:
    """A result without its numbers: how an arm is measured."""
    settings = {"jobs": options.jobs, "fast_path": options.fast_path}
    given = {name: getattr(options, name) for name in ("base", "data")} if "base" in arm.model else {}
    names = {name: Path(value).name for name, value in given.items() if value}
    return {
        **new_result("memory", seed=arm.seed, device=options.device), "arm": arm.fields(),
        "settings": settings | names, "finished": False,
    }  # fmt: skip


def checkpoint_of(arm: Arm, out: Path) -> Path:
    """Where the training of an arm that was stopped is, beside its log: a folder that git ignores."""
    return out / "runs" / f"{arm.name}.pt"


def build(arm: Arm, options: argparse.Namespace) -> tuple[Any, Task]:
    """The model and the task of an arm."""
    if "base" in arm.model:
        return build_in_words(arm, options)
    task: Task = SYMBOL_TASKS[arm.task](**arm.about)
    if arm.is_peer:
        from peer import make_peer

        return make_peer(arm, task, options.device)
    model = make_model(task, **arm.model, **arm.recurrence, seed=arm.seed)
    model.fast_path = options.fast_path
    return model.to(options.device), task


def build_in_words(arm: Arm, options: argparse.Namespace) -> tuple[Any, Task]:
    """A pretrained model with a new memory, and the task facts."""
    from carryforward.tasks.facts import Facts
    from carryforward.tasks.filler import Filler

    loaded = load_causal(BUNDLED_FOLDER if arm.model["base"] == BUNDLED else options.base)
    task = Facts(loaded.tokenizer, Filler(loaded.tokenizer, options.data), **arm.about)
    documents = task.samples(task.train_sizes[0], 64, sample_seed(0, arm.seed)).input_ids.tolist()
    torch.manual_seed(arm.seed)  # memories are initialised at random
    model = add_recurrence(loaded.model, documents=documents, **arm.recurrence)
    model.fast_path = options.fast_path
    return model.to(options.device), task


def about(task: Task) -> dict[str, Any]:
    """What a task was made with."""
    settings = task.settings()
    strip_folders(settings, *{"text"} & {*settings})
    return settings


def describe_model(model: Any) -> dict[str, Any]:
    """Sizes: parameters, and the numbers that pass from a window to the next."""
    memory = sum(weight.numel() for weight in model.memory.parameters())
    return {"parameters": sum(weight.numel() for weight in model.parameters()), "memory_parameters": memory,
            "window": model.config.recurrence.window, **carried(model)}  # fmt: skip


def carried(model: Any) -> dict[str, Any]:
    """How much of the state there is, where the model is ours."""
    recurrence = model.config.recurrence
    if not hasattr(recurrence, "memories"):
        return {"carries": recurrence.describe, "state_numbers": recurrence.state_numbers}
    shapes = [m.state_shape(model.config.base_config, model.config.architecture) for m in recurrence.memories]
    numbers = sum(torch.Size(shape).numel() for shape in shapes)
    return {"carries": recurrence.describe(), "state_numbers": numbers}


def score(arm: Arm, model: Any, task: Task, result: dict[str, Any], curve: TrainingCurve, stopping: Stopping) -> None:
    """Add what is missing to a result, size by size, and whether all is there then."""
    tests = {**arm.tests}
    sizes = tests.pop("sizes", task.test_sizes)
    for size in sizes:
        if curve.stopped == "interrupted" or stopping():
            return
        if size not in [score["size"] for score in result["scores"]]:
            (one,) = score_task(model, task, [size], **tests, seed=arm.seed, library=False)
            result["scores"].append(one.as_json())
    for size in arm.distances:
        if stopping():
            return
        if str(size) not in result["distances"]:
            result["distances"][str(size)] = score_distances(arm, model, task, size)
    result["finished"] = True


def score_distances(arm: Arm, model: Any, task: Task, size: int) -> dict[str, Any]:
    """Accuracy by the windows between the question and the pair that it asks for, from 1, on new test documents."""
    count = DISTANCE_SAMPLES * arm.tests["samples"]
    samples = task.samples(size, count, sample_seed(TEST, arm.seed, size, count))
    assert samples.depths is not None
    distances = size - (samples.depths * (size - 1)).round().long()
    least, most = DISTANCE_ROWS
    scores = {}
    for distance in distances.unique().tolist():
        rows = (distances == distance).nonzero()[:most, 0]
        if len(rows) >= least:
            some = Samples(samples.input_ids[rows], samples.labels[rows])
            scores[str(distance)] = validate(model, some, batch_size=most).as_json()
    return scores


def add_options(parser: argparse.ArgumentParser) -> None:
    """What a run and each of its arms are told."""
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the results")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--jobs", type=int, default=1, help="arms that run side by side")
    parser.add_argument("--fast-path", default="auto", choices=("off", "auto", "compiled"))
    parser.add_argument("--base", help="facts: a further base model than the bundled one, a folder or .gguf file")
    parser.add_argument("--data", default="python-docs", help="facts: texts between which they are strewn")
    parser.add_argument("--tiny", action="store_true", help="tiny arms, to see that everything works")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arm")
    add_options(parser)
    options = parser.parse_args()
    (arm,) = (arm for group in GROUPS for arm in arms_of(group, tiny=options.tiny) if arm.name == options.arm)
    stop = Interruptible("stopping: what there is is written")
    with stop.listening(*STOP_SIGNALS):
        measure(arm, options, lambda: stop.requested)


if __name__ == "__main__":
    main()
