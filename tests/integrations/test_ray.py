# SPDX-License-Identifier: Apache-2.0
"""Ray Data on this machine: the vectors and sums of one process, from Parquet to Parquet, in bounded memory."""

import math
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from helpers import jobs, prose

import carryforward as cf
from carryforward.integrations.ray import Embed, Score
from carryforward.models.loading import load_causal

EXAMPLE = Path(__file__).parents[2] / "examples" / "embed_with_ray.py"
TEXTS = [topic[: 30 + 41 * i] for i, topic in enumerate(prose.TOPICS[:14])]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    return jobs.prepare(tmp_path_factory.mktemp("home"))


@pytest.fixture
def parquet():
    return pytest.importorskip("pyarrow.parquet", reason="make test-all: it installs pyarrow")


def write_corpus(parquet, folder, texts, **columns):
    """Parquet files of four documents each."""
    import pyarrow

    folder.mkdir()
    for start in range(0, len(texts), 4):
        part = {name: values[start : start + 4] for name, values in {"text": texts, **columns}.items()}
        ids = [f"doc {i}" for i in range(start, start + len(part["text"]))]
        parquet.write_table(pyarrow.table({"id": ids, **part}), folder / f"{start:03}.parquet")


def by_id(parquet, folder):
    return {row["id"]: row for row in parquet.read_table(folder).to_pylist()}


# --- a batch, without Ray --------------------------------------------------------------------------------------------


def test_a_batch_gets_vectors_and_sums(home, parquet):
    import pyarrow

    model, tokenizer = (loaded := load_causal(str(home / "recurrent"))).model, loaded.tokenizer
    table = pyarrow.table({"id": range(len(TEXTS)), "text": TEXTS})
    embedded = Embed(str(home / "recurrent"), batch_size=3)(table)
    assert embedded.column_names == ["id", "text", "vector"]
    expected = cf.encode(model, TEXTS, tokenizer, batch_size=3)
    np.testing.assert_array_equal(np.stack(embedded["vector"].to_pylist()).astype(np.float32), expected)
    scored = Score(str(home / "recurrent"), overlap=1)(table)
    documents = [tokenizer(text)["input_ids"] for text in TEXTS]
    whole = cf.perplexity(model, documents, overlap=1)
    assert sum(scored["nats"].to_pylist()) == pytest.approx(whole.nats, rel=1e-6)
    assert sum(scored["scored_tokens"].to_pylist()) == whole.tokens
    assert scored["words"].to_pylist() == [len(text.split()) for text in TEXTS]
    assert scored["bytes"].to_pylist() == [len(text.encode()) for text in TEXTS]
    alone = cf.perplexity(model, documents[5:6], overlap=1, use_state=False)
    control = Score(str(home / "recurrent"), overlap=1, use_state=False)(table)
    assert control["nats"][5].as_py() == pytest.approx(alone.nats, rel=1e-6)
    assert abs(control["nats"][5].as_py() - scored["nats"][5].as_py()) > 1e-3


def test_wrong_arguments_are_refused_before_the_first_batch(home, parquet):
    import pyarrow

    recurrent = str(home / "recurrent")
    for make, message in (
        (lambda: Embed(recurrent, pooling="sum"), "pooling='sum'"),
        (lambda: Embed(recurrent, output="tokens"), "a row gets one vector"),
        (lambda: Score(str(home / "model")), "is a plain model"),
        (lambda: Score(recurrent, overlap=99), "overlap=99"),
        (lambda: Embed(recurrent)(pyarrow.table({"body": ["a"]})), "no column 'text' (there are: body)"),
        (lambda: Embed(recurrent)({"text": np.array(["a"])}), 'batch_format="pyarrow"'),
    ):
        with pytest.raises(ValueError, match=re.escape(message)):
            make()


# --- Ray -------------------------------------------------------------------------------------------------------------


def run_with_ray(script, *arguments):
    """Run a script in a process of its own, which ends Ray with it."""
    pytest.importorskip("ray.data", reason="make test-all: it installs Ray Data")
    command = [sys.executable, *([script] if isinstance(script, Path) else ["-c", textwrap.dedent(script)])]
    done = subprocess.run([*command, *map(str, arguments)], capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_two_actors_give_the_vectors_of_one_process(home, parquet, tmp_path):
    write_corpus(parquet, tmp_path / "texts", TEXTS)
    run_with_ray(EXAMPLE, home / "recurrent", tmp_path / "texts", tmp_path / "vectors")
    found = by_id(parquet, tmp_path / "vectors")
    loaded = load_causal(str(home / "recurrent"))
    expected = cf.encode(loaded.model, TEXTS, loaded.tokenizer)
    assert [*found]
    assert found.keys() == {f"doc {i}" for i in range(len(TEXTS))}
    for i, vector in enumerate(expected):
        np.testing.assert_allclose(found[f"doc {i}"]["vector"], vector, rtol=1e-4, atol=1e-5)


STREAM = """
    import sys
    import ray
    from carryforward.integrations.ray import Score

    class WithoutPayload(Score):
        def __call__(self, table):
            return super().__call__(table).drop_columns(["payload"])

    model, texts, out, limit, spill = sys.argv[1:]
    ray.init(
        num_cpus=2, object_store_memory=int(limit), object_spilling_directory=spill, include_dashboard=False
    )
    documents = ray.data.read_parquet(texts, override_num_blocks=40)  # a task for each file, begun as memory allows
    scored = documents.map_batches(
        WithoutPayload, fn_constructor_kwargs={"model": model}, batch_format="pyarrow", batch_size=4, concurrency=2,
        num_cpus=0,
    )
    scored.write_parquet(out)
    print(int(ray.cluster_resources()["object_store_memory"]))
"""


@pytest.mark.slow
def test_a_corpus_larger_than_memory_streams(home, parquet, tmp_path):
    """Rows with a payload of two megabytes, in all four times what the object store may hold. What Ray reads ahead and
    does not fit, it spills to disk."""
    limit, texts = 80 << 20, [TEXTS[i % len(TEXTS)] for i in range(160)]
    random = np.random.default_rng(0)
    payload = [random.bytes(2 << 20) for _ in texts]
    write_corpus(parquet, tmp_path / "texts", texts, payload=payload)
    spill = tmp_path / "spilled"
    output = run_with_ray(STREAM, home / "recurrent", tmp_path / "texts", tmp_path / "scores", limit, spill)
    assert int(output.splitlines()[-1]) <= limit
    assert sum(map(len, payload)) >= 4 * limit
    rows = by_id(parquet, tmp_path / "scores")
    assert len(rows) == len(texts)
    loaded = load_causal(str(home / "recurrent"))
    whole = cf.perplexity(loaded.model, [loaded.tokenizer(text)["input_ids"] for text in texts])
    assert math.fsum(row["nats"] for row in rows.values()) == pytest.approx(whole.nats, rel=1e-6)
    assert sum(row["words"] for row in rows.values()) == sum(len(text.split()) for text in texts)
