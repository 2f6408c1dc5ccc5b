# SPDX-License-Identifier: Apache-2.0
"""Time and memory of finding an answer, and of a training step, against the length of the document.

A recurrent encoder that reads windows of 512 tokens, question first, against Longformer's question-answering head from
transformers at the same widths: local attention over 512 tokens, global attention from the question, and as many
positions as the document needs. Weights are random and no dropout is drawn: neither changes the cost. One document at a
time; a word is 1.3 tokens; tokenising is left out on both sides, the search for the best stretch is not.

The peak is what was in use at most above weights (and, in training, gradients), as in `memory.py`: a GPU's allocator
counts it, with what the fast path's recordings hold, and on a CPU every case has a process of its own, whose resident
set it is. What makes that figure sharp makes programs slow, so time is taken in another.

    python benchmarks/answering.py --device cuda         # RoBERTa-base's shape, bfloat16: two minutes on one H200
    python benchmarks/answering.py --device cpu          # MiniLM's widths
    python benchmarks/speed_report.py                    # SPEED.md and the figures, from the JSON files
"""

import argparse
import contextlib
import gc
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import record
from memory import MALLOC, QUIET, readable, watch

HERE = Path(__file__).parent
RECURRENT, LONGFORMER = MODELS = "recurrent", "Longformer"
ANSWERING, TRAINING = "answering", "training step"
WORDS = (500, 1_500, 5_000, 15_000, 50_000)
TOKENS_A_WORD = 1.3
QUESTION, WINDOW = 16, 512
SHAPES: dict[str, dict[str, int]] = {
    "cuda": {"vocab_size": 50265, "hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12,
             "intermediate_size": 3072},
    "cpu": {"vocab_size": 30522, "hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 12,
            "intermediate_size": 1536},
}  # fmt: skip
LONGEST = {"cuda": {ANSWERING: 50_000, TRAINING: 50_000}, "cpu": {ANSWERING: 50_000, TRAINING: 1_500}}
# Rounds that are not timed, over the longest document and then over each: the fast path records what it will replay,
# and after a thousand windows compiles it. A document's last window is of a length of its own, and runs without.
WARM = {"cuda": (12, 2), "cpu": (0, 0)}
LIMIT_GB = 6.0  # of a CPU's memory, which others use too; a GPU says itself when it is full
FRAME = {"prefix": (0,), "separator": (2, 2), "suffix": (2,)}  # as RoBERTa's and Longformer's tokenizers put them


# --- the two sides -----------------------------------------------------------------------------------------------


def build(name: str, device: str, words: int) -> Any:
    import torch
    from transformers import LongformerConfig, LongformerForQuestionAnswering, RobertaConfig, RobertaModel

    from carryforward import add_recurrence

    torch.manual_seed(0)
    common: dict[str, Any] = SHAPES[device] | {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == LONGFORMER:
        positions = -(-(length(words) + QUESTION + 4) // WINDOW) * WINDOW + 2
        return LongformerForQuestionAnswering(
            LongformerConfig(**common, max_position_embeddings=positions, attention_window=WINDOW, sep_token_id=2)
        ).to(device)
    encoder = RobertaModel(RobertaConfig(**common, max_position_embeddings=WINDOW + 2), add_pooling_layer=False)
    model = add_recurrence(encoder, head="question-answering", window=WINDOW, keep_windows=0, **FRAME)
    return model.to(device)


def length(words: int) -> int:
    return int(words * TOKENS_A_WORD)


def job(name: str, what: str, model: Any, device: str, words: int) -> Callable[[], object]:
    """What is measured, on one document."""
    import numpy as np
    import torch

    from carryforward.qa.dataset import Question
    from carryforward.qa.predict import Asked, answer_all, best

    count = length(words)
    draw = torch.Generator().manual_seed(words)
    own, ids = (torch.randint(5, SHAPES[device]["vocab_size"], (n,), generator=draw) for n in (QUESTION, count))
    offsets = np.stack([np.arange(count) * 2, np.arange(count) * 2 + 1], axis=1)
    asked = Asked(Question("1", "?", "a " * count, (), "span", "squad"), own.numpy(), ids.numpy(), offsets)
    front = torch.cat([torch.tensor([0]), own, torch.tensor([2, 2])])
    whole = torch.cat([front, ids, torch.tensor([2])])[None].to(device)
    answer = torch.tensor([count // 2], device=device)

    def autocast() -> Any:
        return torch.autocast(device, torch.bfloat16) if device == "cuda" else contextlib.nullcontext()

    def find() -> None:
        with autocast():
            if name == RECURRENT:
                answer_all(model.eval(), [asked])
                return
            with torch.inference_mode():
                out = model.eval()(whole)
        inside = slice(len(front), len(front) + count)
        starts, ends = (scores[0, inside].float().cpu() for scores in (out.start_logits, out.end_logits))
        best((starts, ends, torch.zeros(4)), asked.question.document, offsets)

    def train() -> None:
        model.train()
        with autocast():
            if name == RECURRENT:
                given = {"input_ids": ids[None].to(device), "question_ids": own[None]}
                loss = model(**given, start_positions=answer, end_positions=answer).loss
            else:
                place = answer + len(front)
                loss = model(whole, start_positions=place, end_positions=place).loss
        loss.backward()

    return find if what == ANSWERING else train


def measure(name: str, what: str, words: int, device: str, model: Any = None) -> dict[str, Any]:
    """One case: the median time of some rounds, and the peak."""
    import torch

    model = build(name, device, words) if model is None else model
    case = {"what": what, "model": name, "words": words, "tokens": length(words)}
    synchronize = torch.cuda.synchronize if device == "cuda" else lambda: None
    taken: list[float] = []
    try:
        job(name, what, model, device, WORDS[0])()  # the gradients, and what libraries allocate on first use
        run = job(name, what, model, device, words)
        gc.collect()
        peak_above = watch(device)
        earlier = 0 if device == "cpu" else torch.cuda.memory_allocated() - held(model)  # by recordings, which stay
        for _ in range(WARM[device][1]):
            run()
        while len(taken) < 3 and sum(taken) < 5:
            synchronize()
            begin = time.perf_counter()
            run()
            synchronize()
            taken.append(time.perf_counter() - begin)
        figures = {"seconds": statistics.median(taken), "fastest": min(taken), "slowest": max(taken)}
        return case | figures | {"rounds": len(taken), "peak_bytes": peak_above() + earlier}
    except torch.OutOfMemoryError:
        return case | {"skipped": "out of memory"}


def held(model: Any) -> int:
    """Bytes of weights and gradients."""
    tensors = [*model.parameters(), *model.buffers(), *(weight.grad for weight in model.parameters())]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


# --- all cases ---------------------------------------------------------------------------------------------------


def cases(device: str) -> Iterator[dict[str, Any]]:
    """On a GPU in this process, which takes long enough to start; elsewhere in one for each case."""
    for what, longest in LONGEST[device].items():
        for name in MODELS:
            model = build(name, device, longest) if device == "cuda" else None
            if name == RECURRENT and WARM[device][0]:
                warm = job(name, what, model, device, longest)
                for _ in range(WARM[device][0]):
                    warm()
            expected = 0.0  # bytes a word, by the case before, where memory grows with them
            for words in (some for some in WORDS if some <= longest):
                if device == "cpu" and expected * words > LIMIT_GB * 1e9:
                    told = f"about {expected * words / 1e9:.2g} GB expected, the limit is {LIMIT_GB:g} GB"
                    yield {"what": what, "model": name, "words": words, "tokens": length(words), "skipped": told}
                    continue
                case = in_a_process(name, what, words) if model is None else measure(name, what, words, device, model)
                expected = 0.0 if name == RECURRENT else case.get("peak_bytes", 0) / words
                yield case
            del model
            gc.collect()


def in_a_process(name: str, what: str, words: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--device", "cpu", "--case", name, what, str(words)]
    timed, watched = (
        json.loads(subprocess.run(command, env=os.environ | QUIET | more, stdout=subprocess.PIPE, check=True).stdout)
        for more in ({}, MALLOC)
    )
    return timed | {"peak_bytes": watched["peak_bytes"]}


def run(device: str, out: Path) -> None:
    import torch

    from carryforward.utils.provenance import provenance

    precision = "bfloat16 autocast" if device == "cuda" else "float32"
    config = SHAPES[device] | {"window": WINDOW, "question": QUESTION, "batch": 1, "tokens_a_word": TOKENS_A_WORD}
    config["threads"] = torch.get_num_threads()
    report = {**provenance(device), "seed": 0, "precision": precision, "config": config}
    with record.cases(out, report) as add:
        for case in cases(device):
            outcome = case.get("skipped") or f"{case['seconds']:.2f} s, {readable(case['peak_bytes'])}"
            print(f"{case['what']}, {case['model']}, {case['words']:,} words: {outcome}", file=sys.stderr, flush=True)
            add(case)


# --- table and figure --------------------------------------------------------------------------------------------


def section(report: dict[str, Any]) -> str:
    """Markdown of one machine's results, for SPEED.md."""
    hardware, config = report["hardware"], report["config"]
    where = hardware.get("gpu") or f"{hardware['cpu']}, threads: {config['threads']}"
    shape = (
        f"{config['num_hidden_layers']} layers of width {config['hidden_size']}, {report['precision']}, one document"
    )
    lines = [f"## Answers from long documents, on {where}", "", f"{shape}. Commit {report['commit'][:12]}.", ""]
    lines += ["| | words | " + " | ".join(f"{name}: seconds | peak" for name in MODELS) + " |"]
    lines += ["| --- " + "| ---: " * 5 + "|"]
    found = {(case["what"], case["model"], case["words"]): case for case in report["cases"]}
    for what, words in dict.fromkeys((what, words) for what, _, words in found):
        cells = [_cells(found.get((what, name, words), {"skipped": "not run"})) for name in MODELS]
        lines.append(f"| {what} | {words:,} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cells(case: dict[str, Any]) -> str:
    if "skipped" in case:
        return f"({case['skipped']}) | "
    middle, fastest, slowest = (
        f"{case[name]:.{2 if case[name] >= 1 else 3}f}" for name in ("seconds", "fastest", "slowest")
    )
    spread = f" ({fastest} to {slowest})" if case["rounds"] > 1 else ""
    return f"{middle}{spread} | {readable(case['peak_bytes'])}"


def draw(report: dict[str, Any], path: Path) -> None:
    """Time and peak memory against words, both on logarithmic scales."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(8.8, 3.6), layout="constrained")
    for axis, field, title, unit in zip(
        axes, ("seconds", "peak_bytes"), ("Time for one document (s)", "Peak memory above weights (MB)"), (1, 1e6),
        strict=True,
    ):  # fmt: skip
        for name, colour in zip(MODELS, ("#0b6e4f", "#c8553d"), strict=True):
            for what, style in ((ANSWERING, "o-"), (TRAINING, "s--")):
                some = [case for case in report["cases"] if (case["what"], case["model"]) == (what, name)]
                points = [(case["words"], case[field] / unit) for case in some if field in case]
                if points:
                    axis.loglog(*zip(*points, strict=True), style, color=colour, linewidth=2, label=f"{name}, {what}")
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_xlabel("words of the document")
        axis.grid(True, color="#e3e3e3")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=160)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=SHAPES, default="cpu")
    parser.add_argument("--out", type=Path, help="JSON to write (benchmarks/results/answering-DEVICE.json)")
    parser.add_argument("--case", nargs=3, metavar=("MODEL", "WHAT", "WORDS"), help="one case, printed as a JSON line")
    arguments = parser.parse_args()
    if arguments.case:
        name, what, words = arguments.case
        print(json.dumps(measure(name, what, int(words), arguments.device)))
    else:
        run(arguments.device, arguments.out or HERE / f"results/answering-{arguments.device}.json")


if __name__ == "__main__":
    main()
