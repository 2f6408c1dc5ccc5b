# SPDX-License-Identifier: Apache-2.0
"""What is compared: cells, their seeds, the texts they are scored on, and what of that is there."""

from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, WORK = HERE / "results", Path("runs/questions")
CELLS: dict[str, dict[str, Any]] = {
    f"{kind}-{window}": {"window": window, **more}
    for window in (256, 512)
    for kind, more in (("disjoint", {"recurrence": False}), ("recurrent", {}))
}
# what is best for language models; windows of 512 have no positions left, and a long question leaves 126 tokens of 256
CELLS["kept-256"] = {"window": 256, "slots": 0, "kept": 96, "sinks": 4}
TRIED: dict[str, dict[str, Any]] = {  # what else a state can be, and what does without one; seed 0
    "every-layer-256": {"window": 256, "insert_at": ("all",)},
    "layer-5-256": {"window": 256, "insert_at": (5,)},  # where an untrained state changes the last layer most
    "four-slots-256": {"window": 256, "slots": 4},
    "one-window-bptt-256": {"window": 256, "bptt_windows": 1},
    "faster-256": {"window": 256, "recurrence_learning_rate": 0.001},  # as the module of language models learns
    "overlapping-256": {"window": 256, "overlap": 100, "recurrence": False},  # as much of the text before as "kept" has
    # both: what is kept comes from the left, and a token before a border lacks what follows it; and overlap alone
    "kept-overlapping-50-256": {"window": 256, "overlap": 50, "slots": 0, "kept": 72, "sinks": 4},
    "overlapping-50-256": {"window": 256, "overlap": 50, "recurrence": False},
}
LONGEST = {"covid-qa": 100}  # tokens of an answer; one in five has more than the usual 30
SEEDS = [0, 1, 2]
TEXTS = {
    "squadshifts": "SQuADShifts, joined: questions set aside",
    "covid-qa": "COVID-QA, trained on SQuADShifts alone",
    "hotpotqa": "HotpotQA, a sample, trained on another sample after SQuADShifts",
}


def seeds_of(cell: str) -> list[int]:
    """Those that a cell is to have."""
    return SEEDS if cell in CELLS else SEEDS[:1]


def windows_of(cell: str) -> tuple[int, int]:
    """A cell's window and overlap."""
    return (CELLS | TRIED)[cell]["window"], (CELLS | TRIED)[cell].get("overlap", 0)


def lacking(cell: str, seed: int) -> list[str]:
    """Texts that a cell has not been scored on."""
    return [text for text in TEXTS if not (RESULTS / f"{cell}-seed{seed}" / f"{text}.json").exists()]
