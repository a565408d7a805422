"""`dovetail sft CONFIG [key=value …]`: supervised fine-tuning on a dataset's conversations."""

from __future__ import annotations

from typing import cast

import click

SETTINGS = ("trainer.name=supervised", "actor.objective=nll")
"""Settings of the command, to which the user's overrides are applied."""


@click.command()
@click.argument(
    "arguments", nargs=-1, required=True, metavar="[CONFIG] [KEY=VALUE]...", type=click.Path()
)
@click.option(
    "--accept-changes",
    is_flag=True,
    help="Continue a run that began with another model or data.",
)
@click.pass_context
def sft(context: click.Context, arguments: tuple[str, ...], accept_changes: bool) -> None:
    """Fine-tune on conversations: `dovetail train CONFIG trainer.name=supervised actor.objective=nll`.

    Rows of `data.train_files` have `messages`, in which every assistant turn is trained on, or `prompt` and `response`. The metrics
    `val/loss` and `val/perplexity` are measured on `data.val_files`, if given. The trained model is in the run's `final/`.
    """
    root = context.find_root()
    train = cast("click.Group", root.command).get_command(root, "train")
    context.invoke(
        cast("click.Command", train),
        arguments=(arguments[0], *SETTINGS, *arguments[1:]),
        accept_changes=accept_changes,
    )
