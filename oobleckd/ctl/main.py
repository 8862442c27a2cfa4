"""The ``oobleckctl`` command: its verbs by name, loaded when used, and the options that all of them know.

Start-up is promised to be quick (``--version`` in under 100 ms), so a verb's module is imported when the verb
is called, and this module imports nothing but click.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from itertools import pairwise
from typing import Any, NoReturn

import click
from click.shell_completion import CompletionItem

from oobleckd import __version__

# verb -> (module under oobleckd.ctl, one line of help). The line is here so that --help imports nothing.
# A verb's module is loaded when it is used: --version takes under 100 ms, and torch alone takes six seconds
# to import. (D-service-002)
VERBS: dict[str, tuple[str, str]] = {
    "up": ("cluster", "Start a whole cluster on this machine."),
    "down": ("cluster", "End the cluster that up started."),
    "start-node": ("cluster", "Start a node of the local cluster again."),
    "logs": ("logs", "Show the training log of a job, or the logs of the local cluster."),
    "keygen": ("cluster", "Make the keys of a cluster."),
    "token": ("token", "Make or drop a token for the API on TCP."),
    "plan": ("plan", "Say what a job would do on so many nodes, without a cluster."),
    "simulate": ("simulate", "Simulate a job on nodes that fail, under each policy."),
    "data": ("data", "Prepare the text of a job, count it, and show its samples."),
    "init": ("starter", "Write a job.toml to begin with."),
    "explain": ("explain", "Say what a key of a job.toml or of the settings means."),
    "submit": ("jobs", "Hand in a job."),
    "pause": ("jobs", "Stop a job at the next step's boundary."),
    "resume": ("jobs", "Let a paused job go on."),
    "cancel": ("jobs", "End a job for good."),
    "delete": ("delete", "Take a job that is over out of the lists."),
    "checkpoint": ("jobs", "Write a checkpoint at the next step's boundary."),
    "wait": ("waiting", "Wait for a step, a state, or the end of a recovery."),
    "verify": ("verify", "Compare a job bit by bit with a run without failures."),
    "eval": ("evaluate", "Evaluate a checkpoint on text, without training on."),
    "export": ("export", "Write a job's model to a folder for transformers."),
    "status": ("show", "Show the daemon's headline."),
    "get": ("get.verb", "List jobs, nodes, incidents, pipelines, templates, layers, steps or goodput."),
    "describe": ("show", "Show everything about one job, node, incident or schedule."),
    "plot": ("plot", "Draw the curves of a job's whole run."),
    "report": ("report", "Write a report of a job as one HTML file."),
    "what-if": ("watch", "Say what would follow if nodes died now."),
    "export-incident": ("watch", "Write an incident to a file, with the past around it."),
    "events": ("stream", "Show what happens."),
    "story": ("stream", "Show the causal chain of a node, job or incident."),
    "kill-node": ("nodes", "Inject a failure (where the daemon allows it)."),
    "drill": ("drill", "Play a script of faults against a job, and verify it."),
    "drain": ("nodes", "Take a node out of the plan without a failure."),
    "undrain": ("nodes", "Let a drained node take part again."),
    "forget-node": ("nodes", "Expect a node that is gone for good no more."),
    "config": ("config", "Show settings, and where they come from."),
    "doctor": ("doctor", "Check this machine and its cluster."),
    "debug": ("debug", "Gather what helps to find a fault, in one file."),
    "install-systemd": ("systemd", "Install daemon and workers as services."),
    "completion": ("completion", "Print the completion script of a shell."),
}


OTHER_TOOLS = {
    "apply": "submit", "cordon": "drain", "create": "submit", "edit": "submit --set", "kill": "kill-node",
    "list": "get jobs", "log": "logs", "ls": "get jobs", "ps": "get jobs", "rm": "delete", "run": "submit",
    "sbatch": "submit", "scale": "submit --set", "scancel": "cancel", "show": "describe",
    "sinfo": "get nodes", "squeue": "get jobs", "stop": "cancel", "top": "get nodes -o wide",
    "uncordon": "undrain", "watch": "get jobs -w",
}  # fmt: skip
"""What the verbs of kubectl, Slurm and a shell are called here."""


class Verbs(click.Group):
    """A group that imports the module of a verb when the verb is used."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        """Every verb, in the order in which a person meets them."""
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002 - the same
        """The command of a verb; None for an unknown one."""
        if cmd_name not in VERBS:
            return None
        module = import_module(f"oobleckd.ctl.{VERBS[cmd_name][0]}")
        command = getattr(module, cmd_name.replace("-", "_"))
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Verbs from the table above: completing them loads none of them."""
        verbs = [
            CompletionItem(verb, help=text)
            for verb, (_, text) in VERBS.items()
            if verb.startswith(incomplete)
        ]
        return [*verbs, *click.Command.shell_complete(self, ctx, incomplete)]

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click does, with a suggestion for a mistyped verb."""
        if args and args[0] not in VERBS and not args[0].startswith("-"):
            from difflib import get_close_matches

            known = OTHER_TOOLS.get(args[0])
            close = [known] if known is not None else get_close_matches(args[0], VERBS, n=1)
            also = f"; did you mean {close[0]!r}?" if close else ""
            ctx.fail(f"no verb {args[0]!r}{also}")
        if any(word == "" and not before.startswith("-") for before, word in pairwise(args)):
            ctx.fail("a word is empty where a name was to stand: is a variable not set?")
        return super().resolve_command(ctx, args)

    def main(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Run the command line; every failure becomes words on stderr and the documented exit code."""
        _stand_in()
        kept: dict[str, Any] = {}
        try:
            code = super().main(*args, **{**kwargs, "standalone_mode": False, "obj": kept})
        except click.UsageError as error:
            from oobleckd.host import usage

            command = error.ctx.command_path if error.ctx else "oobleckctl"
            _end(kept, usage.problem_of(error), f"see `{command} --help`", 2)
        except click.Abort:
            sys.exit(130)
        except BrokenPipeError:
            _let_go()
            sys.exit(1)
        except Exception as error:
            # Only a verb's module can raise a Failure; importing it before would cost start-up time.
            from oobleckd.ctl.output import Failure, OutputLost

            if isinstance(error, OutputLost):
                _let_go()
                _end(kept, error.problem, error.hint, 1)
            if isinstance(error, Failure):
                _end(kept, error.problem, error.hint, error.code)
            if "OOBLECK_TRACEBACK" in os.environ:
                raise
            _end(kept, *_unforeseen(error), 2 if isinstance(error, UnicodeEncodeError) else 1)
        sys.exit(code if isinstance(code, int) else 0)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002 - the same
        """The list of verbs, without loading them."""
        with formatter.section("Verbs"):
            formatter.write_dl([(verb, text) for verb, (_, text) in VERBS.items()])


def _unforeseen(error: Exception) -> tuple[str, str]:
    """Words for what no verb has words for: something of this machine, or a fault of ours."""
    if isinstance(error, UnicodeEncodeError):
        return f"{error.object!r} is no text: it is not UTF-8", "write it in UTF-8"
    if isinstance(error, OSError):
        where = f"{error.filename}: " if error.filename else ""
        return (
            f"{where}{error.strerror or error}",
            "see whether this user may use it, and whether the disk is full",
        )
    return (
        f"a fault of oobleckctl: {type(error).__name__}: {error}",
        "OOBLECK_TRACEBACK=1 shows where: please report it",
    )


def _end(kept: dict[str, Any], problem: str, hint: str, code: int) -> NoReturn:
    """Say what is wrong and what to do next, in words or, for a program, as a document; then end."""
    from oobleckd.ctl.output import error_document
    from oobleckd.ctl.pages import located
    from oobleckd.protocol.text import visible

    loaded = kept.get("loaded")
    output = loaded.config.output if loaded is not None else kept.get("output")
    problem, hint = visible(located(problem)), visible(located(hint))
    with suppress(OSError):  # nobody reads it any more; the exit code says it, too
        if output in {"json", "yaml"}:
            click.echo(error_document(problem, hint, code, output), err=True)
        else:
            click.echo(f"error: {problem}", err=True)
            if hint:
                click.echo(f"hint: {hint}", err=True)
    sys.exit(code)


def _let_go() -> None:
    """Nobody takes what we print: Python must not try, and complain, once more at its end."""
    if sys.stdout is not None:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _stand_in() -> None:
    """Whoever started us without stdin, stdout or stderr must not have the next file that we open take its
    place.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(__version__, prog_name="oobleckctl")
@click.option("--socket", metavar="PATH", help="The daemon's socket (or OOBLECK_SOCKET).")
@click.option("-o", "--output", type=click.Choice(["table", "json", "yaml"]), help="How to print data.")
@click.pass_context
def main(ctx: click.Context, socket: str | None, output: str | None) -> None:
    """Train large models that keep going when machines die.

    Data goes to stdout, words to stderr. Exit codes: 0 done, 1 failed, 2 usage, 3 not found or condition
    false, 4 daemon unreachable, 5 refused, 6 the job's steps were not finite, or spikes, 7 its data
    changed, 8 it does not fit a device's memory, 124 timed out.
    """
    ctx.ensure_object(dict).update(socket=socket, output=output)


if __name__ == "__main__":
    main()
