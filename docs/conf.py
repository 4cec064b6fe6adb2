"""Configuration of the documentation; build it with ``make docs``."""

from __future__ import annotations

import os
import re

from sphinx.util import inspect as sphinx_inspect

import pullback

project = "pullback"
author = "The pullback developers"
copyright = "the pullback developers, MIT license"
release = version = pullback.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.mathjax",
    "sphinx-mathjax-offline",  # formulas show without a network
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]
exclude_patterns = ["_build", "jupyter_execute"]
html_theme = "furo"
html_title = "pullback"
html_static_path = ["_static"]
html_css_files = ["custom.css"]

# A page is no place for progress bars.
os.environ["TQDM_DISABLE"] = "1"

# Every snippet is run at every build, and one that raises or warns fails the build.
nb_execution_mode = "force"
nb_execution_timeout = 900
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_render_markdown_format = "myst"
myst_enable_extensions = ["amsmath", "attrs_inline", "colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

# `name` in a docstring is a Python object: a link where the documentation has it, code where it has not.
default_role = "py:obj"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
# Types of attributes are in the signature; shapes such as "*batch" would be read as markup.
napoleon_attr_annotations = False
autodoc_preserve_defaults = True
python_maximum_signature_line_length = 110
add_module_names = False

# An open function is one entry, not one for each of its rules.
sphinx_inspect.is_singledispatch_function = lambda obj: False


def _skip_routing(app, what, name, obj, skip, options):
    """What scikit-learn adds to every estimator is documented there."""
    return skip or bool(re.fullmatch(r"set_\w+_request|get_metadata_routing", name))


def setup(app):
    app.connect("autodoc-skip-member", _skip_routing)
