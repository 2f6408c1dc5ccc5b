# SPDX-License-Identifier: Apache-2.0
"""The job behind `carryforward generate`: a model and a prompt in, text as it is written and a record of it out.

A state written here holds everything, the last token too: what comes next simply follows.
"""

import json
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.generation.streamers import BaseStreamer

from ..backbones.architectures import positions_of
from ..data.texts import read_source
from ..data.tokenization import Encoder
from ..models.add_recurrence import special_tokens
from ..models.loading import Loaded, load_causal, usable_device
from ..settings import WriteSettings
from ..state import State
from ..utils import console
from ..utils.signals import Interruptible

_RECENT = "recent_tokens"  # what a state's file says of the text, beside the state
_CONTEXT = 16  # tokens before a new one that may decide how it is spelt: is there a space in front of it?
_HALF = 3  # the most tokens that begin a character and do not end it: UTF-8 has up to four bytes


def read_prompt(text: str | None, file: Path | None, source: str | None) -> str | None:
    """The prompt, from whichever of the three was given."""
    if source not in (None, "-"):
        raise ValueError(
            f"{source!r} is not a prompt: give --prompt TEXT, --prompt-file FILE, or - for standard input."
        )
    if sum(given is not None for given in (text, file, source)) > 1:
        raise ValueError("there are several prompts: give one of --prompt, --prompt-file and -.")
    if text is not None:
        try:
            text.encode("utf-8")  # bytes of the command line that are no text arrive as lone surrogates
        except UnicodeEncodeError as error:
            raise ValueError(f"--prompt is not UTF-8 (character {error.start}). Convert it.") from error
    if text is not None or (file is None and source is None):
        return text
    return read_source("-" if file is None else file)[1]


def write(
    name: str,
    prompt: str | None,
    settings: WriteSettings,
    *,
    state_in: Path | None = None,
    state_out: Path | None = None,
    device: str | None = None,
    show: Callable[[str], Any] | None = None,
) -> dict[str, Any]:
    """Continue a prompt; what was written, how long it took and why it ended.

    Args:
        prompt: None or empty goes on from the state; "" without one begins with the model's bos token.
        show: gets the text, piece by piece.

    Returns:
        the record. A state that could not be saved is an entry in it: the text is not lost for that.
    """
    _check(state_out)
    device = usable_device(device)
    loaded = load_causal(name, getattr(torch, settings.dtype))
    model: Any = loaded.model.to(device)  # type: ignore[arg-type]
    state, earlier = (None, []) if state_in is None else _load_state(state_in, device)
    reading = _reading(loaded, settings, state, state_out)
    ids = _encode(loaded, prompt, state)
    room = _room(loaded, len(ids))
    seed = torch.seed() % 2**32 if settings.seed is None else settings.seed
    torch.manual_seed(seed)

    pieces = Pieces(loaded.tokenizer, earlier + ids, show, continues=not ids, continued=state_out is not None)
    prompts = torch.tensor([ids], dtype=torch.long, device=device)
    begun = time.perf_counter()
    stop = Interruptible()
    with stop.listening(signal.SIGINT):
        out = model.generate(
            prompts, attention_mask=torch.ones_like(prompts), **settings.sampling(), **reading,
            max_new_tokens=settings.max_new_tokens if room is None else min(room, settings.max_new_tokens), num_beams=1,
            num_return_sequences=1, pad_token_id=_padding(loaded.tokenizer), streamer=pieces,
            stopping_criteria=[lambda ids, scores, **_: torch.full((len(ids),), stop.requested, device=ids.device)],
            logits_processor=[_numbers], return_dict_in_generate=True,
        )  # fmt: skip
        ended = time.perf_counter()
        state_error = None if state_out is None else _save_state(model, out, state_out, reading, pieces)
    written = len(pieces.times)
    return {
        "model": name,
        "prompt": prompt or "",
        "text": pieces.text,
        "tokens": written,
        "ended": _reason(loaded, int(out.sequences[0, -1]), stop.requested, written == room),
        "seconds": ended - begun,
        "prompt_seconds": pieces.times[0] - begun,
        "tokens_per_second": (written - 1) / (ended - pieces.times[0]) if written > 1 else None,
        "seed": seed,
        "prompt_tokens": len(ids),
        "state_error": state_error,
    }


def _check(state_out: Path | None) -> None:
    """What can be refused before anything is loaded."""
    if state_out is not None and not state_out.absolute().parent.is_dir():  # before the work, not after it
        raise ValueError(f"--state-out {state_out}: there is no such folder.")
    if state_out is not None and state_out.is_dir():
        raise ValueError(f"--state-out {state_out} is a folder: give the name of a file.")


def told(record: dict[str, Any]) -> None:
    """A line on stderr: how it went. A state that was not saved is an error here, once the text is out."""
    rate = record["tokens_per_second"]
    reasons = {
        "eos": ", the model ended it",
        "positions": f", which is all {record['model']} has positions for; a recurrent model has no limit",
        "interrupted": ", interrupted",
    }
    speed = f", {rate:,.1f} a second" if rate else ""
    console.note(f"{record['tokens']:,} tokens{speed}{reasons.get(record['ended'], '')}")
    if record["state_error"] is not None:
        raise OSError(record["state_error"])


def _load_state(path: Path, device: str) -> tuple[State, list[int]]:
    """The state of a single text, and its last tokens: half a character may lie on both sides of a window's border, and
    the state has no tokens before that."""
    if path.is_dir():
        raise ValueError(f"--state-in {path} is a folder: give the file that --state-out wrote.")
    if not path.exists():
        raise ValueError(f"--state-in {path}: there is no such file. Give the one that --state-out wrote.")
    state = State.load(path, device)
    if len(state) != 1:
        raise ValueError(
            f"--state-in {path} holds {len(state)} texts, and one is written at a time. Pick one in Python: "
            f'carryforward.State.load("{path}")[:1].save("first.state") is the first.'
        )
    with safe_open(path, framework="pt") as file:
        recent = file.metadata().get(_RECENT)
    return state, state.tokens[0, : int(state.pending[0])].tolist() if recent is None else json.loads(recent)


def _save_state(model: Any, out: Any, path: Path, reading: dict[str, Any], pieces: "Pieces") -> str | None:
    """The state after all that was written, the last token too; if it cannot be saved, why."""
    whole = model.advance_state(out.sequences[:, -1:], **{**reading, "state": out.past_key_values.state})
    try:
        whole.save(path, **{_RECENT: json.dumps(pieces.ids[-_CONTEXT:])})
    except (OSError, SafetensorError) as error:
        return f"--state-out {path} could not be written: {error}"
    return None


def _reading(loaded: Loaded, settings: WriteSettings, state: State | None, state_out: Path | None) -> dict[str, Any]:
    """What only a recurrent model can be told."""
    if loaded.recurrent:
        return {"overlap": settings.overlap, "use_state": settings.state, "state": state}
    given = {"--overlap": settings.overlap, "--no-state": None if settings.state else True, "--state-in": state,
             "--state-out": state_out}  # fmt: skip
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} is for recurrent models; {loaded.name} is a plain one. Leave it out.")
    return {}


def _encode(loaded: Loaded, prompt: str | None, state: State | None) -> list[int]:
    """Tokens as in training: without special ones where that was here, else as the tokenizer puts them."""
    tokenizer = loaded.tokenizer
    if prompt:
        (encoded,) = Encoder(tokenizer).encode([prompt])
        trained_here = loaded.recurrent and loaded.run is not None
        before = [] if trained_here or state is not None else special_tokens(tokenizer)[0]
        return [*before, *map(int, encoded.ids)]
    if state is not None:
        return []
    if prompt is None:
        raise ValueError("there is no prompt: give --prompt TEXT, --prompt-file FILE or - for standard input.")
    if tokenizer.bos_token_id is None:
        raise ValueError(f"the prompt is empty, and {loaded.name} has no token to begin with. Give a prompt.")
    return [tokenizer.bos_token_id]


def _padding(tokenizer: Any) -> int:
    """Any token: a single text is never padded, but transformers warns where none is named."""
    named = (tokenizer.pad_token_id, tokenizer.eos_token_id)
    return next((token for token in named if token is not None), 0)


def _room(loaded: Loaded, prompt: int) -> int | None:
    """How many tokens a plain model has positions for behind the prompt; None: there is no limit."""
    positions = None if loaded.recurrent else positions_of(loaded.model.config)
    if positions is None:
        return None
    if prompt >= positions:
        raise ValueError(
            f"the prompt has {prompt:,} tokens and {loaded.name} {positions:,} positions. Give a shorter one, or train "
            "a recurrent model of it (carryforward train), which has no limit."
        )
    return positions - prompt


def _reason(loaded: Loaded, last: int, stopped: bool, full: bool) -> str:
    """Why the text is over: its last token, Ctrl-C, or a plain model's positions."""
    config = loaded.model.generation_config
    ends = torch.as_tensor([] if config is None or config.eos_token_id is None else config.eos_token_id)
    if last in ends.flatten().tolist():
        return "eos"
    if stopped:
        return "interrupted"
    return "positions" if full else "length"


class Pieces(BaseStreamer):
    """Tokens to text, as they come: a piece is given out when no later token can change it."""

    def __init__(
        self,
        tokenizer: Any,
        before: list[int],
        show: Callable[[str], Any] | None = None,
        *,
        continues: bool = False,
        continued: bool = False,
    ):
        """
        Args:
            before: the tokens of the text so far: a first word may need to know that it is not the first.
            continues: they are another run's, which may have left half a character to this one.
            continued: another run goes on: half a character at the end is left to that one.
        """
        self.tokenizer, self.show, self.continued = tokenizer, show, continued
        self.times: list[float] = []
        self.ids = before[-_CONTEXT:]
        self._pieces: list[str] = []
        self._from = 0  # where decoding starts, and up to where it has been given out
        self._shown = self._whole() if continues else len(self.ids)
        self._begun = False

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def put(self, value: Tensor) -> None:
        if not self._begun:  # transformers gives the prompt first
            self._begun = True
            return
        self.times.append(time.perf_counter())
        self.ids += value.flatten().tolist()
        self._give(len(self.ids))
        if len(self.ids) - self._shown > 2 * _HALF:  # these will never be a character, and decoding them takes longer
            self._give(len(self.ids) - _HALF, unfinished=True)

    def end(self) -> None:
        self._give(len(self.ids) - (_HALF if self.continued else 0), unfinished=True)

    def _give(self, end: int, unfinished: bool = False) -> None:
        """The text up to a token, if it is new and ends with a whole character."""
        known, new = self._decode(self.ids[self._from : self._shown]), self._decode(self.ids[self._from : end])
        piece = new[len(known) :]
        if end <= self._shown or (not unfinished and (not piece or new.endswith("\ufffd"))):
            return
        if not piece:  # tokens that stand for nothing
            del self.ids[self._shown : end]
            return
        self._from, self._shown = self._shown, end
        self._pieces.append(piece)
        if self.show is not None:
            self.show(piece)

    def _whole(self) -> int:
        """How many of the tokens so far an earlier run has shown."""
        least = max(len(self.ids) - _HALF, 0)
        ends = range(len(self.ids), least, -1)
        return next((end for end in ends if not self._decode(self.ids[:end]).endswith("\ufffd")), least)

    def _decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def _numbers(input_ids: Tensor, scores: Tensor) -> Tensor:
    if scores.isnan().any():
        raise ArithmeticError("the model gives no numbers: its weights hold NaN or are too large for --dtype.")
    return scores
