"""Commands whose help is plain text."""

import typer.core
from click import Context
from typing_extensions import override


class PlainCommand(typer.core.TyperCommand):
    """A command whose ``--help`` shows what stands in brackets as it is.

    Where rich is installed, typer escapes ``[default: ray]`` for rich even if rich doesn't write the help.
    """

    @override
    def get_help(self, ctx: Context) -> str:
        return super().get_help(ctx).replace("\\[", "[")
