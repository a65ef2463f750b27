"""How Sphinx makes the site: ``make docs``. The source is the whole checkout, so that links between pages hold there as
they do in the repository; of it only the documents are pages."""

from __future__ import annotations

import tilewright

project = "Tilewright"
author = "the Tilewright contributors"
version = release = tilewright.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
root_doc = "docs/index"
include_patterns = ["README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs/*.md"]
html_theme = "furo"
html_title = f"Tilewright {version}"
html_show_copyright = False

# The pages' code is executed by the tests.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 6

autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
# Else overloads are shown in place of the parameters, which the text of each function explains.
autodoc_typehints = "none"
napoleon_google_docstring = False
napoleon_use_rtype = False
# Parameters that are explained together stay so.
napoleon_use_param = False
default_role = "py:obj"
nitpicky = False
