"""The commands. One module each, which imports what it needs when it runs, so that `zerogap --help` is instant."""

import sys

import typer
from rich.console import Console

from zerogap.cli.audit import audit
from zerogap.cli.demo import demo
from zerogap.cli.diagnose import diagnose
from zerogap.cli.eval import evaluate
from zerogap.cli.export import export
from zerogap.cli.generate import generate
from zerogap.cli.inspect import inspect
from zerogap.cli.train import train
from zerogap.cli.verify import verify
from zerogap.errors import ConfigError, ZerogapError

app = typer.Typer(
    name="zerogap",
    help="Reinforcement learning for language models whose rollout engine and trainer compute the same bits.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
for _command in (demo, train, audit, verify, diagnose, inspect, generate, export):
    app.command()(_command)
app.command("eval")(evaluate)


def main() -> None:
    """Entry point. A user's mistake ends with its message and exit code 2, any other deliberate error with 1."""
    try:
        app()
    except ZerogapError as error:
        console = Console(stderr=True, highlight=False, soft_wrap=True)
        console.print(f"[bold red]{type(error).__name__}[/]:", end=" ")
        console.print(str(error), markup=False)
        sys.exit(2 if isinstance(error, ConfigError) else 1)
