"""The ``rlightning`` command: thin entry points, which import what they need when they run."""

# ruff: noqa: D301  (the backspace in the docstrings is click's mark for a paragraph that is not to be rewrapped)

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Literal, NoReturn

import typer

app = typer.Typer(
    name="rlightning",
    no_args_is_help=True,
    # Plain help: a third of the start-up time of rich's panels, and readable at 40 columns.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

OutputFormat = Literal["text", "json"]


def main() -> NoReturn:
    """Entry point of the console script. Errors that are meant for users end it without a traceback of ours."""
    from rlightning.errors import RLightningError

    try:
        app()
    except RLightningError as error:
        from rlightning.cli.failures import exit_code

        print(f"error: {error}", file=sys.stderr)
        sys.exit(exit_code(error))
    sys.exit(0)


def _version(wanted: bool) -> None:
    if wanted:
        from rlightning import __version__

        print(f"rlightning {__version__}")
        raise typer.Exit()


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Train reinforcement-learning policies from one manifest, on a laptop and on Kubernetes.

    \b
    Examples:
      rlightning validate manifests/cartpole.yaml
      rlightning run manifests/cartpole.yaml
      rlightning verify runs/cartpole/1
      rlightning evaluate runs/cartpole/1
    """


@app.command()
def validate(
    files: Annotated[list[str], typer.Argument(metavar="FILE...", help="Manifests to check; - reads standard input.")],
    output: Annotated[OutputFormat, typer.Option("--output", "-o", help="Format of the result.")] = "text",
) -> None:
    """Check manifests offline, by the rules that the API server applies.

    Says for each problem the file, line, field, value and what to do.

    \b
    Examples:
      rlightning validate manifests/*.yaml
      kustomize build jobs/ | rlightning validate -

    Exit status: 0 all valid, 1 problems found.
    """
    from rlightning.cli.validate import validate_files

    raise typer.Exit(validate_files(files, output))


@app.command()
def run(
    manifest: Annotated[
        Path | None,
        typer.Argument(metavar="[MANIFEST]", help="An RLJob; may be left out with --resume.", show_default=False),
    ] = None,
    placement: Annotated[
        Literal["local", "ray"],
        typer.Option(help="Where members live: all in this process, or as actors of a Ray on this machine."),
    ] = "local",
    run_dir: Annotated[
        Path | None,
        typer.Option(help="Parent folder of all runs. The run's folder is DIR/<job>/<n>.  [default: runs]"),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(min=0, max=2**31 - 1, help="Use this seed instead of spec.seed.", show_default=False)
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(
            metavar="RUN",
            help="Go on with this run from its last checkpoint. A manifest given as well may change what may change "
            "after the start (training.totalEnvSteps, evaluation, checkpoints…).",
            show_default=False,
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Only warnings and the result.")] = False,
) -> None:
    """Train on this machine.

    Results go to runs/<job>/<n>: status.json, metrics.jsonl, TensorBoard events, the ledger of weight versions,
    checkpoints and run.log.

    \b
    Ctrl-C (or SIGTERM) stops after the current iteration, saves a checkpoint and prints the command that
    resumes. A second Ctrl-C stops at once.

    \b
    Examples:
      rlightning run manifests/cartpole.yaml
      rlightning run manifests/cartpole.yaml --placement ray --seed 7
      rlightning run --resume runs/cartpole/1

    \b
    Exit status:
      0    succeeded: the total or the target was reached
      1    failed: the error is printed, run.log has the traceback
      2    the manifest or the command line cannot be used
      130  interrupted: resumable, if a checkpoint was saved
    """
    if manifest is None and resume is None:
        raise typer.BadParameter("give a MANIFEST, or a run to go on with: --resume RUN")
    if resume is not None and (run_dir is not None or seed is not None):
        raise typer.BadParameter("--run-dir and --seed are those of the run that --resume names; leave them out")
    from rlightning.cli.run import run_manifest

    raise typer.Exit(
        run_manifest(manifest, placement=placement, run_dir=run_dir, seed=seed, resume=resume, quiet=quiet)
    )


@app.command()
def verify(
    path: Annotated[
        Path, typer.Argument(metavar="RUN_OR_CHECKPOINT", help="A run's folder, or one of its checkpoints.")
    ],
) -> None:
    """Check that checkpoints are as they were saved, and that all members ran the learner's weights.

    Reads every byte of every checkpoint and every version in the ledger.

    \b
    Examples:
      rlightning verify runs/cartpole/1
      rlightning verify runs/cartpole/1/checkpoints/iter-00000040

    Exit status: 0 nothing found, 1 problems found.
    """
    from rlightning.cli.verify import verify_path

    raise typer.Exit(verify_path(path))


@app.command()
def evaluate(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")],
    episodes: Annotated[
        int | None, typer.Option(min=1, help="Episodes.  [default: evaluation.episodes]", show_default=False)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(min=0, max=2**31 - 1, help="Seed of the episodes.  [default: the run's]", show_default=False),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option(
            metavar="NAME", help="Which checkpoint, as iter-00000040.  [default: the last]", show_default=False
        ),
    ] = None,
    output: Annotated[OutputFormat, typer.Option("--output", "-o", help="Format of the result.")] = "text",
) -> None:
    """Play greedy episodes with the weights of a checkpoint.

    \b
    Examples:
      rlightning evaluate runs/cartpole/1
      rlightning evaluate runs/cartpole/1 --episodes 1000 --seed 3 --output json

    Exit status: 0 done, 1 failed.
    """
    from rlightning.cli.evaluate import evaluate_checkpoint

    raise typer.Exit(evaluate_checkpoint(run, episodes=episodes, seed=seed, checkpoint=checkpoint, output=output))


if __name__ == "__main__":
    main()
