"""Words of messages that depend on a number, a name or a dtype."""

from __future__ import annotations


def counted(count: int, noun: str) -> str:
    """Return a count with its noun: "1 frame", "81 frames"."""
    return f"{count} {noun}{'s' * (count != 1)}"


def with_article(name: object) -> str:
    """Return a class's or another thing's name after "a" or "an": "an AutoencoderKL", "a UMT5"."""
    return f"{'an' if str(name)[:1].lower() in tuple('aeio') else 'a'} {name}"


def name_of_dtype(dtype: object) -> str:
    """Return the name of a torch.dtype without "torch."."""
    return str(dtype).removeprefix("torch.")
