# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward inspect`: a recurrent model and a text in, a page to look at out."""

from pathlib import Path
from typing import Any

from ..data import texts
from ..data.tokenization import Encoder
from ..models.loading import load_causal, need_state, usable_device
from ..utils import console
from ..utils.files import write_text
from ..utils.provenance import provenance
from .html_report import page
from .token_gains import inspect, summary


def write_page(
    name: str,
    source: str,
    out: Path,
    *,
    top: int = 5,
    overlap: int | None = None,
    max_tokens: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Write the page of a text; gives back the figures of the whole text.

    Args:
        source: a text file, or - for standard input.
        max_tokens: use only so many of the text's first tokens.
    """
    if source != "-" and out.exists() and out.samefile(source):
        raise ValueError(f"--out {out} is the text itself. Give the page another name.")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder. Give the name of a file, such as {out / 'report.html'}.")
    if max_tokens is not None and max_tokens < 1:
        raise ValueError(f"--max-tokens {max_tokens}: it must be at least 1.")
    title, text = _read(source)
    device = usable_device(device)
    need_state(name)
    loaded = load_causal(name)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)  # or what was read would have nowhere to go
    model: Any = loaded.model.to(device)  # type: ignore[arg-type]
    encoder = Encoder(loaded.tokenizer, max_tokens)
    ids, pieces = encoder.pieces(text)
    with console.Bar(f"reading {title}", 2 * max(len(ids) - 1, 1), "tokens") as bar:
        found = inspect(model, ids, top=top, overlap=overlap, progress=bar.advance)
    origin = provenance(device)
    short = Path(name).name
    write_text(out, page(found, pieces, encoder.spelt, title=title, model=short, provenance=origin))
    return {
        "kind": "inspection",
        **origin,
        "model": short,
        "text": title,
        "settings": {"top": top, "overlap": overlap, "max_tokens": max_tokens},
        **summary(found),
        "page": str(out),
        "bytes": out.stat().st_size,
    }


def _read(source: str) -> tuple[str, str]:
    """What to call a text, and the text."""
    title, text = texts.read_source(source)
    if not text.strip():
        raise ValueError(f"{title} is empty or only white space. Give a file with text in it.")
    return title, text
