"""The names in `keep`, and the JSON file of them that ``turbo-rcm verify --keep-out`` writes.

A name is the path of a module whose weights stay in the model's dtype, or of the processor of a self-attention that
computes in the model's dtype: "blocks.3.ffn.net.2", "blocks.3.attn1.processor". Names have wildcards.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path

VERSION = 1
ATTENTION = ".processor"  # the end of a name that means an attention itself, and not its linears
REMEDY = "give a list of names, such as ['blocks.0'], or a file that turbo-rcm verify --keep-out wrote."


class KeepList(tuple[str, ...]):
    """Names from a file, and the model that they were measured on.

    Attributes:
        path: the file.
        model: the class of the transformer. sizes: entries of its config.
    """

    path: str
    model: str
    sizes: Mapping[str, object]

    @classmethod
    def read(cls, path: str | Path) -> KeepList:
        """Return the names in a file. Raises ValueError if `verify --keep-out` of this version did not write it."""
        try:
            content = json.loads(Path(path).expanduser().read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"keep={str(path)!r}: no such file; {REMEDY}") from None
        except (OSError, ValueError) as error:
            raise ValueError(f"keep={str(path)!r}: cannot read it as JSON ({error}); {REMEDY}") from None
        version = content.get("version") if isinstance(content, dict) else None
        if version != VERSION or not _has_fields(content):
            found = "it holds other data" if version in (None, VERSION) else f"it has version {version}, not {VERSION}"
            raise ValueError(f"keep={str(path)!r}: {found}; {REMEDY}")
        names = cls(entry["name"] for entry in content["keep"])
        names.path, names.model, names.sizes = str(path), content["model"], content["sizes"]
        return names

    def why_not_for(self, model: str, config: Mapping[str, object]) -> str | None:
        """Return why the list is not for a transformer of this class and config, or None."""
        others = json.loads(json.dumps({name: config.get(name) for name in self.sizes}))  # tuples are lists in files
        if (model, others) == (self.model, dict(self.sizes)):
            return None
        given = ", ".join(f"{name}={value}" for name, value in self.sizes.items())
        own = ", ".join(f"{name}={value}" for name, value in others.items())
        return (
            f"keep={self.path!r} was measured on a {self.model} with {given}, and this is a {model} with {own}; make "
            "its own list with turbo-rcm verify --keep-out."
        )


def _has_fields(content: Mapping[str, object]) -> bool:
    """True if the fields that are read have the right types."""
    names = content.get("keep")
    return (
        isinstance(content.get("model"), str)
        and isinstance(content.get("sizes"), dict)
        and isinstance(names, list)
        and all(isinstance(entry, dict) and isinstance(entry.get("name"), str) and entry["name"] for entry in names)
    )


def is_of_attention(name: str) -> bool:
    """True if a name or pattern means an attention itself."""
    return name.endswith(ATTENTION)


def keeps_weights(path: str, patterns: Iterable[str]) -> bool:
    """True if one of the patterns matches the path of a module or of one that contains it."""
    parts = path.split(".")
    holders = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    return any(fnmatchcase(holder, pattern) for holder in holders for pattern in patterns)


def keeps_attention(path: str, patterns: Iterable[str]) -> bool:
    """True if one of the patterns names the attention at this path."""
    return any(is_of_attention(pattern) and fnmatchcase(f"{path}{ATTENTION}", pattern) for pattern in patterns)
