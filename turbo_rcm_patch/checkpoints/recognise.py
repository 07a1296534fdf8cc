"""Recognise how a checkpoint was distilled from names, keys, ranks and shapes. Every guess is reported."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from .files import COMPONENTS, EXPERTS, HUB_ID, experts_in
from .lora import Lora

# The first that fits counts: Wan2.2-Lightning is in an organisation named lightx2v.
_NAMES = (
    ("lightning", re.compile(r"lightning|seko|4steps-lora")),
    ("causvid", re.compile(r"causvid")),
    ("fastwan", re.compile(r"fastwan")),
    ("turbot2av", re.compile(r"turbo-?t2av")),
    ("turbowan", re.compile(r"turbowan|turbodiffusion")),
    ("lightx2v", re.compile(r"lightx2v|step_distill|stepdistill")),
    ("rcm", re.compile(r"(?<![a-z])rcm(?![a-z])")),
)
# lightx2v's models with a shift of their own, and the words that their names contain.
_VARIANTS = {"lightx2v": (("lightx2v-flf2v", ("flf2v",)), ("lightx2v-nvfp4-i2v", ("nvfp4", "i2v")))}
_OURS = re.compile(r"turbo[-_]rcm([-_]patch)?")  # this package's folder, which says nothing about a checkpoint
_CACHED = "models--"  # how the hub's cache begins a folder's name, models--owner--name
_FOLDERS = 5  # the hub's cache keeps a file at most this many folders below the repository's name
_KEYS = {
    "fastwan": ("to_gate_compress", "gates of video sparse attention (VSA)"),
    "turbowan": ("local_attn.proj_l", "tensors of sparse-linear attention's (SLA) linear branch"),
}
PERHAPS_GATES = f"{_KEYS['fastwan'][1]}, if the checkpoint has any, are not used: attention is dense"


class Recognised(NamedTuple):
    """A recognised recipe.

    recipe: its name. evidence: how it was recognised. alone: the kind of evidence if it is no proof by itself, else "".
    """

    recipe: str
    evidence: str
    alone: str = ""


def by_name(path: str | Path) -> Recognised | None:
    """Recognise a recipe by the name of a file, its folders, or a repository on the hub. The nearest name counts."""
    for part in reversed(Path(path).parts[-_FOLDERS:]):
        for recipe, pattern in _NAMES:
            if pattern.search(_OURS.sub("", part.lower())):
                return Recognised(_variant(recipe, path), f"named {part}")
    return None


def own_name(path: str | Path) -> str:
    """Return a loaded model's own name, from the path or id that it was loaded from.

    This is its folder's name, or "owner/name" on the hub. The folders above say nothing about the model.
    """
    parts = Path(path).parts
    if len(parts) == 2 and HUB_ID.match(str(path)) and parts[-1] not in COMPONENTS and not Path(path).exists():
        return str(path)
    if parts[-1:] and parts[-1] in COMPONENTS:
        parts = parts[:-1]  # a pipeline's own name is above
    if parts[-2:-1] == ("snapshots",):
        parts = parts[:-2]
    name = parts[-1] if parts else ""
    return name.removeprefix(_CACHED).replace("--", "/", 1) if name.startswith(_CACHED) else name


def _variant(recipe: str, path: str | Path) -> str:
    """Return the variant of a recipe that the names at the end of a path ask for, or the recipe itself."""
    text = "/".join(Path(path).parts[-_FOLDERS:]).lower()
    variants = _VARIANTS.get(recipe, ())
    return next((name for name, words in variants if all(word in text for word in words)), recipe)


def lora_claims(path: Path, lora: Lora, every: set[str], experts: int) -> list[Recognised]:
    """Return what a LoRA's file name says; if it says nothing, what its folders' names and its contents say.

    every: the paths of the linears that every LoRA of a distilled model changes.
    """
    own = by_name(path.name)
    if own is not None:
        claim = by_name(path)  # the folders may tell the variant
        if claim != own:
            return [claim._replace(alone="a folder's name")]
        held = len(every & {*lora.pairs, *(weight.removesuffix(".weight") for weight in lora.products)})
        few = f"its name (it has matrices for {held} of the blocks' {len(every)} linears)"  # perhaps a style's
        return [claim if held == len(every) else claim._replace(alone=few)]
    folder, contents = by_name(path), lora_by_contents(lora, every, experts)
    if contents is not None:
        contents = contents._replace(recipe=_variant(contents.recipe, path))
    elif folder is not None:
        folder = folder._replace(alone="a folder's name")
    return [claim for claim in (folder, contents) if claim is not None]


def lora_by_contents(lora: Lora, every: set[str], experts: int) -> Recognised | None:
    """Recognise a LoRA by its contents: published files differ in their ranks and keys. every: as for `lora_claims`."""
    if not every <= set(lora.pairs) or len(lora.ranks) != 1:
        return None
    (rank,) = lora.ranks
    if lora.has_alpha and not lora.has_differences and set(lora.pairs) == every and rank == 64 and experts == 2:
        return Recognised("lightning", "two files of rank 64 with alphas, for the blocks alone", alone="its contents")
    if not lora.has_alpha and lora.has_differences and rank in (32, 64):
        recipe = "lightx2v" if rank == 64 else "causvid"
        return Recognised(
            recipe, f"rank {rank} without alphas, with differences of norms and biases", alone="its contents"
        )
    return None


def checkpoint_by_keys(keys: Iterable[str]) -> Recognised | None:
    """Recognise a whole model by the tensors in its files."""
    for recipe, (part, what) in _KEYS.items():
        if any(part in key for key in keys):
            return Recognised(recipe, f"its files hold {what}")
    return None


def ignored_parts(keys: Iterable[str]) -> list[str]:
    """Return lines on the parts of a whole model's files that diffusers ignores."""
    counts = {what: sum(part in key for key in keys) for part, what in _KEYS.values()}
    return [f"{count} {what}: not used, attention is dense" for what, count in counts.items() if count]


def swapped_files(paths: list[Path | None]) -> list[str]:
    """Return lines on the files of two experts whose names say the other one. None stands for one without a LoRA."""
    return [
        f"{path.name} is taken for the {expert}-noise expert: the order is (high, low)"
        for path, expert in zip(paths, EXPERTS, strict=True)
        if path is not None and expert not in (experts_in(path.name) or expert)
    ]
