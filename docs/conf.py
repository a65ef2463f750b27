"""How Sphinx makes the site: ``make docs``. The source is the whole checkout, so that links between pages hold there as
they do in the repository; of it only the documents are pages."""

from __future__ import annotations

import os
import sys
from pathlib import Path

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
html_static_path = ["static"]
html_js_files = ["versions.js"]
html_css_files = ["site.css"]

# `make linkcheck`: anchors that scripts make, and what answers only people.
linkcheck_anchors_ignore_for_url = [r"https://github\.com/.*"]
linkcheck_timeout = 20
linkcheck_workers = 4

# Worked pages are notebooks, which are executed in folders of their own, each cell of commands by a shell; a cell that
# fails ends the build.
nb_execution_mode = os.environ.get("DOCS_EXECUTE", "force")
nb_execution_in_temp = True
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 120
nb_merge_streams = True
HERE = Path(__file__).parent
kernel = HERE.parent / "build" / "ipython" / "profile_default" / "startup"
kernel.mkdir(parents=True, exist_ok=True)
(kernel / "shell.py").write_text((HERE / "kernel.py").read_text(encoding="utf-8"), encoding="utf-8")
os.environ |= {
    "IPYTHONDIR": str(kernel.parents[1]),
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    "COLUMNS": "100",
    "DASK_TILEWRIGHT__JOBS_FOLDER": "/home/ann/.local/state/tilewright/jobs",
}

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
