"""Make the relative links and pictures of a Markdown file absolute, for pages outside the repository, such as PyPI's.

python scripts/tools/absolute_links.py FILE OWNER/NAME TAG
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

_LINK = re.compile(r"\]\(([^)#:\s][^):\s]*)\)")
_PICTURES = (".png", ".gif", ".webp", ".jpg", ".svg")


def with_absolute_links(text: str, repository: str, tag: str) -> str:
    """Return a text whose links and pictures are those of a tag of a repository on GitHub."""
    raw, page = f"https://raw.githubusercontent.com/{repository}/{tag}", f"https://github.com/{repository}/blob/{tag}"

    def absolute(link: re.Match) -> str:
        return f"]({raw if link[1].endswith(_PICTURES) else page}/{link[1]})"

    return _LINK.sub(absolute, text)


def main() -> None:
    file, repository, tag = sys.argv[1:]
    path = Path(file)
    path.write_text(with_absolute_links(path.read_text(encoding="utf-8"), repository, tag), encoding="utf-8")


if __name__ == "__main__":
    main()
