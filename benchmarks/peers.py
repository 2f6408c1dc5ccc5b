# SPDX-License-Identifier: Apache-2.0
"""Speed of other packages with models of the same shape. Packages that are not installed are skipped with a message.

pip install recurrent-memory-transformer-pytorch lm-eval      # carryforward itself does not need them
python benchmarks/peers.py                                    # writes results/peers-cpu.json
python benchmarks/peers.py --device cuda                      # Longformer only, with the widths of GPT-2 small
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measurements import RESULTS, Report
from steps import SHAPES, autocast, recurrent, recurrent_step, time_interleaved

SHAPE = SHAPES["bundled"]
BATCH, WINDOWS = 4, 8


def recurrent_memory_transformer(report: Report) -> None:
    """A training step over the same number of windows, one memory token; activations recomputed, and kept."""
    from recurrent_memory_transformer_pytorch import RecurrentMemoryTransformer, RecurrentMemoryTransformerWrapper

    torch.manual_seed(0)
    window = SHAPE["window"]
    inner = RecurrentMemoryTransformer(
        dim=SHAPE["n_embd"], num_tokens=SHAPE["vocab_size"], depth=SHAPE["n_layer"], heads=SHAPE["n_head"],
        dim_head=SHAPE["n_embd"] // SHAPE["n_head"], num_memory_tokens=1, seq_len=window, use_flash_attn=True,
        use_xl_memories=False, num_residual_streams=1, emb_gradient_frac=1.0,
    )  # fmt: skip
    model = RecurrentMemoryTransformerWrapper(inner)
    ids = torch.randint(SHAPE["vocab_size"], (BATCH, WINDOWS * window + 1))

    def kept() -> None:
        model.zero_grad()
        model(ids, return_loss=True)[0].backward()

    def recomputed() -> None:
        model.zero_grad()
        model(ids, memory_replay_backprop=True)

    sides: dict[str, Callable[[], object]] = {
        "Recurrent Memory Transformer, recomputed": recomputed,
        "ours, recomputed": recurrent_step("bundled", "cpu", BATCH, WINDOWS, "off", 0),
        "Recurrent Memory Transformer, kept": kept,
        "ours, kept": recurrent_step("bundled", "cpu", BATCH, WINDOWS, "off", WINDOWS),
    }
    recomputed(), kept()
    times = time_interleaved(sides, 5, BATCH * WINDOWS * window, "cpu")
    report.add({"row": "peer: training step", "shape": "bundled", "batch": BATCH, "windows": WINDOWS, "sides": times})


def rolling_likelihood(report: Report) -> None:
    """lm-eval's rolling log-likelihood of documents with a plain model, and ours with the same windows."""
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM

    import carryforward as cf
    from carryforward.data.corpora import open_corpus
    from carryforward.data.documents import load_documents

    model, tokenizer = cf.load_bundled()
    window = SHAPE["window"]
    texts = [text.text for text in open_corpus("python-docs", "validation")][:8]
    documents = load_documents("python-docs", "validation", tokenizer)[:8]
    tokens = int(documents.lengths.sum())
    theirs = HFLM(pretrained=model, tokenizer=tokenizer, max_length=window, batch_size=BATCH, device="cpu")
    requests = [Instance("loglikelihood_rolling", {}, (text,), 0) for text in texts]
    sides = {
        "lm-eval": partial(theirs.loglikelihood_rolling, requests, disable_tqdm=True),
        "ours, plain model": partial(cf.perplexity, model, documents, window=window, batch_size=BATCH),
        "ours, recurrent": partial(cf.perplexity, recurrent("bundled", "cpu").eval(), documents, batch_size=BATCH),
    }
    times = time_interleaved(sides, 3, tokens, "cpu")
    report.add({"row": "peer: scoring documents", "shape": "bundled", "batch": BATCH, "windows": None, "sides": times})


def longformer(report: Report, device: str = "cpu") -> None:
    """Hidden states of documents of 4,096 tokens: windows with a state, and local attention of the same width."""
    from transformers import BertConfig, BertModel, LongformerConfig, LongformerModel

    from carryforward import add_recurrence

    torch.manual_seed(0)
    name, batch = ("gpt2-small", 8) if device == "cuda" else ("bundled", 1)
    shape = SHAPES[name]
    common: dict[str, Any] = {
        "vocab_size": shape["vocab_size"], "hidden_size": shape["n_embd"], "num_hidden_layers": shape["n_layer"],
        "num_attention_heads": shape["n_head"], "intermediate_size": 4 * shape["n_embd"],
    }  # fmt: skip
    theirs = LongformerModel(LongformerConfig(**common, max_position_embeddings=4098, attention_window=256)).eval()
    bert = BertModel(BertConfig(**common), add_pooling_layer=False)
    ours = add_recurrence(bert, preset="paper", window=256, prefix=(), suffix=()).eval()
    ids = torch.randint(5, shape["vocab_size"], (batch, 4096), device=device)
    sides = {"Longformer": partial(theirs.to(device), ids), "ours": partial(ours.to(device), ids)}
    with torch.inference_mode(), autocast(device):
        for side in sides.values():
            side()
        times = time_interleaved(sides, 5, ids.numel(), device)
    report.add({"row": "peer: encoding 4,096 tokens", "shape": name, "batch": batch, "windows": None, "sides": times})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--out", type=Path, help="JSON to write (benchmarks/results/peers-DEVICE.json)")
    arguments = parser.parse_args()
    peers: dict[str, Callable[[Report], None]] = {
        "recurrent_memory_transformer_pytorch": recurrent_memory_transformer,
        "lm_eval": rolling_likelihood,
        "transformers": longformer,
    }
    if arguments.device == "cuda":
        peers = {"transformers": partial(longformer, device="cuda")}
    missing = [package for package in peers if find_spec(package) is None]
    out = arguments.out or RESULTS / f"peers-{arguments.device}.json"
    with Report(out, arguments.device, SHAPES, whole=not missing) as report:
        for package, peer in peers.items():
            if package in missing:
                print(f"{package} is not installed: skipped", file=sys.stderr)
            else:
                peer(report)


if __name__ == "__main__":
    main()
