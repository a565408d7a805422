"""`dovetail sft CONFIG [key=value …]`: supervised fine-tuning on a dataset's conversations."""

from __future__ import annotations

from typing import cast

import click

SETTINGS = ("trainer.name=supervised", "actor.objective=nll")
"""What the command sets before its overrides."""


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

    Rows of `data.train_files` have `messages`, of which every assistant turn is trained on, or `prompt` and `response`. With
    `data.val_files`, loss and perplexity on these are in `val/loss` and `val/perplexity`. The model is in the run's `final/`.
    """
    root = context.find_root()
    train = cast("click.Group", root.command).get_command(root, "train")
    context.invoke(
        cast("click.Command", train),
        arguments=(arguments[0], *SETTINGS, *arguments[1:]),
        accept_changes=accept_changes,
    )
