# SPDX-License-Identifier: Apache-2.0
"""Run the code and the commands of a page of the documentation, from top to bottom.

What a page takes as given (a model's folder, a corpus, the name `tokenizer`) is made when the page first names it: tiny
models under the names of real ones, a few texts. Only sizes are changed, by `SIZES`. What cannot run is in `NEEDS`.
"""

import ast
import builtins
import contextlib
import io
import json
import re
import shlex
from pathlib import Path

import torch
import transformers as hf

import carryforward as cf
from helpers import prose
from helpers.cli_runner import invoke

SIZES = [  # pattern, replacement: as printed but for these
    (r"(max_new_tokens=|--max-new-tokens )[\d_]+", r"\g<1>8"),
    (r"(contexts=|--contexts )\d+", r"\g<1>8"),
    (r"(--steps |steps=)\d+", r"\g<1>2"),
    (r"(carryforward (?:topics|samples) )", r"\1--topics 3 "),
    (r"(count_words\(texts\), )20", r"\g<1>3"),
    (r"(qa join )", r"\1--test-questions 6 --validation-questions 3 "),
    (r'reach="50MB"', 'reach="500KB"'),
    (r"wikitext-103", "books/"),  # which must be downloaded
    (r"(memory-tasks (?:retrieval|copy|facts) )", r"\1--steps 2 "),
]
NEEDS = {  # pattern of a block, or of a line of commands: why it is not run
    r"lm[-_]eval": "lm-eval and the corpora",
    r"SFTTrainer": "trl, see tests/integrations",
    r"ray\.data": "GPUs, see tests/integrations",
    r"BitsAndBytesConfig": "bitsandbytes, see tests/models/test_quantized.py",
    r"fully_shard": "several processes, see tests/training",
    r"LoraConfig": "a longer example, see tests/training",
    r"revision=": "the Hub",
    r"^(torchrun|accelerate launch|python benchmarks/|pip install)": "another program",
    r"memory-tasks (facts|passkey)": "long texts, see tests/tasks",
}
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def unrunnable(text: str) -> bool:
    return any(re.search(pattern, text, re.MULTILINE) for pattern in NEEDS)


def packages(page: Path) -> set[str]:
    """The packages that the page's code imports."""
    trees = [
        ast.parse(text) for kind, text in BLOCK.findall(page.read_text()) if kind == "python" and not unrunnable(text)
    ]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


def run_page(page: Path) -> tuple[int, int]:
    """Run a page in the current folder. Returns the numbers of code blocks and of commands that ran."""
    names: dict = {"__name__": "__main__", "cf": cf}
    blocks = commands = 0
    for language, text in BLOCK.findall(page.read_text()):
        for pattern, size in SIZES:
            text = re.sub(pattern, size, text)
        if language == "python" and not unrunnable(text):
            run_code(text, names)
            blocks += 1
        for line in text.splitlines() if not language else ():
            if re.search(r"(^|\| )carryforward ", line) and not unrunnable(line):
                run_command(line)
                commands += 1
    return blocks, commands


def run_code(code: str, names: dict) -> None:
    nodes = [node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Name)]
    stored = {node.id for node in nodes if isinstance(node.ctx, ast.Store)}
    give_paths(code)
    for name in {node.id for node in nodes} - stored - names.keys() - set(dir(builtins)):
        if name in NAMES:
            names[name] = NAMES[name]()
    with contextlib.redirect_stdout(io.StringIO()):
        exec(code, names)


def run_command(line: str) -> None:
    give_paths(line)
    first, _, piped = line.rpartition(" | ")
    result = invoke(*shlex.split(piped.removeprefix("carryforward "), comments=True), stdin=first and read_piped(first))
    assert result.exit_code == 0, f"{line}\n{result.stderr}\n{result.exception!r}"


def read_piped(command: str) -> str:
    program, file = shlex.split(command)
    assert program == "cat", f"{command}: only cat is known"
    return Path(file).read_text()


# --- what pages take as given --------------------------------------------------------------------------------------


def give_paths(text: str) -> None:
    """Make what a text names and does not write itself."""
    written = re.findall(r"(?:--out|--state-out|save_pretrained\(|save\(|Arguments\()[ \"']*([\w./-]+)", text)
    for name, make in PATHS.items():
        named = re.search(rf"(?<![\w/.-]){re.escape(name)}(?![\w.-])", text)
        if named and not Path(name).exists() and written[:1] != [name]:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            make(Path(name))


def causal(folder: Path) -> None:
    torch.manual_seed(0)
    shape = {
        "vocab_size": len(prose.encoder_tokenizer()),
        "n_positions": 1024,
        "n_embd": 16,
        "n_layer": 12,
        "n_head": 2,
    }
    hf.GPT2LMHeadModel(hf.GPT2Config(**shape, bos_token_id=0, eos_token_id=0)).save_pretrained(folder)
    prose.tokenizer().save_pretrained(folder)


def encoder(folder: Path, head: str = "ForMaskedLM") -> None:
    torch.manual_seed(0)
    tokenizer = prose.encoder_tokenizer()
    tokenizer.model_max_length = 512
    config = hf.BertConfig(
        vocab_size=len(tokenizer), hidden_size=16, num_hidden_layers=6, num_attention_heads=2, intermediate_size=32,
        max_position_embeddings=512, pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    getattr(hf, f"Bert{head}")(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def recurrent(folder: Path, base=causal, head: str | None = None, **fields) -> None:
    base(folder.with_name(folder.name + "-base"))
    model = cf.add_recurrence(str(folder.with_name(folder.name + "-base")), head=head, documents=TEXTS, **fields)
    model.save_pretrained(folder)


def classifier(folder: Path) -> None:
    recurrent(folder, lambda path: encoder(path, "ForSequenceClassification"), "text-classification")
    config = json.loads((folder / "config.json").read_text())
    labels = {"id2label": {"0": "even", "1": "odd"}, "label2id": {"even": 0, "odd": 1}}
    (folder / "config.json").write_text(
        json.dumps({**config, "base_config": {**config["base_config"], **labels}, **labels})
    )


def finder(folder: Path) -> None:
    recurrent(folder, lambda path: encoder(path, "ForQuestionAnswering"), "question-answering")


def tagger(folder: Path) -> None:
    recurrent(folder, lambda path: encoder(path, "ForTokenClassification"), "token-classification")


def books(folder: Path) -> None:
    for split in ("train", "validation", "test"):
        (folder / split).mkdir(parents=True)
        for number, text in enumerate(prose.TOPICS[:30]):
            (folder / split / f"{number}.txt").write_text(text[:2_000])


def rows(path: Path, make_row, texts=None) -> None:
    path.write_text("".join(json.dumps(make_row(number, text)) + "\n" for number, text in enumerate(texts or SHORT)))


def reviews(path: Path) -> None:
    rows(path, lambda number, text: {"text": text[:300], "label": "odd" if number % 2 else "even"})


def documents(path: Path) -> None:
    rows(path, lambda number, text: {"id": f"doc {number}", "text": text, "passages": [[0, 120], [120, 300]]}, TEXTS)


def entities(folder: Path) -> None:
    folder.mkdir()
    for split in ("train", "validation"):
        rows(folder / f"{split}.jsonl", lambda number, text: {"tokens": text.split()[:40], "labels": ["O", "X"] * 20})


def questions(path: Path) -> None:
    """A question on each text, whose answer is its first word."""
    data = []
    for number, text in enumerate(SHORT):
        answers = [{"text": text.split()[0], "answer_start": text.index(text.split()[0])}]
        asked = [{"id": f"{path.stem}-{number}", "question": "What is it?", "answers": answers}]
        data.append({"title": f"{number}", "paragraphs": [{"context": text, "qas": asked}]})
    path.write_text(json.dumps({"version": "1.1", "data": data}))


def pipeline(folder: Path) -> None:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.sentence_transformer.modules import Pooling

    give_paths("my-model")
    module = cf.RecurrentTransformer("my-model")
    SentenceTransformer(modules=[module, Pooling(module.get_embedding_dimension())]).save(str(folder))


def one_text(path: Path) -> None:
    path.write_text(TEXTS[0])


def parquet(path: Path) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": [str(number) for number in range(len(TEXTS))], "body": TEXTS}), path)


SHORT = [text[:900] for text in prose.TOPICS if len(text.split()) > 200][:60]
TEXTS = [text[:3_000] for text in prose.TOPICS if len(text) >= 3_000][:4]
VECTORS = cf.VectorMemoryConfig(pooled_layers="below", residual=True)  # which need no training
_RECURRENT = ("runs/recurrent", "runs/books", "runs/wt103", "smollm2-recurrent")
PATHS = {
    **dict.fromkeys(("gpt2", "HuggingFaceTB/SmolLM2-135M", "runs/plain", "runs/baseline"), causal),
    **dict.fromkeys(("bert-base-uncased", "roberta-base", "runs/bert"), encoder),
    "path/to/all-MiniLM-L6-v2": lambda folder: encoder(folder, "Model"),
    **dict.fromkeys(_RECURRENT, lambda folder: recurrent(folder, window=300)),
    "my-model": lambda folder: recurrent(folder, window=300, memory=[cf.KVMemoryConfig(recent=100), VECTORS]),
    "my-encoder": lambda folder: recurrent(folder, lambda path: encoder(path, "Model")),
    "my-pipeline": pipeline, "my-finder": finder, "runs/qa": finder, "my-tagger": tagger,
    "runs/reviews": classifier,
    "books/": books, "books.parquet": parquet, "docs.jsonl": documents, "reviews.jsonl": reviews, "entities/": entities,
    **dict.fromkeys(("train-v1.1.json", "dev-v1.1.json", "amazon.json", "reddit.json", "wiki.json"), questions),
    **dict.fromkeys(("book.txt", "report.txt", "chapter-1.txt", "examples/the_ferry_at_halden.txt"), one_text),
}  # fmt: skip


def loaded(name: str, cls=hf.AutoModelForCausalLM):
    give_paths(name)
    return cls.from_pretrained(name)


def ids(count: int = 700) -> torch.Tensor:
    return torch.tensor([prose.tokenizer()(prose.TOPICS[9])["input_ids"][:count]])


NAMES = {
    "base": lambda: loaded("gpt2"),
    "model": lambda: loaded("my-model"),
    "encoder": lambda: loaded("bert-base-uncased", hf.AutoModel),
    "classifier": lambda: cf.add_recurrence(
        loaded("bert-base-uncased", hf.AutoModelForSequenceClassification), tokenizer=prose.encoder_tokenizer()
    ),
    "tokenizer": prose.encoder_tokenizer,  # the models have its vocabulary
    "text": lambda: TEXTS[0],
    "text_of_any_length": lambda: TEXTS[0],
    "texts": lambda: [text[:2_000] for text in prose.TOPICS if len(text) > 1_000][:30],
    "documents": lambda: [tokens[0] for tokens in ids().split(350, dim=1)],
    "input_ids": ids, "prompt": ids, "mask": lambda: torch.ones_like(ids()),
    "pieces": lambda: ids().split(100, dim=1),
    "starts": lambda: torch.tensor([3]), "ends": lambda: torch.tensor([5]),
    "AutoModelForMaskedLM": lambda: hf.AutoModelForMaskedLM,
}  # fmt: skip
