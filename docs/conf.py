"""Sphinx settings of the documentation, which `make docs` builds in build/docs."""

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
default_role = "py:obj"  # a name in backticks links to its documentation
autodoc_typehints = "none"  # the signature shows them
napoleon_preprocess_types = False


class CommandHelp(SphinxDirective):
    """A section for each command with its --help text."""

    def run(self) -> list[nodes.Node]:
        sections: list[nodes.Node] = []
        with click.Context(cli, info_name="comera") as context:
            for name in cli.list_commands(context):
                command = cli.get_command(context, name)
                assert command is not None, "it is listed"
                section = nodes.section(ids=[name])
                section += nodes.title(text=f"comera {name}")
                with click.Context(command, info_name=name, parent=context, max_content_width=100) as inner:
                    section += nodes.literal_block(text=command.get_help(inner), language="none")
                sections.append(section)
        return sections


def _escape(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Escape what Sphinx would take for markup in docstrings: bars, stars, and plural endings behind backticks."""
    lines[:] = [re.sub(r"(`[^`\s]+`)(?=\w)", r"\1\\ ", line.replace("|", "\\|").replace("*", "\\*")) for line in lines]


def setup(app: Sphinx) -> None:
    """Register the directive and the escaping of docstrings; Sphinx calls this."""
    app.add_directive("command-help", CommandHelp)
    app.connect("autodoc-process-docstring", _escape, priority=400)  # before napoleon adds its own markup
