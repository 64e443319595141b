"""Sphinx settings of the documentation site; `scripts/build_site.py` collects its pages."""

project = "shardwise"
author = "the shardwise developers"
html_title = "shardwise"
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 4  # links to headings as GitHub writes them
html_theme = "furo"  # no font, script or style from another host
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_show_sourcelink = False
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
smartquotes = False  # options begin with two hyphens
pygments_style = "friendly"
pygments_dark_style = "monokai"
highlight_language = "none"
