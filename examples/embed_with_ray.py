# SPDX-License-Identifier: Apache-2.0
"""Embed a corpus of Parquet files with Ray Data, one model in each actor.

    python embed_with_ray.py MODEL TEXTS VECTORS

MODEL is a folder or Hub name of a recurrent model or an encoder, TEXTS a folder of Parquet files with a column "text",
VECTORS the folder to write. Needs `pip install ".[ray]"`.
"""

import sys

import ray

from carryforward.integrations.ray import Embed

model, texts, vectors = sys.argv[1:]
arguments = {"model": model, "batch_size": 8}
documents = ray.data.read_parquet(texts)
embedded = documents.map_batches(
    Embed, fn_constructor_kwargs=arguments, batch_format="pyarrow", batch_size=64, concurrency=2, num_cpus=0
)  # num_cpus=0 leaves the cores to reading and writing; with GPUs add num_gpus=1
embedded.write_parquet(vectors)
