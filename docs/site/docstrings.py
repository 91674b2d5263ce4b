"""Docstrings as Markdown: roles of Sphinx become links or code, `::` an ordinary colon."""

import re
from typing import Any

import griffe

ROLE = re.compile(r":(?:func|class|meth|attr|mod|data):`~?([\w.]+)`")


def to_markdown(text: str) -> str:
    text = ROLE.sub(_link, text)
    text = re.sub(r"(?m)(?<=\w)::$", ":", text)
    return re.sub(r"(?m) ::$", "", text)


def _link(role: re.Match[str]) -> str:
    name = role[1]
    # Names without a module are those next to it; others may not be on the page.
    return f"[`{name}`][{name}]" if name.startswith("bitsparse.") else f"`{name}`"


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = to_markdown(obj.docstring.value)
