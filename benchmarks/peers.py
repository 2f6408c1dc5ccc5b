# SPDX-License-Identifier: Apache-2.0
"""Speed of other packages and other attention with models of the same shape. Packages not installed are skipped.

pip install recurrent-memory-transformer-pytorch lm-eval      # carryforward itself does not need them
python benchmarks/peers.py                                    # writes results/peers-cpu.json
python benchmarks/peers.py --device cuda                      # Longformer and sliding-window attention, 6 minutes
python benchmarks/peers.py --device cuda --only sliding --lengths 4096
"""

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from cpu_limits import parse_arguments
from measurements import RESULTS, Report
from sliding_window import compare
from steps import SHAPES, autocast, free, recurrent, recurrent_step, time_interleaved

SHAPE = SHAPES["bundled"]
BATCH, WINDOWS = 4, 8


def recurrent_memory_transformer(report: Report, device: str = "cpu") -> None:
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


def rolling_likelihood(report: Report, device: str = "cpu") -> None:
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
    """Vectors of texts of 4,096 tokens, from text to array: our `encode`, and local attention of the same width."""
    from transformers import BertConfig, BertModel, LongformerConfig, LongformerModel

    from carryforward import add_recurrence, encode

    torch.manual_seed(0)
    name, batch, length = ("gpt2-small", 8, 4096) if device == "cuda" else ("bundled", 1, 4096)
    shape = SHAPES[name]
    common: dict[str, Any] = {
        "vocab_size": shape["vocab_size"], "hidden_size": shape["n_embd"], "num_hidden_layers": shape["n_layer"],
        "num_attention_heads": shape["n_head"], "intermediate_size": 4 * shape["n_embd"],
    }  # fmt: skip
    config = LongformerConfig(**common, max_position_embeddings=length + 2, attention_window=256)
    theirs = LongformerModel(config, add_pooling_layer=False).eval().to(device)
    tokenizer = number_tokenizer(shape["vocab_size"])
    ids = torch.randint(5, shape["vocab_size"], (batch, length)).tolist()
    texts = [" ".join(map(str, row)) for row in ids]
    measured_on = torch.randint(5, shape["vocab_size"], (1, 128 * 384)).tolist()  # position offsets

    def recurrent_bert(path: str, **fields: Any) -> Any:
        bert = BertModel(BertConfig(**common), add_pooling_layer=False)
        model = (
            add_recurrence(bert, window=256, prefix=(), suffix=(), documents=measured_on, **fields).eval().to(device)
        )
        model.fast_path = path
        model.config.initial_memory = {}  # as if trained: untrained vectors are refused
        return model

    models = {
        "ours, pooled vector": recurrent_bert("auto", preset="paper"),
        "ours, keys and values": recurrent_bert("auto"),
    }
    if device == "cuda":
        models["ours, keys and values, compiled"] = recurrent_bert("compiled")

    def local_attention() -> Any:
        read = torch.tensor(tokenizer(texts)["input_ids"], device=device)
        return theirs(read).last_hidden_state.float().mean(dim=1).cpu().numpy()

    sides: dict[str, Callable[[], Any]] = {"Longformer": local_attention}
    sides |= {side: partial(encode, model, texts, tokenizer, batch_size=batch) for side, model in models.items()}
    with torch.inference_mode(), autocast(device):
        for side in sides.values():
            for _ in range(4 if device == "cuda" else 1):
                assert side().shape == (batch, shape["n_embd"])
        times = time_interleaved(sides, 5, batch * length, device)
    report.add({"row": "peer: encoding 4,096 tokens", "shape": name, "batch": batch, "windows": None, "sides": times})


def number_tokenizer(vocabulary: int) -> Any:
    """A tokenizer whose words are the numbers of its tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    numbers = {"[UNK]": 0} | {str(number): number for number in range(1, vocabulary)}
    words = Tokenizer(models.WordLevel(numbers, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]")


# With the package that each needs, and the devices it runs on. On one H200: longformer 1 minute, sliding 5.
PEERS: dict[str, tuple[str, Callable[[Report, str], None], tuple[str, ...]]] = {
    "rmt": ("recurrent_memory_transformer_pytorch", recurrent_memory_transformer, ("cpu",)),
    "lm-eval": ("lm_eval", rolling_likelihood, ("cpu",)),
    "longformer": ("transformers", longformer, ("cpu", "cuda")),
    "sliding": ("transformers", compare, ("cpu", "cuda")),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--only", nargs="+", choices=PEERS, help="measure these rows only")
    parser.add_argument("--lengths", nargs="+", type=int, help="of texts, for sliding")
    parser.add_argument("--out", type=Path, help="JSON to write (benchmarks/results/peers-DEVICE.json)")
    args = parse_arguments(parser)
    chosen = [name for name in args.only or PEERS if args.device in PEERS[name][2]]
    missing = [name for name in chosen if find_spec(PEERS[name][0]) is None]
    out = args.out or RESULTS / f"peers-{args.device}.json"
    with Report(out, args.device, SHAPES, whole=not missing and not args.only and not args.lengths) as report:
        for name in chosen:
            package, peer, _ = PEERS[name]
            begin = time.perf_counter()
            if name in missing:
                print(f"{package} is not installed: skipped", file=sys.stderr)
            elif name == "sliding":
                compare(report, args.device, args.lengths)
            else:
                peer(report, args.device)
            free(args.device)
            print(f"{name}: {time.perf_counter() - begin:.0f} s", flush=True)


if __name__ == "__main__":
    main()
