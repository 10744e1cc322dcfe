"""Turn the Sphinx markup of docstrings into Markdown for the API pages (mkdocs.yml names this file)."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:attr|class|data|exc|func|meth|mod):`(~?)([^`]+)`")
_LITERAL = re.compile(r"^ *::$", re.MULTILINE)
_SESSION = re.compile(r"^>>> .*(?:\n.+)*", re.MULTILINE)


def to_markdown(text: str) -> str:
    """Return the text with roles as code, sessions as blocks, and without ``::`` before a literal block.

    >>> to_markdown("see :func:`~packhorse.media.load_image` and :meth:`Loader.state_dict`")
    'see `load_image` and `Loader.state_dict`'
    """
    text = _ROLE.sub(lambda role: f"`{role[2].rpartition('.')[2] if role[1] else role[2]}`", text)
    return _SESSION.sub(r"```pycon\n\g<0>\n```", _LITERAL.sub("", text))


class DocsRoles(griffe.Extension):
    """Converts every docstring that is loaded."""

    def on_object(self, *, obj: griffe.Object, **options: Any) -> None:
        """Convert the docstring of a module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = to_markdown(obj.docstring.value)
