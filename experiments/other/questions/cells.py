# SPDX-License-Identifier: Apache-2.0
"""The cells that are compared: settings, seeds, the texts they are scored on, and which results are missing."""

from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, WORK = HERE / "results", Path("runs/questions")
VECTOR: dict[str, Any] = {"preset": "paper"}  # the vector of section 5.4
KV: dict[str, Any] = {"preset": "paper", "memory": ("kv",), "sinks": 4}  # carried keys and values instead
CELLS: dict[str, dict[str, Any]] = {
    f"{kind}-{window}": {"window": window, **settings}
    for window in (256, 512)
    for kind, settings in (("disjoint", {"recurrence": False}), ("recurrent", VECTOR))
}
# The best memory for language models. Windows of 512 leave the encoder no positions for it, and a long question leaves
# 126 document tokens in a window of 256.
CELLS["kv-256"] = {"window": 256, **KV, "recent": 96}
VARIANTS: dict[str, dict[str, Any]] = {  # other states, and overlap without a state; seed 0 only
    "every-layer-256": {"window": 256, **VECTOR, "insert_at": ("all",)},
    "layer-5-256": {"window": 256, **VECTOR, "insert_at": (5,)},  # where an untrained state changes the last layer most
    "four-slots-256": {"window": 256, **VECTOR, "slots": 4},
    "one-window-bptt-256": {"window": 256, **VECTOR, "bptt_windows": 1},
    "faster-256": {"window": 256, **VECTOR, "recurrence_learning_rate": 0.001},  # the rate in language models
    "overlapping-256": {"window": 256, "overlap": 100, "recurrence": False},  # as many earlier tokens as "kv" has
    # Both: the memory brings what is left of a border, and only overlap brings what is right of it.
    "kv-overlapping-50-256": {"window": 256, "overlap": 50, **KV, "recent": 72},
    "overlapping-50-256": {"window": 256, "overlap": 50, "recurrence": False},
}
LONG_ANSWERS = {"covid-qa": 100}  # maximum tokens: one answer in five is longer than the default of 30
SEEDS = [0, 1, 2]
TEXTS = {
    "squadshifts": "SQuADShifts, joined: questions set aside",
    "covid-qa": "COVID-QA, trained on SQuADShifts alone",
    "hotpotqa": "HotpotQA, a sample, trained on another sample after SQuADShifts",
}


def seeds_of(cell: str) -> list[int]:
    """The seeds a cell is run with."""
    return SEEDS if cell in CELLS else SEEDS[:1]


def window_and_overlap(cell: str) -> tuple[int, int]:
    settings = (CELLS | VARIANTS)[cell]
    return settings["window"], settings.get("overlap", 0)


def missing_texts(cell: str, seed: int) -> list[str]:
    """The texts that a cell has no result for."""
    return [text for text in TEXTS if not (RESULTS / f"{cell}-seed{seed}" / f"{text}.json").exists()]
