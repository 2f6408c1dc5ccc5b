# SPDX-License-Identifier: Apache-2.0
"""How long arms should take on an H200: an upper bound, since training ends once a task is learnt.

Assumed, not measured: a small window costs what launching its kernels costs, per layer 0.1 ms to read and 0.4 ms to
train from captured graphs (the peer, which captures none, 5 times as much); a larger one 6 FLOPs per parameter and
token to train and 2 to read, at 100 TFLOP/s. 16 arms side by side get 6 times as much done as one.
"""

from collections.abc import Sequence

from arms import BUNDLED, Arm
from measuring import SYMBOL_TASKS

from carryforward.utils.markdown import markdown_table

READ_LAYER, TRAIN_LAYER, PEER = 0.1e-3, 0.4e-3, 5  # seconds, seconds, times as much
FLOPS = 100e12  # per second
BODIES = {BUNDLED: (7, 5.5e6), "given": (30, 106e6)}  # layers, parameters without embeddings; SmolLM2-135M is given
START = 60  # seconds of an arm, to load libraries and to compile


def plan(arms: Sequence[Arm], jobs: int) -> str:
    """A table of arms, with steps, windows and time."""
    rows = [
        [arm.name, f"{arm.training['steps']:,}", f"{train_windows(arm):,.0f}", f"{seconds(arm) / 60:.1f}"]
        for arm in arms
    ]
    total = sum(map(seconds, arms)) / 60
    together = max(total / speedup(jobs), max((seconds(arm) / 60 for arm in arms), default=0))
    note = (
        f"{total:.0f} minutes one after the other, about {together:.0f} with {jobs} side by side, if none ends early."
    )
    return markdown_table(["arm", "steps", "windows trained", "minutes alone"], rows) + f"\n\n{note}"


def together(arms: Sequence[Arm], jobs: int) -> float:
    """Minutes of arms side by side."""
    each = [seconds(arm) / 60 for arm in arms]
    return max(sum(each) / speedup(jobs), max(each, default=0))


def speedup(jobs: int) -> float:
    """How much more is done by arms side by side: 6 times for 16 of them, and in proportion."""
    return 1 + 5 * (min(jobs, 16) - 1) / 15


def seconds(arm: Arm) -> float:
    """Of an arm that is alone and trains all of its steps."""
    layers, parameters = body(arm)
    window, batch = window_of(arm), arm.training["batch_size"]
    slower = PEER if arm.is_peer else 1
    train = max(TRAIN_LAYER * layers * slower, 6 * parameters * window * batch / FLOPS)
    tests = arm.tests["batch_size"]
    read = max(READ_LAYER * layers * slower, 2 * parameters * window * tests / FLOPS)
    calls = arm.tests["samples"] / tests * sum(windows_of(arm, size) for size in test_sizes(arm))
    return START + train_windows(arm) * train + calls * read


def train_windows(arm: Arm) -> float:
    """Windows in sequence in all steps: half of a stage's have its size, half an earlier one."""
    sizes = arm.training.get("sizes") or SYMBOL_TASKS[arm.task](**arm.about).train_sizes
    windows = [windows_of(arm, size) for size in sizes]
    steps, of_stage = arm.training["steps"], arm.training.get("stage_steps") or arm.training["steps"] // len(sizes)
    total = 0.0
    for stage, count in enumerate(windows):
        done = min(of_stage, steps) if stage + 1 < len(windows) else steps
        earlier = sum(windows[:stage]) / stage if stage else count
        total, steps = total + done * (count + earlier) / 2, steps - done
    return total + arm.training["decay_steps"] * (count + earlier) / 2


def test_sizes(arm: Arm) -> Sequence[int]:
    return arm.tests.get("sizes") or SYMBOL_TASKS[arm.task](**arm.about).test_sizes


def body(arm: Arm) -> tuple[int, float]:
    """Layers, and parameters without embeddings."""
    if "base" in arm.model:
        return BODIES[arm.model["base"]]
    layers, width = arm.model["layers"], arm.model["width"]
    return layers, 16 * layers * width**2  # attention, and three matrices of four times the width


def window_of(arm: Arm) -> int:
    window = arm.recurrence.get("window") or SYMBOL_TASKS[arm.task](**arm.about).window
    assert window is not None
    return window


def windows_of(arm: Arm, size: int) -> int:
    """Windows of a document of a size."""
    length = size if arm.task == "facts" else SYMBOL_TASKS[arm.task](**arm.about).length(size)
    return -(-(length - 1) // window_of(arm))
