# SPDX-License-Identifier: Apache-2.0
"""What is measured: models with each kind of memory, on tasks that cannot be done without one. An arm is data."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from typing import Any

KINDS = ("vector", "kv", "tokens", "associative")
PEER = "lucidrains"  # the package recurrent-memory-transformer-pytorch
SEEDS = range(3)
BUNDLED, GIVEN = "bundled", "given"  # base models: that of the package; a folder given on the command line
LAYERS, WIDTH, HEADS = 4, 128, 4


@dataclass(frozen=True)
class Arm:
    """A model, what it is trained on, and what it is tested on.

    Attributes:
        group: arms that one command measures.
        label: of the model, in tables: a kind of memory, a package, a BPTT depth.
        task, about: its class, in lower case, and its arguments.
        model: arguments of `make_model`; for tasks in words, {"base": ...}.
        recurrence: further arguments of `add_recurrence`: the memory, `bptt_windows`, `window`.
        training: fields of `TaskTraining`.
        tests: arguments of `score_task`.
        distances: sizes in which accuracy is also measured by how many windows back the fact stands.
        seed: of weights and samples.
    """

    group: str
    label: str
    task: str
    about: dict[str, Any]
    model: dict[str, Any]
    recurrence: dict[str, Any]
    training: dict[str, Any]
    tests: dict[str, Any] = field(default_factory=dict)
    distances: tuple[int, ...] = ()
    seed: int = 0

    @property
    def setting(self) -> str:
        """The task and its arguments: "copy-24-3"."""
        return "-".join([self.task, *map(str, self.about.values())])

    @property
    def name(self) -> str:
        return f"{self.setting}-{self.label}-{self.seed}"

    @property
    def is_peer(self) -> bool:
        return self.label == PEER

    def fields(self) -> dict[str, Any]:
        """As results record it."""
        return {"name": self.name, "setting": self.setting, **asdict(self)}


NEW_MODEL = {"layers": LAYERS, "width": WIDTH, "heads": HEADS}
TRAINING = {"batch_size": 64, "learning_rate": 1e-3, "warmup_steps": 100, "validate_every": 50,
            "validation_samples": 256, "stage_accuracy": 0.95, "stop_accuracy": 0.98}  # fmt: skip

# --- Retrieval ---------------------------------------------------------------------------------------------------

PAIRS = (2, 3, 5, 10, 20, 30, 40, 50)  # not from one pair on: whose value is learnt to be said whatever the key
RETRIEVAL_WINDOWS = {"rewrite": 3, "remember": 5}  # a pair: key, colon, value
RETRIEVAL_MEMORY = {
    "vector": {"kind": "vector"},
    "tokens": {"kind": "tokens", "memory_tokens": 16},
    "associative": {"kind": "associative", "memory_tokens": 1},  # learnt as soon as with 4
}
KEY_SIZES = {"rewrite": 32, "remember": 64}  # a matrix has six times as many features: 16 keys, and up to 4,096


def window_kv(window: int) -> dict[str, Any]:
    """The keys and values of the whole window before: every layer reaches one window further back."""
    return {"kind": "kv", "recent": window, "sinks": 0}


def retrieval(seeds: Iterable[int] = SEEDS) -> list[Arm]:
    arms = []
    for seed, mode, kind in product(seeds, RETRIEVAL_WINDOWS, reversed(KINDS)):
        memory = window_kv(RETRIEVAL_WINDOWS[mode]) if kind == "kv" else RETRIEVAL_MEMORY[kind]
        memory = {**memory, "key_size": KEY_SIZES[mode]} if kind == "associative" else memory
        arms.append(Arm(
            "retrieval", kind, "retrieval", {"mode": mode}, NEW_MODEL, {"memory": memory},
            {**TRAINING, "sizes": PAIRS, "steps": 8000, "stage_steps": 2000,
             "decay_steps": 1000},
            {"sizes": (2, 5, 10, 20, 50, 100, 200, 500), "samples": 512, "batch_size": 128}, (20,), seed,
        ))  # fmt: skip
    return arms


# --- Copy and reverse --------------------------------------------------------------------------------------------

COPIES = (("copy", 24, 3), ("copy", 120, 9), ("copy", 360, 9), ("reverse", 24, 3), ("reverse", 120, 9))
COPY_TOKENS = {24: 16, 120: 32, 360: 64}  # memory tokens, m
COPY_STEPS = {24: 3000, 120: 5000, 360: 5000}
# No curriculum: every further window loses what was learnt of fewer, and regains it later than it is learnt at once.
COPY_TRAINING = {**TRAINING, "validate_every": 100, "validation_samples": 128, "decay_steps": 500}


def copy_window(symbols: int, windows: int) -> int:
    """Tokens of a window."""
    return -(-(2 * symbols + 1) // windows)


def copy_memory(kind: str, symbols: int, windows: int) -> dict[str, Any]:
    if kind == "kv":
        return window_kv(copy_window(symbols, windows))
    sizes = {"tokens": {"memory_tokens": COPY_TOKENS[symbols]},
             "associative": {"memory_tokens": COPY_TOKENS[symbols], "key_size": 32}}  # fmt: skip
    return {"kind": kind, **sizes.get(kind, {})}


def copy_arm(group: str, kind: str, task: str, symbols: int, windows: int, seed: int) -> Arm:
    memory = copy_memory("tokens" if kind == PEER else kind, symbols, windows)
    tests = {"samples": 256, "batch_size": 128}
    tests |= {"controls": ("memory reset",)} if kind == PEER else {}  # the package cannot do without memory tokens
    return Arm(
        group, kind, task, {"symbols": symbols, "windows": windows}, NEW_MODEL, {"memory": memory},
        {**COPY_TRAINING, "steps": COPY_STEPS[symbols], "sizes": (symbols,)}, tests, (), seed,
    )  # fmt: skip


def copies(seeds: Iterable[int] = SEEDS) -> list[Arm]:
    return [copy_arm("copy", kind, *which, seed) for seed, which, kind in product(seeds, COPIES, reversed(KINDS))]


def peer(seeds: Iterable[int] = (0,)) -> list[Arm]:
    """The package, on the same data with the same sizes and steps. It has memory tokens."""
    return [copy_arm("peer", PEER, *which, seed) for seed, which in product(seeds, COPIES[:2])]


# --- BPTT depth --------------------------------------------------------------------------------------------------

DEPTHS = (1, 2, 4, 8, None)  # windows through which gradients flow; None: all


def depth(seeds: Iterable[int] = (0,)) -> list[Arm]:
    """Memory tokens on copy: what is repeated was read four or five windows before."""
    arms = [copy_arm("depth", "tokens", "copy", 24, 9, seed) for seed in seeds]
    return [
        replace(
            arm,
            label=f"depth-{windows or 'all'}",
            recurrence={**arm.recurrence, "bptt_windows": windows},
            training={**arm.training, "steps": 5000},
        )
        for arm, windows in product(arms, DEPTHS)
    ]


# --- Facts in books ----------------------------------------------------------------------------------------------

LENGTHS = tuple(1024 * 2**power for power in range(8))  # tokens
FACTS_TRAINING = {"sizes": (512, 1024, 2048, 4096), "steps": 3000, "stage_steps": 600, "batch_size": 32,
                  "learning_rate": 5e-4, "recurrence_learning_rate": 1e-3, "warmup_steps": 100, "validate_every": 100,
                  "validation_samples": 128, "stage_accuracy": 0.95, "stop_accuracy": 0.98,
                  "decay_steps": 500, "bf16": True}  # fmt: skip
FACTS_MEMORY = {
    BUNDLED: {
        "kv": {"memory": {"kind": "kv", "recent": 380, "sinks": 4}, "window": 128},  # all 512 learned positions
        "tokens": {"memory": {"kind": "tokens", "memory_tokens": 16}, "window": 256},
        "associative": {"memory": {"kind": "associative", "memory_tokens": 16, "key_size": 64}, "window": 256},
    },
    GIVEN: {
        "kv": {"memory": {"kind": "kv", "recent": 2044, "sinks": 4}, "window": 512},
        "tokens": {"memory": {"kind": "tokens", "memory_tokens": 16}, "window": 512},
        "associative": {"memory": {"kind": "associative", "memory_tokens": 16, "key_size": 64}, "window": 512},
    },
}
GIVEN_TRAINING = {**FACTS_TRAINING, "steps": 1200, "stage_steps": 300, "learning_rate": 1e-4, "batch_size": 16}


def facts() -> list[Arm]:
    trainings, samples = {BUNDLED: FACTS_TRAINING, GIVEN: GIVEN_TRAINING}, {BUNDLED: 256, GIVEN: 128}
    return [
        Arm("facts", f"{base}-{kind}", "facts", {"about": "people"}, {"base": base}, recurrence, trainings[base],
            {"sizes": LENGTHS, "samples": samples[base], "batch_size": 32, "bf16": True})
        for base, kinds in FACTS_MEMORY.items() for kind, recurrence in reversed(kinds.items())
    ]  # fmt: skip


# --- All of them -------------------------------------------------------------------------------------------------

GROUPS = {"retrieval": retrieval, "copy": copies, "depth": depth, "facts": facts, "peer": peer}


def arms_of(group: str, *, tiny: bool = False) -> list[Arm]:
    """The arms of a group."""
    return [shrink(arm) if tiny else arm for arm in GROUPS[group]()]


def shrink(arm: Arm) -> Arm:
    """An arm that is measured in seconds, to see that everything works."""
    words = "base" in arm.model
    sizes = (256,) if words else (1, 2) if arm.task == "retrieval" else (4, copy_window(**arm.about))
    memory = {**arm.recurrence["memory"]}
    memory |= {name: 2 for name in ("memory_tokens", "key_size") if name in memory}
    training = {**arm.training, "sizes": sizes, "steps": 4, "stage_steps": 2, "decay_steps": 0, "batch_size": 2,
                "validate_every": 2, "validation_samples": 4}  # fmt: skip
    model = arm.model if words else {"layers": 1 + (arm.label == "vector"), "width": 16, "heads": 2}
    return replace(
        arm, model=model, recurrence={**arm.recurrence, "memory": memory}, training=training,
        tests={**arm.tests, "sizes": sizes, "samples": 4, "batch_size": 2}, distances=arm.distances and (3,),
    )  # fmt: skip
