# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward generate`: continue a prompt, show the text as it is generated, and return a record.

A saved state covers the whole text, the last token included, so that another call continues right after it.
"""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from ..backbones.architectures import positions_of
from ..data.texts import read_file_or_stdin
from ..data.tokenization import Encoder, token_array
from ..models.add_recurrence import special_tokens
from ..models.loading import Loaded, load_causal, usable_device
from ..settings.commands import GenerateSettings
from ..state import State, read_state_file
from ..utils import console
from ..utils.signals import Interruptible
from .options import check_file

_RECENT_TOKENS = "recent_tokens"  # metadata of a state file: the last tokens of the text
_CONTEXT = 16  # preceding tokens that may decide how a token is spelt: with a space in front or without
_MAX_PARTIAL = 3  # most tokens that can begin a character without ending it: UTF-8 has up to four bytes


def read_prompt(text: str | None, file: Path | None, source: str | None) -> str | None:
    """Return the prompt from --prompt, --prompt-file or standard input, whichever was given."""
    if source not in (None, "-"):
        raise ValueError(
            f"{source!r} is not a prompt: give --prompt TEXT, --prompt-file FILE, or - for standard input."
        )
    if sum(value is not None for value in (text, file, source)) > 1:
        raise ValueError("there are several prompts: give one of --prompt, --prompt-file and -.")
    if text is not None:
        try:
            text.encode("utf-8")  # invalid bytes on the command line arrive as lone surrogates
        except UnicodeEncodeError as error:
            raise ValueError(f"--prompt is not UTF-8 (character {error.start}). Convert it.") from error
    if text is not None or (file is None and source is None):
        return text
    return read_file_or_stdin("-" if file is None else file)[1]


def generate(
    name: str,
    prompt: str | None,
    settings: GenerateSettings,
    *,
    state_in: Path | None = None,
    state_out: Path | None = None,
    device: str | None = None,
    show: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """Continue a prompt.

    Args:
        prompt: None or "" continues from the state; "" without a state starts from the model's bos token.
        show: receives the text, piece by piece.

    Returns:
        A record: the text, how long it took and why it ended. If the state could not be saved, the record says so in
        `state_error`, so that the text is not lost.
    """
    _check_state_out(state_out)
    device = usable_device(device)
    loaded = load_causal(name, getattr(torch, settings.dtype))
    model: Any = loaded.model.to(device)  # type: ignore[arg-type]
    state, previous_ids = (None, []) if state_in is None else _load_state(state_in, device)
    recurrent_kwargs = _recurrent_kwargs(loaded, settings, state, state_out)
    ids = _encode(loaded, prompt, state)
    room = _free_positions(loaded, len(ids))
    seed = torch.seed() % 2**32 if settings.seed is None else settings.seed
    torch.manual_seed(seed)

    streamer = IncrementalStreamer(
        loaded.tokenizer, previous_ids + ids, show, continues=not ids, continued=state_out is not None
    )
    prompt_ids = torch.tensor([ids], dtype=torch.long, device=device)
    started = time.perf_counter()
    stop = Interruptible()
    with stop.listening(signal.SIGINT):
        out = model.generate(
            prompt_ids, attention_mask=torch.ones_like(prompt_ids), **settings.sampling(), **recurrent_kwargs,
            max_new_tokens=settings.max_new_tokens if room is None else min(room, settings.max_new_tokens), num_beams=1,
            num_return_sequences=1, pad_token_id=_padding(loaded.tokenizer), streamer=streamer,
            stopping_criteria=[lambda ids, scores, **_: torch.full((len(ids),), stop.requested, device=ids.device)],
            logits_processor=[_refuse_nan], return_dict_in_generate=True,
        )  # fmt: skip
        ended = time.perf_counter()
        state_error = None if state_out is None else _save_state(model, out, state_out, recurrent_kwargs, streamer)
    new_tokens = len(streamer.times)
    return {
        "model": name,
        "prompt": prompt or "",
        "text": streamer.text,
        "tokens": new_tokens,
        "ended": _reason(loaded, int(out.sequences[0, -1]), stop.requested, new_tokens == room),
        "seconds": ended - started,
        "prompt_seconds": streamer.times[0] - started,
        "tokens_per_second": (new_tokens - 1) / (ended - streamer.times[0]) if new_tokens > 1 else None,
        "seed": seed,
        "prompt_tokens": len(ids),
        "state_error": state_error,
    }


def print_summary(record: dict[str, Any]) -> None:
    """Print a line on stderr. Raises if the state was not saved: only now, after the text was printed."""
    rate = record["tokens_per_second"]
    reasons = {
        "eos": ", the model ended the text",
        "positions": f", all that {record['model']} has positions for; a recurrent model has no limit",
        "interrupted": ", interrupted",
    }
    speed = f", {rate:,.1f} per second" if rate else ""
    console.note(f"{record['tokens']:,} tokens{speed}{reasons.get(record['ended'], '')}")
    if record["state_error"] is not None:
        raise OSError(record["state_error"])


# --- states --------------------------------------------------------------------------------------------------------


def _check_state_out(path: Path | None) -> None:
    """Refuse a path that cannot be written, before the work rather than after it."""
    if path is not None and not path.absolute().parent.is_dir():
        raise ValueError(f"--state-out {path}: there is no such folder.")
    check_file(path, "--state-out")


def _load_state(path: Path, device: str) -> tuple[State, list[int]]:
    """Load the state of a single text, and the text's last tokens.

    A character may be split over a window border, and the state holds no tokens from before its window.
    """
    if path.is_dir():
        raise ValueError(f"--state-in {path} is a folder: give the file that --state-out wrote.")
    if not path.exists():
        raise ValueError(f"--state-in {path}: there is no such file. Give the one that --state-out wrote.")
    state, metadata = State.load(path, device), read_state_file(path)[0]
    if len(state) != 1:
        raise ValueError(
            f"--state-in {path} holds {len(state)} texts, and one is generated at a time. Pick one in Python: "
            f'carryforward.State.load("{path}")[:1].save("first.state") is the first.'
        )
    if _RECENT_TOKENS not in metadata:
        return state, state.tokens[0, : int(state.pending[0])].tolist()
    try:
        return state, token_array(json.loads(metadata[_RECENT_TOKENS]), _RECENT_TOKENS).tolist()
    except (ValueError, RecursionError) as error:
        raise ValueError(f"--state-in {path} is damaged: its metadata has no valid {_RECENT_TOKENS}.") from error


def _save_state(
    model: Any, out: Any, path: Path, recurrent_kwargs: dict[str, Any], streamer: "IncrementalStreamer"
) -> str | None:
    """Save the state after the whole text, the last token included. Returns an error message if that fails."""
    state = model.advance_state(out.sequences[:, -1:], **{**recurrent_kwargs, "state": out.past_key_values.state})
    try:
        state.save(path, **{_RECENT_TOKENS: json.dumps(streamer.ids[-_CONTEXT:])})
    except (OSError, SafetensorError) as error:
        return f"--state-out {path} could not be written: {error}"
    return None


# --- the call of `model.generate` ----------------------------------------------------------------------------------


def _recurrent_kwargs(
    loaded: Loaded, settings: GenerateSettings, state: State | None, state_out: Path | None
) -> dict[str, Any]:
    """Arguments of `generate` that only recurrent models have; refuses them for plain ones."""
    if loaded.recurrent:
        return {"overlap": settings.overlap, "use_state": settings.state, "state": state}
    flags = {"--overlap": settings.overlap, "--no-state": None if settings.state else True, "--state-in": state,
             "--state-out": state_out}  # fmt: skip
    for name, value in flags.items():
        if value is not None:
            raise ValueError(f"{name} is for recurrent models; {loaded.name} is a plain one. Leave it out.")
    return {}


def _encode(loaded: Loaded, prompt: str | None, state: State | None) -> list[int]:
    """Tokenize the prompt as in training: runs of this package use no special tokens, other models the tokenizer's."""
    tokenizer = loaded.tokenizer
    if prompt:
        (encoded,) = Encoder(tokenizer).encode([prompt])
        trained_here = loaded.recurrent and loaded.run is not None
        prefix = [] if trained_here or state is not None else special_tokens(tokenizer)[0]
        return [*prefix, *map(int, encoded.ids)]
    if state is not None:
        return []
    if prompt is None:
        raise ValueError("there is no prompt: give --prompt TEXT, --prompt-file FILE or - for standard input.")
    if tokenizer.bos_token_id is None:
        raise ValueError(f"the prompt is empty, and {loaded.name} has no bos token to start from. Give a prompt.")
    return [tokenizer.bos_token_id]


def _padding(tokenizer: Any) -> int:
    """Any token: a single text is never padded, but transformers warns if none is given."""
    candidates = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in candidates if token is not None), 0)


def _free_positions(loaded: Loaded, prompt_tokens: int) -> int | None:
    """Number of positions that a plain model has left after the prompt; None if there is no limit."""
    positions = None if loaded.recurrent else positions_of(loaded.model.config)
    if positions is None:
        return None
    if prompt_tokens >= positions:
        raise ValueError(
            f"the prompt has {prompt_tokens:,} tokens and {loaded.name} {positions:,} positions. Give a shorter "
            "prompt, or make the model recurrent (carryforward add or train), which removes the limit."
        )
    return positions - prompt_tokens


def _reason(loaded: Loaded, last_token: int, interrupted: bool, full: bool) -> str:
    """Why the text ended: eos, interrupted, positions (a plain model has no more) or length."""
    config = loaded.model.generation_config
    eos = torch.as_tensor([] if config is None or config.eos_token_id is None else config.eos_token_id)
    if last_token in eos.flatten().tolist():
        return "eos"
    if interrupted:
        return "interrupted"
    return "positions" if full else "length"


def _refuse_nan(input_ids: Tensor, scores: Tensor) -> Tensor:
    """A logits processor that stops at NaN."""
    if scores.isnan().any():
        raise ArithmeticError("the model's logits are NaN: its weights hold NaN or are too large for --dtype.")
    return scores


# --- tokens to text ------------------------------------------------------------------------------------------------


class IncrementalStreamer(BaseStreamer):
    """Decodes tokens as they are generated. A piece of text is shown once no later token can change it."""

    def __init__(
        self,
        tokenizer: Any,
        previous_ids: list[int],
        show: Callable[[str], Any] | None = None,
        *,
        continues: bool = False,
        continued: bool = False,
    ):
        """
        Args:
            previous_ids: the tokens of the text so far. They decide whether the first new word begins the text.
            continues: the tokens come from an earlier call, which may have left a partial character to this one.
            continued: a later call follows. A partial character at the end is left to it.
        """
        self.tokenizer, self.show, self.continued = tokenizer, show, continued
        self.times: list[float] = []
        self.ids = previous_ids[-_CONTEXT:]
        self._pieces: list[str] = []
        self._start = 0  # decoding starts at this token
        self._shown = self._shown_before() if continues else len(self.ids)  # tokens before this one were shown
        self._prompt_seen = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def put(self, value: Tensor) -> None:
        if not self._prompt_seen:  # transformers passes the prompt first
            self._prompt_seen = True
            return
        self.times.append(time.perf_counter())
        self.ids += value.flatten().tolist()
        self._show_until(len(self.ids))
        # so many tokens without a whole character never become one, and decoding them takes ever longer
        if len(self.ids) - self._shown > 2 * _MAX_PARTIAL:
            self._show_until(len(self.ids) - _MAX_PARTIAL, partial=True)

    def end(self) -> None:
        self._show_until(len(self.ids) - (_MAX_PARTIAL if self.continued else 0), partial=True)

    def _show_until(self, end: int, partial: bool = False) -> None:
        """Show the new text of the tokens before `end`; unless `partial`, only if it ends with a whole character."""
        shown, text = self._decode(self.ids[self._start : self._shown]), self._decode(self.ids[self._start : end])
        piece = text[len(shown) :]
        if end <= self._shown or (not partial and (not piece or text.endswith("\ufffd"))):
            return
        if not piece:  # tokens without text
            del self.ids[self._shown : end]
            return
        self._start, self._shown = self._shown, end
        self._pieces.append(piece)
        if self.show is not None:
            self.show(piece)

    def _shown_before(self) -> int:
        """How many of the previous tokens an earlier call has shown."""
        least = max(len(self.ids) - _MAX_PARTIAL, 0)
        ends = range(len(self.ids), least, -1)
        return next((end for end in ends if not self._decode(self.ids[:end]).endswith("\ufffd")), least)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
