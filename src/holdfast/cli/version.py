"""`holdfast version`: print the version of the package on one line."""

import typer

from holdfast import __version__

app = typer.Typer(add_completion=False)


@app.command()
def version() -> None:
    """Print the version."""
    typer.echo(__version__)
