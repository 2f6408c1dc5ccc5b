# SPDX-License-Identifier: Apache-2.0
"""The command line: one function per verb. Results go to stdout, everything else to stderr.

torch is imported inside the verbs, so that `--help` answers at once. Exit codes: 0 done, 1 failed, 2 wrong usage,
130 interrupted.
"""

import dataclasses
import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from ..settings import (
    BUNDLED,
    OVERLAP,
    PYTHON_DOCS,
    TEXT_FIELD,
    EmbedSettings,
    EvaluateSettings,
    HorizonSettings,
    TrainSettings,
    WriteSettings,
)
from .analysis import samples, topics
from .errors import Config, Device, Json, ReportTo, RunFolder, only_cpu, user_errors
from .options import options, spread
from .qa import qa

app = typer.Typer(
    name="carryforward",
    help="Recurrence for pretrained transformers: documents of any length, in the memory of one window.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)
app.add_typer(qa)


def _version(wanted: bool) -> None:
    if wanted:
        from .. import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What can be said before a command."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; the entry point `carryforward`."""
    given = sys.argv[1:] if arguments is None else arguments
    app(args=spread(given, typer.main.get_command(app)), prog_name="carryforward")


def _show(piece: str) -> None:
    """Text as it is written."""
    typer.echo(piece, nl=False)
    sys.stdout.flush()


@app.command()
def demo(
    text: Annotated[
        list[Path] | None, typer.Option(help="One's own text files, several after one --text: 30,000 words or more.")
    ] = None,
    out: Annotated[Path, typer.Option(help="A folder for models and results.")] = Path("carryforward-demo"),
    seed: Annotated[int, typer.Option(help="Seed of everything random.")] = 0,
    short: Annotated[bool, typer.Option("--short", help="A few steps only, to see that everything runs.")] = False,
) -> None:
    """See it work: fine-tune the bundled model with and without recurrence, compare the two, and let one write."""
    with user_errors():
        from .demo import demo as run

        run(out, text or (), seed=seed, short=short, show=_show)


@app.command()
@options(TrainSettings)
def train(
    settings: TrainSettings,
    out: RunFolder,
    config: Config = None,
    report_to: ReportTo = "none",
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Fine-tune a model with recurrence, or without it in the same loop."""
    with user_errors():
        from ..training import train

        record = train.train(settings, out, report_to=report_to, use_cpu=only_cpu(device))
        if int(os.environ.get("RANK", "0")) == 0:
            best = record.get("best_word_perplexity")
            told = f"{out}: {record['tokens']:,} tokens" + (f", validation word perplexity {best:,.2f}" if best else "")
            typer.echo(json.dumps(record) if as_json else told)


@app.command()
def add(
    model: Annotated[str, typer.Argument(help="A plain causal model: a Hub name, a folder or a .gguf file.")],
    out: Annotated[Path, typer.Option(file_okay=False, help="Folder for the model that is made.")],
    window: Annotated[int | None, typer.Option(help="Tokens read at once; up to 1,024 by default.")] = None,
    kept: Annotated[int | None, typer.Option(help="Newest positions that are carried on; half a window.")] = None,
    sinks: Annotated[int | None, typer.Option(help="First positions of the document, carried on too; 4.")] = None,
    data: Annotated[
        str, typer.Option(help="Text in the model's language, from which one with learned positions learns their part.")
    ] = PYTHON_DOCS,
    text_field: Annotated[str, typer.Option(help=TEXT_FIELD)] = "text",
    as_json: Json = False,
) -> None:
    """Let a model read on over window borders, without training: texts of any length."""
    with user_errors():
        from .add import extend

        made = extend(model, out, data=data, window=window, kept=kept, sinks=sinks, text_field=text_field)
        told = f"{out}: windows of {made['window']} tokens, {made['kept']} + {made['sinks']} positions carried on"
        typer.echo(json.dumps({"out": str(out), **made}) if as_json else told)


@app.command()
@options(EvaluateSettings)
def evaluate(
    settings: EvaluateSettings,
    models: Annotated[
        list[str] | None, typer.Argument(metavar="[MODEL]...", help="Runs, folders, Hub names; bundled by default.")
    ] = None,
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for JSON, table, CSV and figure.")] = None,
    config: Config = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Perplexity against overlap and FLOPs, with the state removed as a control."""
    with user_errors():
        from ..evaluation import report
        from ..evaluation.evaluate import check
        from ..evaluation.evaluate import evaluate as evaluate_one

        names = models or [BUNDLED]
        if out is not None:  # or hours of work would have nowhere to go
            out.mkdir(parents=True, exist_ok=True)
        for name in names if len(names) > 1 else ():  # a single one is looked at soon enough
            check(name, settings)
        results = []
        for name in names:
            results.append(evaluate_one(name, settings, device=device))
            if out is not None:  # after each: the next may fail
                report.save(results, out)
        typer.echo(json.dumps(results) if as_json else report.markdown(results))


@app.command()
@options(HorizonSettings)
def horizon(
    settings: HorizonSettings,
    models: Annotated[list[str], typer.Argument(metavar="MODEL...", help="Recurrent ones: runs, folders, Hub names.")],
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for JSON and figure.")] = None,
    config: Config = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """How far back a state helps, where in a window, and how deep in a document."""
    with user_errors():
        from ..evaluation import horizon as job
        from ..models.loading import need_state

        if out is not None:
            out.mkdir(parents=True, exist_ok=True)
        for name in models:
            need_state(name)
        results = []
        for name in models:
            results.append(job.survey(name, settings, device=device))
            if out is not None:
                job.write(results, out)
        typer.echo(json.dumps(results) if as_json else "\n\n".join(map(job.markdown, results)))


app.command()(topics)
app.command()(samples)


@app.command()
def inspect(
    model: Annotated[str, typer.Argument(help="A recurrent model: a run, a folder or a Hub name.")],
    text: Annotated[str, typer.Option(help="A text file, or - for standard input.")],
    out: Annotated[Path, typer.Option(help="The page to write: report.html.")],
    top: Annotated[int, typer.Option(help="Alternatives shown for each token, with the state and without.")] = 5,
    overlap: Annotated[int | None, typer.Option(help=OVERLAP)] = None,
    max_tokens: Annotated[int | None, typer.Option(help="The first so many tokens of the text.")] = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """See what is carried: a page that shows a text coloured by how much the state helped each token."""
    with user_errors():
        from ..analysis.inspect import write_page

        done = write_page(model, text, out, top=top, overlap=overlap, max_tokens=max_tokens, device=device)
        told = (
            f"{out}: {done['tokens']:,} tokens in {done['windows']:,} windows, perplexity {done['perplexity']:,.2f} "
            f"with the state, {done['perplexity_without']:,.2f} without"
        )
        typer.echo(json.dumps(done) if as_json else told)


@app.command()
@options(WriteSettings)
def generate(
    settings: WriteSettings,
    model: Annotated[str, typer.Argument(help="A run, a folder or a Hub name; recurrent, or plain.")] = BUNDLED,
    source: Annotated[str | None, typer.Argument(metavar="[-]", help="- reads the prompt from standard input.")] = None,
    prompt: Annotated[str | None, typer.Option(help="The text to go on from.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="A file that holds it.")] = None,
    state_in: Annotated[Path | None, typer.Option(help="Go on from where --state-out stopped.")] = None,
    state_out: Annotated[Path | None, typer.Option(help="Where to keep the state of the whole text.")] = None,
    config: Config = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Write on from a prompt, without a length limit. The text goes to stdout as it is written."""
    with user_errors():
        from . import generate

        if model == "-" and source is None:  # `carryforward generate -`
            model, source = BUNDLED, "-"

        record = generate.write(
            model, generate.read_prompt(prompt, prompt_file, source), settings, state_in=state_in, state_out=state_out,
            device=device, show=None if as_json else _show,
        )  # fmt: skip
        if as_json:
            typer.echo(json.dumps(record))
        elif sys.stdout.isatty():
            typer.echo()
        generate.told(record)
        if record["ended"] == "interrupted":
            raise typer.Exit(130)


@app.command()
@options(EmbedSettings)
def embed(
    settings: EmbedSettings,
    model: Annotated[str, typer.Argument(help="A recurrent model, or a plain one, read in windows that stand alone.")],
    documents: Annotated[Path, typer.Argument(help="JSON lines, one document each.")],
    out: Annotated[
        Path, typer.Option(help="vectors.parquet, .npy or .safetensors. Interrupted, the same command goes on.")
    ],
    config: Config = None,
    device: Device = None,
    as_json: Json = False,
) -> None:
    """Vectors of whole documents, of their tokens or of their windows."""
    with user_errors():
        from ..embeddings.embed import embed as embed_file

        done = embed_file(model, documents, out, settings, device=device)
        told = f"{out}: {done['documents']:,} documents" + f", {len(done['skipped'])} lines skipped" * bool(
            done["skipped"]
        )
        typer.echo(json.dumps(done) if as_json else told)


@app.command()
def flops(
    model: Annotated[str, typer.Option(help="A Hub name or a folder.")] = BUNDLED,
    window: Annotated[int | None, typer.Option(help="Tokens read at once; a recurrent model's own, or 300.")] = None,
    overlap: Annotated[list[int] | None, typer.Option(help="One or several.")] = None,
    as_json: Json = False,
) -> None:
    """FLOPs per token: the paper's count, what recurrence adds, and the vocabulary projection."""
    with user_errors():
        from ..config import RecurrenceConfig, RecurrentModelConfig
        from ..evaluation.flops import flops_per_token
        from ..evaluation.report import flops_table
        from ..models.loading import load_config

        settings = load_config(model)
        recurrence = None
        if not isinstance(settings, RecurrentModelConfig):
            recurrence = RecurrenceConfig(window=window or 300)
        rows = [
            {"overlap": o, **dataclasses.asdict(flops_per_token(settings, window, o, recurrence=recurrence))}
            for o in overlap or [0]
        ]
        typer.echo(json.dumps(rows) if as_json else flops_table(rows))


@app.command()
def report(
    results: Annotated[list[Path], typer.Argument(help="Result JSON files, or folders to search for them.")],
    out: Annotated[Path | None, typer.Option(file_okay=False, help="Folder for table, CSV and figure.")] = None,
) -> None:
    """Results of `evaluate` as one table, CSV and figure."""
    with user_errors():
        from ..evaluation import report as reports

        loaded = reports.load(results)
        if out is not None:
            reports.write(loaded, out)
        typer.echo(reports.markdown(loaded))


@app.command()
def reproduce(
    what: Annotated[str, typer.Argument(help="A folder of experiments: table2, windows, alternatives, ...")],
    setting: Annotated[str, typer.Option(help="One of its recipes.")] = BUNDLED,
    experiments: Annotated[Path, typer.Option(help="Where the experiments are.")] = Path("experiments"),
    work: Annotated[Path, typer.Option(help="Where models are kept while they are trained and scored.")] = Path("runs"),
    model: Annotated[str | None, typer.Option(help="The base model, if it is elsewhere.")] = None,
    data: Annotated[str | None, typer.Option(help="The text, if it is elsewhere.")] = None,
    cell: Annotated[list[str] | None, typer.Option(help="Only these: plain, or one seed of it, plain-seed1.")] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Cells run at once, each in a process of its own.")] = 1,
    test: Annotated[bool, typer.Option("--test", help="Score the test split too: once, when nothing is open.")] = False,
    tables_only: Annotated[bool, typer.Option("--tables-only", help="Run nothing; write the pages anew.")] = False,
    pages: Annotated[bool, typer.Option(help="--no-pages leaves the pages as they are.")] = True,
    keep_models: Annotated[bool, typer.Option(help="--no-keep-models removes each once it is scored.")] = True,
    device: Device = None,
) -> None:
    """The paper's tables, figures and claims: run what is missing, and write the pages anew."""
    with user_errors():
        from ..reproduction import pages as published
        from ..reproduction import parallel, recipes, run

        use_cpu = only_cpu(device)
        recipe = recipes.read(recipes.path_of(experiments, what, setting), model=model, data=data)
        cells, folder = tuple(cell or ()), work / what / setting
        if jobs > 1 and not tables_only:
            names = [one.name for one, some in run.unfinished(recipe, cells, test) if some and not one.borrowed]
            options = {"setting": setting, "experiments": experiments, "work": work, "model": model, "data": data,
                       "device": device}  # fmt: skip
            given = [f"--{name}={value}" for name, value in options.items() if value is not None]
            flags = ["--no-pages", *["--test"] * test, *["--no-keep-models"] * (not keep_models)]
            command = ["-m", "carryforward", "reproduce", what, *given, *flags, "--cell"]
            parallel.run_side_by_side({name: [*command, name] for name in names}, folder, jobs)
        elif not tables_only:
            run.run(recipe, folder, labels=cells, test=test, keep_models=keep_models, use_cpu=use_cpu)
        if not pages:
            return
        for page in published.publish(experiments):
            typer.echo(page)
