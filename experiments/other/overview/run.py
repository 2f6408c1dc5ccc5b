# SPDX-License-Identifier: Apache-2.0
"""The tables of the main README: what each way to read long documents gains, costs, reaches and needs.

    python experiments/other/overview/run.py      # writes a section of the main README

Nothing is measured here. Gains come from the JSON of other experiments, times from that of the benchmarks; FLOPs and
sizes of states are computed from shapes. What has no result yet says so.
"""

import json
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import yaml
from transformers import BertConfig, GPT2Config

sys.path.insert(0, str(Path(__file__).parents[1]))

from harness import OTHER, REPOSITORY, paragraph, write_readme_section

import carryforward as cf
from carryforward.evaluation.flops import flops_per_token, state_size
from carryforward.utils.markdown import markdown_table

HERE = Path(__file__).parent
PAPER, SPEED = REPOSITORY / "experiments/paper", REPOSITORY / "benchmarks/results/speed-cuda.json"
MISSING = "not measured yet"
SETTINGS = {"bundled": (0, 1), "smollm2": (0,)}  # the models, and the seeds of those that were trained
WINDOW, OVERLAP = 300, 200
SHAPE = GPT2Config()  # whose FLOPs and states are shown: GPT-2 small
ENCODER = BertConfig(hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)  # MiniLM


def main() -> None:
    write_readme_section(HERE, f"{causal_section()}\n\n{encoder_section()}\n")


# --- language models -------------------------------------------------------------------------------------------------


def causal_section() -> str:
    """Language models: memories against windows on their own and against overlap."""
    head = ["windows of 300 tokens", "needs training", "bits per byte, untrained", "bits per byte, trained", "FLOPs",
            "training time", "state", "reaches"]  # fmt: skip
    plain = causal_row("nothing carried", "–", "plain", "plain", "table2/plain", time="1.00", back="–")
    overlap = causal_row(
        f"overlap of {OVERLAP}", "–", "plain", "plain", "table2/plain", overlap=OVERLAP, back=f"{OVERLAP} tokens"
    )
    kv = cf.KVMemoryConfig(recent=146, sinks=4)
    rows = [
        plain,
        overlap,
        causal_row("**keys and values** (recommended)", "no", "kv 146 + 4", "kv", "beyond/kv-146", memory=kv,
                   time=step_time("keys and values, one block"), back=horizon("kv")),
        causal_row("the paper's vector", "yes", None, "vector", "table2/recurrent-0", memory="vector",
                   time=step_time("state's cost"), back=horizon("paper")),
        causal_row("memory tokens", "yes", None, "tokens", None, memory="tokens"),
        causal_row("associative matrices", "yes", None, "associative", None, memory="associative"),
    ]  # fmt: skip
    about = """
    Two models: the bundled one (learned positions) / SmolLM2-135M (rotary positions), on 50 validation books, the first
    15,000 tokens of each. [Untrained](experiments/other/untrained/README.md);
    [trained](experiments/paper/beyond/README.md) on 30 / 25 million tokens, two seeds / one. FLOPs and state: GPT-2
    small, float32. Training time: GPT-2 small on an H200, relative to the same windows with the state removed
    ([speed](benchmarks/SPEED.md)). "Reaches": the number of past windows that give at least 95 % of the gain of 16,
    SmolLM2-135M ([horizon](experiments/other/horizon/README.md)).
    """
    return f"{markdown_table(head, rows)}\n\n{paragraph(about)}"


def causal_row(
    name: str, training: str, untrained: str | None, memory_name: str, trained: str | None, *, overlap: int = 0,
    memory: Any = None, time: str = MISSING, back: str = MISSING,
) -> list[str]:  # fmt: skip
    """A row of the table.

    Args:
        untrained: the model's name in the results of `untrained`; None if such a state means nothing.
        trained: experiment and cell of a trained model.
    """
    recurrence = None if memory is None else cf.RecurrenceConfig(window=WINDOW, memory=memory)
    flops = flops_per_token(SHAPE, WINDOW, overlap, recurrence=recurrence)
    relative = (flops.base + flops.recurrence) / flops_per_token(SHAPE, WINDOW).base
    size = state_size(SHAPE, recurrence=recurrence).bytes if recurrence else 0
    before = "–" if memory_name not in ("plain", "kv") else bits_untrained(untrained, overlap)
    return [name, training, before, bits_trained(trained, overlap), f"{relative:.2f}", time, size_text(size), back]


def bits_untrained(model: str | None, overlap: int) -> str:
    values = []
    for setting in SETTINGS:
        results = [read(path) for path in sorted((OTHER / "untrained/results" / setting).glob("*.json"))]
        rows = [row for result in results if result["model"]["name"] == model for row in result["rows"]]
        values += [bits(rows, overlap)]
    return " / ".join(values)


def bits_trained(cell: str | None, overlap: int) -> str:
    if cell is None:
        return MISSING
    experiment, _, name = cell.partition("/")
    values = []
    for setting, seeds in SETTINGS.items():
        folder = PAPER / experiment / "results" / setting
        rows = [row for seed in seeds for row in read(folder / f"{name}-seed{seed}" / "validation.json")["rows"]]
        values.append(bits(rows, overlap))
    return " / ".join(values)


def bits(rows: list[dict[str, Any]], overlap: int) -> str:
    """Bits per byte at an overlap: with the state if there is one."""
    rows = [row for row in rows if row["overlap"] == overlap]
    with_state = [row for row in rows if row["use_state"]] or rows
    return f"{mean(row['bits_per_byte'] for row in with_state):.3f}"


def step_time(row: str) -> str:
    """Time of a training step with the state, relative to the same windows without it."""
    (found,) = [one for one in read(SPEED)["rows"] if one.get("row") == row and one["shape"] == "gpt2-small"]
    speed = {side: values["tokens_per_second"] for side, values in found["sides"].items()}
    return f"{speed['state removed'] / speed['with state']:.2f}"


def horizon(memory: str) -> str:
    """How many past windows give 95 % of the whole gain."""
    depths = read(OTHER / f"horizon/results/smollm2-{memory}.json")["depths"]
    most = depths[-1]["gain"]
    number = next(depth["windows"] for depth in depths if depth["gain"] >= 0.95 * most)
    return f"{number} window{'s' * (number != 1)} back"


def size_text(size: int) -> str:
    if not size:
        return "–"
    return f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"


# --- encoders --------------------------------------------------------------------------------------------------------


def encoder_section() -> str:
    """Encoders: carried keys and values against independent and overlapping windows."""
    head = ["encoders", "needs training", "error at a border, untrained", "F1 of answers, trained",
            "nDCG@10, untrained", "FLOPs", "time", "reaches"]  # fmt: skip
    rows = [
        encoder_row("nothing carried", "–", "overlap 0", "disjoint-256", "windows-512", "–"),
        encoder_row("overlap of 128", "–", "overlap 128", "overlapping-256", "overlap-128", "128 tokens"),
        encoder_row("**keys and values** from the left", "no", "left 124 + 4", "kv-256", "left-128", "128 tokens"),
        encoder_row("from both sides", "no", "both 60 + 4 and 64", None, None, "64 tokens on each side"),
        encoder_row("the paper's vector", "yes", None, "recurrent-256", None, MISSING),
    ]
    about = """
    All with small encoders of the MiniLM kind. [Error at a border](experiments/other/minilm-borders/README.md): 1 −
    cosine between the vector of the token at a border of disjoint windows and that in the middle of a window of its
    own. [F1](experiments/other/questions/README.md): SQuADShifts, windows of 256, one to three seeds; there the overlap
    is 100, and 100 positions are carried. [nDCG@10](experiments/other/encoders/README.md): 97 questions of COVID-QA,
    where every difference is undecided. FLOPs: computed for windows of 512 or, with carried positions, 384.
    """
    return f"{markdown_table(head, rows)}\n\n{paragraph(about)}"


def encoder_row(
    name: str, training: str, arm: str | None, answers: str | None, retrieval: str | None, reach: str
) -> list[str]:
    return [name, training, border(arm), f1(answers), ndcg(retrieval), encoder_flops(arm), MISSING, reach]


def border(arm: str | None) -> str:
    rows = read(OTHER / "minilm-borders/results.json")["rows"]
    found = [row["apart"] for row in rows if row["arm"] == arm and row["distance"] == 0]
    return f"{found[0]:.3f}" if found else "–"


def f1(cell: str | None) -> str:
    if cell is None:
        return MISSING
    paths = sorted((OTHER / "questions/results").glob(f"{cell}-seed*/squadshifts.json"))
    return f"{mean(read(path)['rows'][0]['f1'] for path in paths):.1f}"


def ndcg(arm: str | None) -> str:
    if arm is None:
        return MISSING
    return f"{read(OTHER / f'encoders/results/retrieval/covid-qa/{arm}.json')['score']:.3f}"


def encoder_flops(arm: str | None) -> str:
    """FLOPs per token of an arm of `minilm-borders`, relative to windows of 512 that are independent."""
    if arm is None:
        return MISSING
    fields = yaml.safe_load((OTHER / "minilm-borders/arms.yaml").read_text())[arm]
    if "memory" in fields:
        flops = flops_per_token(ENCODER, recurrence=cf.RecurrenceConfig(**fields))
    else:
        flops = flops_per_token(ENCODER, fields["window"], fields.get("overlap", 0))
    return f"{(flops.base + flops.recurrence) / flops_per_token(ENCODER, 512).base:.2f}"


def read(path: Path) -> Any:
    return json.loads(path.read_text())


if __name__ == "__main__":
    main()
