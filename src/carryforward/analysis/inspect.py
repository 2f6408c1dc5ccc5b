# SPDX-License-Identifier: Apache-2.0
"""`carryforward inspect`: write an HTML page that shows how the state changes each token's prediction."""

from pathlib import Path
from typing import Any

from ..data import texts
from ..data.tokenization import Encoder
from ..models.loading import load_causal, need_state, usable_device
from ..utils.files import write_text
from ..utils.progress import ProgressBar
from ..utils.provenance import provenance
from .html_report import render_html
from .token_gains import measure_token_gains, summary


def inspect(
    name: str,
    source: str,
    out: Path,
    *,
    top: int = 5,
    overlap: int | None = None,
    max_tokens: int | None = None,
    device: str | None = None,
) -> dict[str, Any]:
    """Write the page of a text; returns the figures of the whole text.

    Args:
        name: a recurrent model: a run, a folder or a Hub name.
        source: a text file, or - for standard input.
        out: the HTML file.
        top: number of alternatives shown for each token.
        overlap: an overlap other than the model's own.
        max_tokens: read only the first tokens of the text.
    """
    if source != "-" and out.exists() and out.samefile(source):
        raise ValueError(f"--out {out} is the text itself. Use another file name.")
    if out.is_dir():
        raise ValueError(f"--out {out} is a folder. Give the name of a file, such as {out / 'report.html'}.")
    for option, value, least in (("top", top, 1), ("overlap", overlap, 0), ("max-tokens", max_tokens, 1)):
        if value is not None and value < least:
            raise ValueError(f"--{option} {value}: it must be at least {least}.")
    title, text = _read(source)
    device = usable_device(device)
    need_state(name)
    loaded = load_causal(name)
    model: Any = loaded.model.to(device)  # type: ignore[arg-type]
    encoder = Encoder(loaded.tokenizer, max_tokens)
    ids, pieces = encoder.encode_pieces(text)
    with ProgressBar(f"reading {title}", 2 * max(len(ids) - 1, 1), "tokens") as bar:
        tokens = measure_token_gains(model, ids, top=top, overlap=overlap, progress=bar.advance)
    origin = provenance(device)
    model_name = Path(name).name
    page = render_html(tokens, pieces, encoder.token_strings, title=title, model=model_name, provenance=origin)
    out.absolute().parent.mkdir(parents=True, exist_ok=True)
    write_text(out, page)
    return {
        "kind": "inspection",
        **origin,
        "model": model_name,
        "text": title,
        "settings": {"top": top, "overlap": overlap, "max_tokens": max_tokens},
        **summary(tokens),
        "page": str(out),
        "bytes": out.stat().st_size,
    }


def _read(source: str) -> tuple[str, str]:
    """The title and the content of a text."""
    title, text = texts.read_file_or_stdin(source)
    if not text.strip():
        raise ValueError(f"{title} is empty or only white space. Give a file with text in it.")
    return title, text
