"""Configuration of Sphinx: Markdown as GitHub shows it, and a page that needs no network."""

from __future__ import annotations

from importlib.metadata import version as version_of

project = "autoptd"
release = version_of("autoptd")
html_title = f"autoptd {release}"

extensions = ["myst_parser"]
# `%`, `{…}` and `(…)=` are text here, as on GitHub.
myst_disable_syntax = ["myst_line_comment", "myst_role", "myst_target", "myst_block_break"]
myst_heading_anchors = 4
highlight_language = "text"
smartquotes = False
python_maximum_signature_line_length = 80
python_use_unqualified_type_names = True

html_theme = "furo"
html_static_path = ["static"]
html_css_files = ["style.css"]
html_copy_source = False
html_show_sourcelink = False
html_show_copyright = False
html_show_search_summary = False  # it would fetch each page that was found, which browsers refuse for local files
pygments_style = "tango"
pygments_dark_style = "github-dark"
