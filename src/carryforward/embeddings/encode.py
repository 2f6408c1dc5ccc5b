# SPDX-License-Identifier: Apache-2.0
"""Contextual embeddings of whole documents: a vector per token, chunk, window or document, as NumPy arrays.

Each document is read once, window by window, and the state is carried from window to window. Documents of similar
length share a batch, and a call reads a few windows. Memory therefore depends neither on the length of the
documents nor, for vectors of documents and chunks, on the number of tokens.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..backbones.modes import eval_mode
from ..data.samples import pad
from ..data.tokenization import check_text, check_tokenizer
from ..evaluation.streaming import Piece, stream_documents
from ..models import argument_checks
from ..models.headless import RecurrentModel
from ..models.outputs import RecurrentOutput
from ..state import State
from ..utils.checks import check_callable, check_count, check_flag
from ..utils.progress import ProgressBar, ProgressCallback
from .chunks import ChunkVectors, Document, Spans, check_chunks, tokenise_documents
from .modules import EmbeddingModules, load_embedder
from .pooling import Collector, FinalState, Pooled, TokenList, WindowStates, normalized
from .readers import Share, reader_of

logger = logging.getLogger(__name__)

Output = Literal["document", "chunks", "tokens", "windows"]
Pooling = Literal["mean", "max", "cls", "state"]
WINDOWS_PER_CALL = 8  # of each document; affects only speed


@dataclass(frozen=True)
class TokenVectors:
    """The vectors of one document's N tokens.

    Attributes:
        vectors: one vector per token, without special tokens, [N, k].
        offsets: the characters [from, to) of each token in the text, [N, 2].
    """

    vectors: np.ndarray
    offsets: np.ndarray


def encode(
    model: PreTrainedModel | str | Path,
    texts: Iterable[str],
    tokenizer: Any = None,
    *,
    output: str = "document",
    chunks: int | Spans | None = None,
    pooling: str | None = None,
    special_tokens: bool | None = None,
    normalize: bool | None = None,
    prompt: str | None = None,
    overlap: int | None = None,
    use_state: bool = True,
    batch_size: int = 8,
    progress: ProgressCallback | None = None,
) -> Any:
    """Embed documents of any length.

    Args:
        model: a recurrent model; its head, if it has one, is not used. Or a plain encoder, whose windows are
            independent. Or the name of either, which is then loaded, on the GPU if there is one: what a folder of
            sentence-transformers says is the default of `pooling`, `special_tokens`, `normalize`, `prompt`, and of a
            plain model's window.
        texts: the documents.
        tokenizer: the model's tokenizer, unless the model is named; a fast one for chunks and tokens, which need
            offsets. The model adds special tokens.
        output: "document" returns one vector per document, [documents, k]; "chunks" a list of `ChunkVectors`; "tokens"
            a list of `TokenVectors`; "windows" a list of the vectors that windows pass to the next:
            [windows - 1, states, slots, k] with the memory "vector", [windows - 1, memory tokens, k] with "tokens".
        chunks: for the output "chunks", the number of tokens of a chunk, or for each text its spans of characters,
            [start, stop). A token belongs to every span that contains its last character. A span without tokens has the
            vector zero.
        pooling: the vector of a document or chunk: "mean" (the default) or "max" of its token vectors; "cls", the mean
            of the first special token's vector in the windows of its tokens; or for documents "state", the state
            after its last window, with all its vectors concatenated. A last window that is not full is pooled over the
            tokens it has. The vector of an empty document is zero.
        special_tokens: pool the windows' special tokens too, shared out evenly among the tokens of each window.
        normalize: give all vectors unit length.
        prompt: a text to put in front of each document, or the name of one of the named model's prompts. Its tokens are
            part of a document, but not of chunks, and have no token vectors.
        overlap: tokens that consecutive windows share; by default that of the config. A token's vector comes from the
            window in which it is farthest from an edge (encoders) or has the most context (causal models).
        use_state: False removes the state: every window is read on its own, as by the base model.
        batch_size: documents in a batch.
        progress: called with the number of tokens read so far and in total; None shows a bar on a terminal.
    """
    check_count("batch_size", batch_size)
    for name, flag in (("special_tokens", special_tokens), ("normalize", normalize), ("use_state", use_state)):
        check_flag(name, flag, optional=name != "use_state")
    check_callable("progress", progress, optional=True)
    if prompt is not None:
        check_text("prompt", prompt)
    model, tokenizer, modules, plain = _loaded(model, tokenizer)
    how = modules.choose(pooling, special_tokens, normalize, prompt)
    share = check_choices(output, how["pooling"], how["special_tokens"])
    texts = _check_texts(texts)
    check_chunks(chunks, output, texts)
    reader, carries = reader_of(model, tokenizer, share)
    carries = carries and not plain
    states_only = output == "document" and how["pooling"] == "state"
    _check_state(reader, output, states_only, use_state, carries)
    overlap = argument_checks.check_overlap(reader.config, overlap)
    check_tokenizer(tokenizer, reader._vocabulary)
    documents = tokenise_documents(tokenizer, texts, how["prompt"], offsets=output in ("chunks", "tokens"))
    if any(not len(document.ids) for document in documents):
        logger.warning("%d documents have no tokens.", sum(not len(document.ids) for document in documents))
    layouts = _layouts(documents, output, chunks)
    collectors = [_collector(reader, output, how["pooling"], ranges) for ranges, _ in layouts]
    pieces = _read(
        reader, [document.ids for document in documents], overlap=overlap, use_state=use_state and carries,
        batch_size=batch_size, windows_per_call=1 if output == "windows" else WINDOWS_PER_CALL,
        states_only=states_only,
    )  # fmt: skip
    bar = ProgressBar("embedding", sum(len(one.ids) for one in documents), "tokens", library=True, callback=progress)
    with bar, eval_mode(reader), torch.inference_mode():
        for document, count, vectors, state, row in pieces:
            collectors[document].add(vectors, state, row)
            bar.advance(count)
    results = [collector.result() for collector in collectors]
    results = [normalized(result) for result in results] if how["normalize"] else results
    if output == "chunks":
        return [ChunkVectors(vectors, spans) for vectors, (_, spans) in zip(results, layouts, strict=True)]
    if output == "tokens":
        return [_own_tokens(vectors, document) for vectors, document in zip(results, documents, strict=True)]
    if output == "windows":
        return results
    nothing = _collector(reader, output, how["pooling"], np.zeros((0, 2), np.int64)).result()[:0]
    return np.concatenate([nothing, *results])


def _loaded(model: Any, tokenizer: Any) -> tuple[PreTrainedModel, Any, EmbeddingModules, bool]:
    """The model, its tokenizer, what it says about vectors, and whether it was loaded by name and is plain."""
    if not isinstance(model, str | Path):
        if tokenizer is None:
            raise ValueError("tokenizer is missing: give the model's own, or name the model instead.")
        return model, tokenizer, EmbeddingModules(), False
    if tokenizer is not None:
        raise ValueError(f"tokenizer is given, and the model {str(model)!r} has its own. Leave it out.")
    loaded, modules = load_embedder(str(model))
    return loaded.model, loaded.tokenizer, modules, loaded.untrained


def _check_texts(texts: Any) -> list[str]:
    if isinstance(texts, str) or not isinstance(texts, Iterable):
        kind = "one string" if isinstance(texts, str) else f"of type {type(texts).__name__}"
        raise ValueError(f"texts is {kind}: give a list of documents.")
    texts = list(texts)
    for i, text in enumerate(texts):
        check_text(f"texts[{i}]", text)
    return texts


def check_choices(output: str, pooling: str, special_tokens: bool) -> Share | None:
    """Raise ValueError for an unknown output or pooling, or two that exclude each other. Returns how special tokens are
    shared out."""
    for name, value, choices in (("output", output, get_args(Output)), ("pooling", pooling, get_args(Pooling))):
        if value not in choices:
            raise ValueError(f"{name}={value!r} must be one of {', '.join(map(repr, choices))}.")
    if output == "chunks" and pooling == "state":
        raise ValueError('pooling="state": a chunk has no state of its own. Use pooling="mean" for chunks.')
    if special_tokens and pooling == "state":
        raise ValueError('special_tokens=True: pooling="state" pools no tokens. Leave one out.')
    if output in ("tokens", "windows"):
        return None
    if pooling == "cls":
        return "cls"
    return pooling if special_tokens else None  # type: ignore[return-value]


def _check_state(reader: RecurrentModel, output: str, states_only: bool, use_state: bool, carries: bool) -> None:
    """Raise ValueError if the result would depend on states and there are none, or they mean nothing."""
    windows = output == "windows"
    argument, instead = ('output="windows"', 'output="tokens"') if windows else ('pooling="state"', 'pooling="mean"')
    kind, untrained = reader.memory.vector_kind, reader.untrained_memories
    if not windows and not states_only:
        if use_state and carries and untrained:
            raise ValueError(
                f"the model's memory ({', '.join(untrained)}) is untrained, so vectors that it takes part in mean "
                "nothing. Train the model, or read without the state: use_state=False (--no-state)."
            )
        return
    if kind in untrained:
        raise ValueError(
            f"{argument}: the model's memory is untrained, so its states mean nothing. Train it, or use {instead}."
        )
    if not use_state:
        raise ValueError(f"{argument} needs the state, which use_state=False (--no-state) removes.")
    if kind is None:
        raise ValueError(
            f'the model carries {reader.config.recurrence.describe()}, not vectors. Use pooling="mean" or '
            'output="tokens", or train a model whose memory consists of vectors (--memory kv vector, --memory tokens).'
        )


def _layouts(
    documents: Sequence[Document], output: str, chunks: int | Spans | None
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The ranges of tokens that are pooled in each document, and the spans of its chunks."""
    if output != "chunks":
        return [(document.whole, document.whole) for document in documents]
    layouts = [
        document.chunks(chunks if isinstance(chunks, int) else chunks[i])  # type: ignore[index]
        for i, document in enumerate(documents)
    ]
    empty = sum(int((ranges[:, 0] == ranges[:, 1]).sum()) for ranges, _ in layouts)
    if empty:
        logger.warning("%d chunks have no tokens: their vectors are zero.", empty)
    return layouts


def _collector(reader: RecurrentModel, output: str, pooling: str, ranges: np.ndarray) -> Collector:
    if output == "tokens":
        return TokenList(reader)
    if output == "windows":
        return WindowStates(reader)
    return FinalState(reader) if pooling == "state" else Pooled(reader, ranges, pooling)


def _own_tokens(vectors: np.ndarray, document: Document) -> TokenVectors:
    """The vectors of a document's tokens, without those of the prompt."""
    assert document.offsets is not None, "tokenised with offsets"
    return TokenVectors(vectors[document.own :], document.offsets[document.own :].clip(0))


def _read(
    model: RecurrentModel,
    ids: list[np.ndarray],
    *,
    overlap: int,
    use_state: bool,
    batch_size: int,
    windows_per_call: int,
    states_only: bool,
) -> Iterator[tuple[int, int, Tensor, State, int]]:
    """Read documents piece by piece.

    Args:
        ids: the token ids of each document, [N].
        states_only: compute no token vectors; the last state of a document is then that of the whole document.

    Yields:
        For each piece: the index of its document, its number of tokens, the n token vectors that are complete with it,
        [n, k], on the model's device, and the state after it with the row of the document in it. The pieces of a
        document come in order.
    """
    lengths = [len(token_ids) for token_ids in ids]

    def read(piece: Piece, state: State | None) -> RecurrentOutput:
        batch = pad([torch.from_numpy(ids[i][a:b]) for i, (a, b) in zip(piece.documents, piece.spans, strict=True)])
        kwargs: dict[str, Any] = {
            **batch,
            # Given a state, special tokens at both ends of a text are read as they stand.
            "state": model.fresh_state(len(piece.documents), overlap) if state is None else state,
            "overlap": overlap,
            "use_state": use_state,
            "final": piece.final,
        }
        return RecurrentOutput(state=model.advance_state(**kwargs)) if states_only else model(**kwargs)

    recurrence = model.config.recurrence
    stride = recurrence.window - len(recurrence.prefix) - len(recurrence.suffix) - overlap
    for piece, out in stream_documents(
        read, lengths, stride=stride, overlap=overlap, windows_per_call=windows_per_call, batch_size=batch_size,
        separate_final=True, block_windows=model.block_size.windows(model, 1, use_state=use_state, logits=False),
        scans=use_state and recurrence.scans, group=recurrence.window_group if use_state else None,
    ):  # fmt: skip
        assert out.state is not None
        counts = [b - a for a, b in piece.spans]
        vectors = [torch.empty(0)] * len(counts) if states_only else _unpad(out, counts)
        for row, i in enumerate(piece.documents):
            yield i, counts[row], vectors[row], out.state, row


def _unpad(out: RecurrentOutput, counts: list[int]) -> list[Tensor]:
    """The vectors of each row without padding, [n, k]; n is the row's count, or what an encoder has emitted."""
    assert out.last_hidden_state is not None
    if out.emitted is not None:
        counts = (out.emitted[:, 1] - out.emitted[:, 0]).tolist()
    return [vectors[:count] for vectors, count in zip(out.last_hidden_state, counts, strict=True)]
