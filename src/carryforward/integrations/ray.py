# SPDX-License-Identifier: Apache-2.0
"""Ray Data: embed or score a corpus of any size, on any number of machines, with one model in each actor.

    ray.data.read_parquet("texts/").map_batches(
        Embed, fn_constructor_kwargs={"model": "my-model"}, batch_format="pyarrow", batch_size=64, concurrency=8,
        num_cpus=0, num_gpus=1,
    ).write_parquet("vectors/")

An actor takes a core by default. On a machine with few cores `num_cpus=0` leaves them to reading and writing, which
would otherwise wait for a core forever.
Rows are documents. A state passes through a whole document and never into another, so rows may come in any order.
Batches are tables of pyarrow: columns keep their types, and the new ones are ordinary columns of Parquet.
"""

from typing import Any

import numpy as np

from ..data.texts import count_text
from ..data.tokenization import tokenise_texts
from ..embeddings.encode import encode
from ..evaluation.token_losses import token_losses
from ..models.base import RecurrentPreTrainedModel
from ..models.loading import load_causal, load_recurrent, usable_device
from ..utils.checks import check_flag
from ..utils.install import install_hint


def _texts(table: Any, column: str) -> list[str]:
    """The texts of a batch."""
    if not hasattr(table, "column_names"):
        raise ValueError(f'the batch is a {type(table).__name__}: give map_batches batch_format="pyarrow".')
    if column not in table.column_names:
        raise ValueError(f"there is no column {column!r} (there are: {', '.join(table.column_names)}).")
    return table[column].to_pylist()


def _arrow() -> Any:
    try:
        import pyarrow
    except ImportError as error:
        raise ValueError(f"Ray Data needs pyarrow: {install_hint('ray')}") from error
    return pyarrow


class Embed:
    """For `map_batches`: adds a column with a vector for each document, as `carryforward.encode` computes it.

    The vectors are those of one process. Documents that share a batch are padded to one length, and Ray may put others
    together: that changes results by rounding only.
    """

    def __init__(
        self,
        model: str,
        *,
        text_column: str = "text",
        vector_column: str = "vector",
        device: str | None = None,
        window: int | None = None,
        use_state: bool | None = None,
        **options: Any,
    ):
        """
        Args:
            model: a recurrent model, or a plain encoder, whose windows are then independent: a folder that every
                machine has, or a name on the Hub.
            device: by default the GPU that Ray gives the actor (`num_gpus=1`), or the CPU.
            window: tokens per window, of plain models.
            use_state: False removes the state; by default it is used if it was trained.
            **options: other arguments of `carryforward.encode`: pooling, overlap, batch_size.
        """
        loaded = load_recurrent(model, window=window, device=device)
        self.model, self.tokenizer = loaded.model, loaded.tokenizer
        self.text_column, self.vector_column = text_column, vector_column
        self.options = {"use_state": not loaded.untrained if use_state is None else use_state, **options}
        if options.get("output", "document") != "document":
            raise ValueError(f"output={options['output']!r}: a row gets one vector. Leave it out, or use `embed`.")
        encode(self.model, [], self.tokenizer, **self.options)  # raises for bad arguments before the first batch

    def __call__(self, table: Any) -> Any:
        """The table with a column of vectors, lists of float32."""
        texts = _texts(table, self.text_column)
        vectors = encode(self.model, texts, self.tokenizer, progress=_silent, **self.options)
        borders = np.arange(len(vectors) + 1, dtype=np.int32) * vectors.shape[1]
        column = _arrow().ListArray.from_arrays(borders, vectors.astype(np.float32).reshape(-1))
        return table.append_column(self.vector_column, column)


class Score:
    """For `map_batches`: adds the sums of each document's likelihood, from which the perplexity of any set of documents
    is computed: sums first, the ratio last.

    Columns: `nats` (summed negative log-likelihood), `scored_tokens`, `words` and `bytes` of the text. Word perplexity
    is exp(sum of nats / sum of words).
    """

    def __init__(
        self,
        model: str,
        *,
        text_column: str = "text",
        device: str | None = None,
        overlap: int | None = None,
        use_state: bool = True,
        batch_size: int = 8,
    ):
        """
        Args:
            model: a recurrent causal language model: a folder that every machine has, or a name on the Hub.
            overlap: tokens that consecutive windows share; by default that of the config.
            use_state: False removes the state: the control.
            batch_size: documents that are read together.
        """
        check_flag("use_state", use_state)
        loaded = load_causal(model)
        if not isinstance(loaded.model, RecurrentPreTrainedModel):
            raise ValueError(f"{model} is a plain model: make it recurrent with `carryforward add` or `train`.")
        self.model: Any = loaded.model.to(usable_device(device)).eval()  # type: ignore[arg-type]
        self.tokenizer, self.text_column = loaded.tokenizer, text_column
        self.options: dict[str, Any] = {"overlap": overlap, "use_state": use_state, "batch_size": batch_size}
        token_losses(self.model, [], **self.options)  # raises for bad arguments before the first batch

    def __call__(self, table: Any) -> Any:
        """The table with the columns of sums."""
        texts = _texts(table, self.text_column)
        ids = [token_ids for token_ids, _ in tokenise_texts(self.tokenizer, texts, offsets=False)]
        losses = token_losses(self.model, ids, **self.options)
        counts = [count_text(text) for text in texts]
        columns = {
            "nats": np.array([np.nansum(loss) for loss in losses], dtype=np.float64),
            "scored_tokens": np.array([max(len(loss) - 1, 0) for loss in losses], dtype=np.int64),
            "words": np.array([words for words, *_ in counts], dtype=np.int64),
            "bytes": np.array([size for _, size, _ in counts], dtype=np.int64),
        }
        for name, values in columns.items():
            table = table.append_column(name, _arrow().array(values))
        return table


def _silent(done: int, total: int | None) -> None:
    """No progress bar: Ray shows its own."""
