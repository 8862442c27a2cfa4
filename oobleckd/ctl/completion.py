"""The verb ``completion``: the script with which a shell completes oobleckctl's words.

The script asks oobleckctl itself, by way of a variable; which names there are is ``names``.
"""

from __future__ import annotations

import click
from click.shell_completion import get_completion_class

_PROGRAM = "oobleckctl"
_HELP = """Print the completion script of SHELL.

\b
bash: oobleckctl completion bash > ~/.local/share/bash-completion/completions/oobleckctl
zsh:  oobleckctl completion zsh > ~/.zfunc/_oobleckctl   (a folder of your fpath)
fish: oobleckctl completion fish > ~/.config/fish/completions/oobleckctl.fish
"""


@click.command(help=_HELP)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
@click.pass_context
def completion(ctx: click.Context, shell: str) -> None:
    """Print the script; what ``--help`` says is above, for its lines are to be kept."""
    kind = get_completion_class(shell)
    assert kind is not None
    variable = f"_{_PROGRAM.upper()}_COMPLETE"
    click.echo(kind(ctx.find_root().command, {}, _PROGRAM, variable).source())
