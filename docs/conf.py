"""The documentation's settings: `make docs` builds it into build/docs."""

import re
from importlib.metadata import version as version_of
from typing import Any

import click
from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from comera_rec.cli.main import cli

project = "comera-rec"
author = "the comera-rec authors"
version = release = version_of("comera-rec")
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
html_theme = "furo"
html_title = f"comera-rec {version}"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
default_role = "py:obj"  # a name in backticks is a link where it is documented
autodoc_typehints = "none"  # the signature has them
napoleon_preprocess_types = False


class CommandHelp(SphinxDirective):
    """What `comera --help` and the --help of every command print."""

    def run(self) -> list[nodes.Node]:
        found: list[nodes.Node] = []
        with click.Context(cli, info_name="comera") as context:
            for name in cli.list_commands(context):
                command = cli.get_command(context, name)
                assert command is not None, "it is listed"
                section = nodes.section(ids=[name])
                section += nodes.title(text=f"comera {name}")
                with click.Context(command, info_name=name, parent=context, max_content_width=100) as inner:
                    section += nodes.literal_block(text=command.get_help(inner), language="none")
                found.append(section)
        return found


def _escape(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Docstrings are written for readers of code: their bars and stars are no markup, and a plural follows a name in backticks."""
    lines[:] = [re.sub(r"(`[^`\s]+`)(?=\w)", r"\1\\ ", line.replace("|", "\\|").replace("*", "\\*")) for line in lines]


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-process-docstring", _escape, priority=400)  # before napoleon makes markup of its own
