"""`dovetail data prepare`: writes a public dataset as Parquet files that can be trained on directly, with a card."""

from __future__ import annotations

import shlex
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import click

from dovetail.telemetry import visible

if TYPE_CHECKING:
    from dovetail_datasets.prepare.recipe import DataRecipe
    from dovetail_datasets.prepare.writing import WrittenSplits


@click.command()
@click.argument("recipe", metavar="[NAME[:ARGUMENT]]", required=False)
@click.argument("overrides", metavar="[KEY=VALUE]...", nargs=-1)
@click.option(
    "--from",
    "folder",
    metavar="DIR",
    type=click.Path(path_type=Path, exists=True, file_okay=False),
    help="A local copy of the dataset, laid out as on the hub.",
)
@click.option("--revision", help="Commit, branch or tag on the hub; by default the latest.")
@click.option(
    "--output",
    type=click.Path(path_type=Path, file_okay=False),
    help="The folder to create.  [default: data/NAME]",
)
def prepare(
    recipe: str | None,
    overrides: tuple[str, ...],
    folder: Path | None,
    revision: str | None,
    output: Path | None,
) -> None:
    r"""Write a public dataset as Parquet files that are ready to train on; without NAME, list the recipes.

    \b
      dovetail data prepare gsm8k
      dovetail data prepare hh_rlhf:helpful-base --from downloads/hh-rlhf
      dovetail data prepare reasoning_gym:leg_counting size=2000

    Files come from the hub, or from a local copy. A card is written too: the origin of the rows, their licence and digests, and the
    changes. `dovetail plugins show data_recipe/NAME` describes the settings of a recipe.
    """
    from dovetail_datasets.prepare.settings import recipe_named, recipes

    if recipe is None:
        if folder or revision or output:
            raise click.UsageError(
                "--from, --revision and --output need the name of a recipe; `dovetail data prepare` without arguments lists the recipes"
            )
        for name, distribution, line in recipes():
            click.echo(visible(f"{name:24}{line}  ({distribution})"))
        return
    made = recipe_named(recipe, overrides)
    if (folder or revision) and not made.repository:
        raise click.UsageError(
            f"the recipe {made.name!r} generates its rows instead of reading files: leave out --from and --revision"
        )
    if folder and revision:
        raise click.UsageError(
            "--revision selects a revision on the hub and can't be combined with --from: leave one of them out"
        )
    argument = recipe.partition(":")[2]
    output = output or Path("data") / (f"{made.name}_{argument}" if argument else made.name)
    at = ("--from", str(folder)) if folder else ("--revision", revision) if revision else ()
    command = shlex.join(("dovetail", "data", "prepare", recipe, *overrides, *at))
    written = _prepared(made, folder, revision, output, command)
    _tell(made, output, written)


def _prepared(
    recipe: DataRecipe, folder: Path | None, revision: str | None, output: Path, command: str
) -> WrittenSplits:
    """Write the prepared files and their card to `output`, which appears only when both are complete.

    Args:
        recipe: the recipe of the dataset.
        folder: the folder with the dataset's files; by default they are downloaded.
        revision: the revision to download.
        output: the folder to create.
        command: the command to name on the card.

    Raises:
        DataError: `output` already exists; and see `download` and `RecipeWriter.write`.
    """
    from dovetail.errors import DataError
    from dovetail_datasets.prepare.card import Origin, card
    from dovetail_datasets.prepare.hub import download
    from dovetail_datasets.prepare.writing import RecipeWriter

    if output.exists():
        raise DataError(
            f"the path {output} exists already; expected a folder that does not exist",
            hint="name another folder with --output, or remove this one",
        )
    recipe.start()
    try:
        if recipe.repository and folder is None:
            folder = download(recipe.repository, recipe.patterns().values(), revision)
        origin = Origin(folder=folder or Path(), command=command)
        output.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{output.name}-", dir=output.parent))
        try:
            written = RecipeWriter(recipe, origin.folder).write(partial)
            text = card(recipe, origin, partial, written)
            (partial / "README.md").write_text(text, encoding="utf-8")
            partial.chmod(0o755)
            partial.rename(output)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    finally:
        recipe.close()
    return written


_TRAINING = {
    "prompts": (),
    "conversations": ("trainer=supervised",),
    "preferences": ("trainer.name=supervised", "trainer.examples=preferences", "actor.objective=dpo"),
    "unpaired_preferences": (
        "trainer.name=supervised",
        "trainer.examples=unpaired_preferences",
        "actor.objective=kto",
    ),
}  # fmt: skip
"""Settings that train on rows, by kind of example."""


def _tell(recipe: DataRecipe, output: Path, written: WrittenSplits) -> None:
    """Print the files that were written, and suggested next commands."""
    for split, rows in written.rows.items():
        click.echo(visible(f"{output / f'{split}.parquet'}: {rows:,} rows"))
    for reason, rows in written.left_out.items():
        click.echo(visible(f"  left out: {rows:,}, {reason}"))
    click.echo(visible(f"{output / 'README.md'}: where they come from, and what was changed"))
    if recipe.scored_by:
        click.echo(f"rewards: the function {recipe.scored_by}, which the rows' data_source selects")
    model, train = f"model.path={recipe.model}", output / "train.parquet"
    files = (f"data.train_files={train}", f"data.val_files={output / 'validation.parquet'}")
    click.echo("next:")
    for command in (
        ("data", "look", str(train), model),
        ("train", model, *files, *_TRAINING[recipe.rows_are]),
    ):
        click.echo(visible(f"  {shlex.join(('dovetail', *command))}"))
