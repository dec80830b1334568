"""`python -m engine generate`: one prompt or a file of prompts, as text or as JSON."""

from __future__ import annotations

import io
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from typer.exceptions import TyperException

from .cache.cli import app as cache_app
from .cache.files import Files
from .cache.identity import MEMO, Memo
from .cache.shelf import open_or_make
from .drafters.registry import CONFIDENT, KINDS, default_drafter, open_drafter
from .drafters.source import DraftProvider
from .errors import BadInput
from .groups import Limits
from .requests import drafter_for
from .service import Engine
from .signals import leave_in_order
from .state.quantize import KVQuantization
from .target import Target
from .tiers import RAM_BYTES, open_tiers
from .values import Finish, LogitsOptions, Request, Rng, Sampling, Statistics, Usage

CONTEXT_HELP = "tokens looked back at; 0 is all"
DRAFTER_HELP = (
    f"off | ngram | mtp | KIND:DIR | DIR, KIND one of {', '.join(KINDS)}; "
    "if not given, the target's own layer where it has one"
)
CONFIDENCE_HELP = (
    f"0 to 1: cut a draft before its first token less sure than that ({', '.join(CONFIDENT)})"
)


class ReaderGone(Exception):
    """Whoever reads the output has seen enough. typer would call a BrokenPipeError a failure."""


class Commands(typer.core.TyperGroup):
    """The commands, whose output may be cut off."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderGone from error


app = typer.Typer(
    cls=Commands, add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False
)
app.add_typer(cache_app, name="cache")


@app.callback()
def _commands() -> None:
    """A reference engine for speculative decoding on MLX."""


@app.command("generate")
def generate_command(
    target: Annotated[str, typer.Option(help="mlx-lm folder or hub id")],
    prompt: Annotated[str | None, typer.Option(help="the prompt, as raw text")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="UTF-8, one prompt per line")] = None,
    adapter: Annotated[Path | None, typer.Option(help="mlx-lm adapter folder")] = None,
    drafter: Annotated[str | None, typer.Option(help=DRAFTER_HELP)] = None,
    depth: Annotated[int | None, typer.Option(help="drafts per round")] = None,
    min_confidence: Annotated[float | None, typer.Option(help=CONFIDENCE_HELP)] = None,
    chat: Annotated[bool, typer.Option(help="each prompt is a user's message")] = False,
    max_tokens: Annotated[int, typer.Option(help="budget, terminal EOS included")] = 100,
    stop: Annotated[list[str] | None, typer.Option(help="stop string, repeatable")] = None,
    temp: Annotated[float, typer.Option(help="temperature; 0 is greedy")] = 0.0,
    top_p: Annotated[float, typer.Option(help="0 is off")] = 0.0,
    top_k: Annotated[int, typer.Option(help="0 is off")] = 0,
    min_p: Annotated[float, typer.Option(help="0 is off")] = 0.0,
    xtc_probability: Annotated[float, typer.Option(help="0 is off")] = 0.0,
    xtc_threshold: Annotated[float, typer.Option(help="0 to 0.5")] = 0.1,
    repetition_penalty: Annotated[float, typer.Option(help="0 is off")] = 0.0,
    repetition_context_size: Annotated[int, typer.Option(help=CONTEXT_HELP)] = 20,
    presence_penalty: Annotated[float, typer.Option(help="0 is off")] = 0.0,
    presence_context_size: Annotated[int, typer.Option(help=CONTEXT_HELP)] = 20,
    frequency_penalty: Annotated[float, typer.Option(help="0 is off")] = 0.0,
    frequency_context_size: Annotated[int, typer.Option(help=CONTEXT_HELP)] = 20,
    logit_bias: Annotated[list[str] | None, typer.Option(help="ID=BIAS, repeatable")] = None,
    seed: Annotated[int | None, typer.Option(help="drawn and reported if not given")] = None,
    rng: Annotated[
        str, typer.Option(help="positional | sequential (mlx-lm's order)")
    ] = "positional",
    kv_bits: Annotated[int | None, typer.Option(help="quantize keys and values")] = None,
    kv_group_size: Annotated[int, typer.Option(help="32 | 64 | 128")] = 64,
    quantized_kv_start: Annotated[int, typer.Option(help="from this many tokens on")] = 5000,
    rows: Annotated[int, typer.Option(help="prompts decoded together")] = 8,
    ssd_cache: Annotated[str | None, typer.Option(help="folder that keeps states")] = None,
    prompt_cache: Annotated[
        int | None, typer.Option(help="bytes of states kept in memory; 1 GiB with --ssd-cache")
    ] = None,
    checkpoint_tokens: Annotated[
        int | None, typer.Option(help="with --ssd-cache: write unfinished answers down every N")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="one JSON object per prompt")] = False,
) -> None:
    """Generate from a prompt, with or without a drafter: the text is the same."""
    policy: Rng = "sequential" if rng == "sequential" else "positional"
    if rng != policy:
        raise BadInput(f"--rng must be positional or sequential, got {rng!r}")
    logits = LogitsOptions(
        repetition_penalty=repetition_penalty,
        repetition_context_size=repetition_context_size,
        presence_penalty=presence_penalty,
        presence_context_size=presence_context_size,
        frequency_penalty=frequency_penalty,
        frequency_context_size=frequency_context_size,
        logit_bias=tuple(map(_bias, logit_bias or ())),
    )
    sampling = Sampling(
        temp, top_p, top_k, min_p, seed, policy, xtc_probability, xtc_threshold, logits
    )
    texts = _prompts(prompt, prompt_file)
    if depth is not None and depth < 0:
        raise BadInput(f"--depth must be at least 0, got {depth}")
    if max_tokens < 1:
        raise BadInput(f"--max-tokens must be at least 1, got {max_tokens}")
    quantization = None
    if kv_bits is not None:
        quantization = KVQuantization(kv_bits, kv_group_size, quantized_kv_start)
    if prompt_cache is not None and prompt_cache < 0:
        raise BadInput(f"--prompt-cache must be at least 0, got {prompt_cache}")
    if checkpoint_tokens is not None and ssd_cache is None:
        raise BadInput("--checkpoint-tokens needs --ssd-cache")
    if checkpoint_tokens is not None and checkpoint_tokens < 1:
        raise BadInput(f"--checkpoint-tokens must be at least 1, got {checkpoint_tokens}")
    memo = None if ssd_cache is None else _memo(ssd_cache)
    model = Target.load(target, quantization=quantization, memo=memo)
    if adapter is not None:
        model = model.adapted(adapter)
    provider = _mounted(drafter, model, policy, min_confidence)
    if drafter_for(model, provider) is not provider:
        warnings.warn(f"drafter {drafter} does not support adapters and is not used", stacklevel=1)
    requests: list[Request] = []
    for text in texts:
        ids = model.encode_chat([{"role": "user", "content": text}]) if chat else model.encode(text)
        requests.append(Request(tuple(ids), max_tokens, sampling, stop_strings=tuple(stop or ())))
    drafters = () if provider is None else (provider,)
    tiers = None
    if ssd_cache is not None or prompt_cache is not None:
        ram_bytes = RAM_BYTES if prompt_cache is None else prompt_cache
        tiers = open_tiers(
            model, ram_bytes=ram_bytes, ssd=ssd_cache, checkpoint_tokens=checkpoint_tokens
        )
    engine = Engine(model, drafters, limits=Limits(rows=rows), tiers=tiers)
    with leave_in_order(), engine:
        streams = [engine.submit(request, depth=depth) for request in requests]
        for stream in streams:
            finish = _show_text(stream) if not as_json else _wait(stream, max_tokens)
            if as_json:
                print(json.dumps(_report(finish), ensure_ascii=False), flush=True)


def _memo(folder: str) -> Memo:
    """What the files of models hash to is remembered beside the states, in the tier's folder.

    Raises:
        BadInput: there cannot be such a folder.
    """
    if not folder:
        raise BadInput("--ssd-cache is empty; a folder is needed")
    try:
        files = Files()
        files.close(open_or_make(files, os.path.abspath(folder)))
    except NotADirectoryError as error:
        raise BadInput(f"--ssd-cache {folder} is not a folder") from error
    except OSError as error:
        raise BadInput(f"--ssd-cache {folder}: {error.strerror}") from error
    return Memo(Path(folder, MEMO))


def _mounted(
    drafter: str | None, model: Target, policy: Rng, min_confidence: float | None
) -> DraftProvider | None:
    """The drafter asked for, else what the target has of its own."""
    if drafter is not None:
        return open_drafter(drafter, model, min_confidence=min_confidence)
    if min_confidence is not None:
        raise BadInput(f"--min-confidence {min_confidence} needs a --drafter to cut the drafts of")
    if policy == "sequential":
        return None  # whoever wants mlx-lm's draws wants its plain stream, which drafting changes
    try:
        return default_drafter(model)
    except BadInput as error:
        raise BadInput(f"{error} (--drafter off decodes without it)") from error


def _bias(pair: str) -> tuple[int, float]:
    token, _, bias = pair.partition("=")
    try:
        return int(token), float(bias)
    except ValueError as error:
        raise BadInput(f"--logit-bias must be ID=BIAS, an id and a number, got {pair!r}") from error


def _prompts(prompt: str | None, prompt_file: Path | None) -> list[str]:
    if (prompt is None) == (prompt_file is None):
        raise BadInput("give exactly one of --prompt and --prompt-file")
    if prompt_file is None:
        assert prompt is not None
        if not prompt:
            raise BadInput("--prompt is empty; at least 1 token is needed")
        return [prompt]
    try:
        text = prompt_file.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise BadInput(f"prompt file {prompt_file} is not UTF-8 (byte {error.start})") from error
    except OSError as error:
        raise BadInput(f"cannot read prompt file {prompt_file}: {error.strerror}") from error
    # Only newlines end a prompt: other line breaks of Unicode may stand in one.
    prompts = [line.removesuffix("\r") for line in text.split("\n") if line.strip()]
    if not prompts:
        raise BadInput(f"prompt file {prompt_file} holds no prompt; at least 1 line is needed")
    return prompts


def _wait(events: Iterator[Any], max_tokens: int) -> Finish:
    """The end of one stream; a progress bar on a terminal meanwhile."""
    console = Console(stderr=True)
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("generating", total=max_tokens)
        for event in events:
            if isinstance(event, Finish):
                return event
            bar.advance(task)
    raise AssertionError("a stream ends with Finish")


def _show_text(events: Iterator[Any]) -> Finish:
    for event in events:
        if isinstance(event, Finish):
            print(event.tail, flush=True)
            stats, usage = event.statistics, event.usage
            print(
                f"{_number(usage.completion_tokens, 'token')}, {event.reason}; "
                f"{_number(stats.rounds, 'round')}, "
                f"{stats.accepted} of {_number(stats.drafted, 'draft')} accepted"
                + _by_position(stats)
                + _kept(usage)
                + ("" if event.seed is None else f"; seed {event.seed}"),
                file=sys.stderr,
            )
            return event
        print(event.text, end="", flush=True)
    raise AssertionError("a stream ends with Finish")


def _kept(usage: Usage) -> str:
    """What was there already, if anything was."""
    kept = {"the prompt": usage.cached_tokens, "the answer": usage.resumed_tokens}
    return "".join(f"; {_number(n, 'token')} of {what} kept" for what, n in kept.items() if n)


def _number(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _by_position(stats: Statistics) -> str:
    """How many drafts of each position were accepted of how many."""
    pairs = zip(stats.accepted_by_position, stats.drafted_by_position, strict=True)
    shares = [f"{accepted}/{drafted}" for accepted, drafted in pairs]
    return f" (by position {', '.join(shares)})" if shares else ""


def _report(finish: Finish) -> dict[str, Any]:
    return {
        "tokens": list(finish.tokens),
        "text": finish.text,
        "finish_reason": finish.reason,
        "usage": asdict(finish.usage),
        "seed": finish.seed,
        "statistics": asdict(finish.statistics),
    }


def main() -> None:
    """Run the command line. Bad input: one line on stderr, exit 2. Ctrl-C: exit 130.

    SIGTERM ends it as Ctrl-C does, with exit 143: what a durable tier is to keep is written first,
    unless either comes again.
    """
    # Behind mlx-lm, which keeps transformers from advising to install other frameworks.
    from transformers.utils import logging as transformers_logging

    # Its advice is about configurations that only a tokenizer is read with.
    transformers_logging.set_verbosity_error()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal may know fewer characters
    warnings.showwarning = lambda message, *_: print(f"warning: {message}", file=sys.stderr)
    said = logging.StreamHandler()
    said.setFormatter(logging.Formatter("warning: %(message)s"))
    logging.getLogger(__package__).addHandler(said)
    try:
        code = app(standalone_mode=False)
        print(end="", flush=True)
    except (BrokenPipeError, ReaderGone):
        # As head and less are; nothing may be flushed into the pipe any more.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(0)
    except OSError as error:
        what = error.filename or "cannot write"
        print(f"error: {what}: {error.strerror or error}", file=sys.stderr)
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(2)
    except (BadInput, TyperException) as error:
        why = error.format_message() if isinstance(error, TyperException) else str(error)
        print(f"error: {' '.join(why.split())}", file=sys.stderr)
        sys.exit(2)
    if code == 130:
        print("interrupted", file=sys.stderr)
    sys.exit(code or 0)
