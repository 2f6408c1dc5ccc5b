# SPDX-License-Identifier: Apache-2.0
"""Time and memory of answering a question, and of a training step, against the length of the document.

A recurrent encoder with windows of 512 tokens is compared with Longformer's question-answering head from transformers
at the same widths: local attention over 512 tokens, global attention from the question, and as many positions as the
document needs. Weights are random and there is no dropout; neither changes the cost. One document at a time, 1.3 tokens
per word. Tokenisation is not measured, the search for the best span is.

The peak is the memory in use above weights (and, in training, gradients), as in `memory.py`. On a GPU the allocator
counts it, including the captured graphs of the fast path. On a CPU it is the resident set of a process of its own. The
malloc settings that make that number precise slow programs down, so time is measured in another process.

    python benchmarks/answering.py --device cuda         # shape of RoBERTa-base, bfloat16: two minutes on one H200
    python benchmarks/answering.py --device cpu          # widths of MiniLM
    python benchmarks/speed_report.py                    # SPEED.md and the figures, from the JSON files
"""

import argparse
import contextlib
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from cpu_limits import parse_arguments
from measurements import RESULTS, collect_cases, run_case
from memory import MALLOC, QUIET, readable, watch_peak

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
# Warm-up rounds, over the longest document and then over each: the fast path captures graphs, and compiles after a
# thousand windows. A document's last window has a length of its own and runs without a graph.
WARM_UP = {"cuda": (12, 2), "cpu": (0, 0)}
LIMIT_GB = 6.0  # of the CPU's memory, which is shared; a GPU reports when it is full
FRAME = {"prefix": (0,), "separator": (2, 2), "suffix": (2,)}  # as in RoBERTa's and Longformer's tokenizers


# --- the two models -----------------------------------------------------------------------------------------------


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
    model = add_recurrence(encoder, preset="paper", head="question-answering", window=WINDOW, keep_windows=0, **FRAME)
    return model.to(device)


def length(words: int) -> int:
    return int(words * TOKENS_A_WORD)


def make_job(name: str, what: str, model: Any, device: str, words: int) -> Callable[[], object]:
    """The function that is timed: answer a question about one document, or a training step on it."""
    import numpy as np
    import torch

    from carryforward.qa.dataset import Question
    from carryforward.qa.predict import TokenisedQuestion, answer_all, best_answers

    count = length(words)
    draw = torch.Generator().manual_seed(words)
    own, ids = (torch.randint(5, SHAPES[device]["vocab_size"], (n,), generator=draw) for n in (QUESTION, count))
    offsets = np.stack([np.arange(count) * 2, np.arange(count) * 2 + 1], axis=1)
    question = Question("1", "?", "a " * count, (), "span", "squad")
    asked = TokenisedQuestion(question, own.numpy(), ids.numpy(), offsets)
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
        best_answers((starts, ends, torch.zeros(4)), asked.question.document, offsets)

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
        make_job(name, what, model, device, WORDS[0])()  # allocates gradients and what libraries need on first use
        run = make_job(name, what, model, device, words)
        gc.collect()
        peak_above = watch_peak(device)
        graphs = 0 if device == "cpu" else torch.cuda.memory_allocated() - weight_bytes(model)  # captured before
        for _ in range(WARM_UP[device][1]):
            run()
        while len(taken) < 3 and sum(taken) < 5:
            synchronize()
            begin = time.perf_counter()
            run()
            synchronize()
            taken.append(time.perf_counter() - begin)
        seconds = {"seconds": statistics.median(taken), "fastest": min(taken), "slowest": max(taken)}
        return case | seconds | {"rounds": len(taken), "peak_bytes": peak_above() + graphs}
    except torch.OutOfMemoryError:
        return case | {"skipped": "out of memory"}


def weight_bytes(model: Any) -> int:
    """Bytes of weights, buffers and gradients."""
    tensors = [*model.parameters(), *model.buffers(), *(weight.grad for weight in model.parameters())]
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


# --- all cases ---------------------------------------------------------------------------------------------------


def cases(device: str) -> Iterator[dict[str, Any]]:
    """Run all cases: on a GPU in this process, which is slow to start; on a CPU each in its own."""
    for what, longest in LONGEST[device].items():
        for name in MODELS:
            model = build(name, device, longest) if device == "cuda" else None
            if name == RECURRENT and WARM_UP[device][0]:
                warm = make_job(name, what, model, device, longest)
                for _ in range(WARM_UP[device][0]):
                    warm()
            expected = 0.0  # bytes per word in the previous case, if memory grows with them
            for words in (count for count in WORDS if count <= longest):
                if device == "cpu" and expected * words > LIMIT_GB * 1e9:
                    reason = f"about {expected * words / 1e9:.2g} GB expected, the limit is {LIMIT_GB:g} GB"
                    yield {"what": what, "model": name, "words": words, "tokens": length(words), "skipped": reason}
                    continue
                case = time_and_watch(name, what, words) if model is None else measure(name, what, words, device, model)
                expected = 0.0 if name == RECURRENT else case.get("peak_bytes", 0) / words
                yield case
            del model
            gc.collect()


def time_and_watch(name: str, what: str, words: int) -> dict[str, Any]:
    """Run one case on a CPU twice: for its time, and for its peak memory with the slower malloc settings."""
    arguments = ("--device", "cpu", "--case", name, what, str(words))
    timed, watched = (run_case(__file__, *arguments, env=QUIET | malloc) for malloc in ({}, MALLOC))
    return timed | {"peak_bytes": watched["peak_bytes"]}


def run(device: str, out: Path) -> None:
    import torch

    from carryforward.utils.provenance import provenance

    precision = "bfloat16 autocast" if device == "cuda" else "float32"
    config = SHAPES[device] | {"window": WINDOW, "question": QUESTION, "batch": 1, "tokens_a_word": TOKENS_A_WORD}
    config["threads"] = torch.get_num_threads()
    report = {**provenance(device), "seed": 0, "precision": precision, "config": config}
    with collect_cases(out, report) as add:
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
    measured = {(case["what"], case["model"], case["words"]): case for case in report["cases"]}
    for what, words in dict.fromkeys((what, words) for what, _, words in measured):
        cells = [_cells(measured.get((what, name, words), {"skipped": "not run"})) for name in MODELS]
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
                cases = [case for case in report["cases"] if (case["what"], case["model"]) == (what, name)]
                points = [(case["words"], case[field] / unit) for case in cases if field in case]
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
    parser.add_argument(
        "--case", nargs=3, metavar=("MODEL", "WHAT", "WORDS"), help="run one case and print it as a line of JSON"
    )
    arguments = parse_arguments(parser)
    if arguments.case:
        name, what, words = arguments.case
        print(json.dumps(measure(name, what, int(words), arguments.device)))
    else:
        run(arguments.device, arguments.out or RESULTS / f"answering-{arguments.device}.json")


if __name__ == "__main__":
    main()
