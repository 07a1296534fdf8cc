"""Find and read the files of a LoRA's source, on disk or on the hub."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

import torch
from huggingface_hub import HfApi, hf_hub_download, snapshot_download
from safetensors import SafetensorError, safe_open

from .lazy import SUFFIXES, open_tensors
from .peft_config import PEFT_FILE

Source = str | Path

COMPONENTS = ("transformer", "transformer_2")  # a pipeline's transformers and their folders, high-noise first
HUB_ID = re.compile(r"^[\w-][\w.-]*/[\w-][\w.-]*(/.+)?$")  # perhaps with a path in the repository
EXPERTS = ("high", "low")  # words in the names of Wan 2.2's two files
PEFT_STEM = "adapter_model"  # how PEFT names the file of matrices beside its configuration


def find_files(source: Source | Sequence[Source | None], experts: int) -> list[Path | None]:
    """Return the LoRA files of a source, one for each of 1 or 2 experts, the high-noise one first.

    source: a file, a folder, or the id of a hub repository, also with a path in it ("org/name/folder"). For two experts
        it is a pair of these, or a folder with both files. One of a pair may be None: that expert has no file.

    Raises ValueError if there is not one file per expert, and TypeError for another kind of source.
    """
    if isinstance(source, (str, Path)):
        place = _place(source)
        return [place.get(name) for name in _one_per_expert(place, experts)]
    if not isinstance(source, Sequence):
        raise TypeError(f"source={source!r}; give a path, the id of a hub repository, or a pair (high, low) of them.")
    sources = list(source)
    if len(sources) != experts:
        wanted = "one transformer; give one file" if experts == 1 else "two transformers; give a pair (high, low)"
        raise ValueError(f"source has {len(sources)} entries, but the pipeline has {wanted}.")
    if all(one is None for one in sources):
        raise ValueError("source has no file; give the LoRA of one expert or of both, or source=None without a LoRA.")
    return [None if one is None else find_files(one, 1)[0] for one in sources]


def is_published(source: Path) -> bool:
    """True for a file, and for a folder with weights as their authors publish them, without diffusers' configs."""
    if not source.is_dir():
        return source.is_file()
    names = {path.name for path in source.iterdir()}
    return not {"config.json", *COMPONENTS} & names and any(name.endswith(SUFFIXES) for name in names)


def experts_in(name: str) -> set[str]:
    """Return the EXPERTS that are words of a file's name: "I2VHighNoise" has one, "slow" and "highres" have none."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", " ", name).lower()
    return set(re.findall(rf"(?<![a-z])({'|'.join(EXPERTS)})(?=noise|[^a-z]|$)", words))


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return all tensors of a file, on the CPU, and its metadata. Raises ValueError for a file that cannot be read.

    The metadata has PEFT's configuration, under its file's name, if that file is beside this one and belongs to it.
    """
    with open_tensors(path) as tensors:
        content = {name: tensor.load() for name, tensor in tensors.items()}
    metadata = {}
    if path.suffix == ".safetensors":
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
    beside = path.with_name(PEFT_FILE)
    from_peft = all(name.startswith("base_model.model.") for name in content)
    if beside.is_file() and (from_peft or _has_config(path.name, [file.name for file in path.parent.iterdir()])):
        metadata = {**metadata, PEFT_FILE: beside.read_text(encoding="utf-8", errors="replace")}
    return content, metadata


def _has_config(name: str, folder: list[str]) -> bool:
    """True if PEFT's configuration in a folder belongs to this file: by its name, or as the only file of weights."""
    return PurePosixPath(name).stem == PEFT_STEM or [name] == [other for other in folder if other.endswith(SUFFIXES)]


def keys_of_model(source: str, subfolder: str) -> set[str]:
    """Return the names of all tensors in the safetensors files that a model was loaded from.

    The files are on disk or in the hub's cache; without them the result is empty. subfolder: the files' folder within a
    whole pipeline's folder.
    """
    folder = Path(source) if source else None
    if folder is not None and not folder.is_dir():
        folder = _in_cache(source) if HUB_ID.match(source) else None
    return set() if folder is None else keys_in(folder) or keys_in(folder / subfolder)


def keys_in(folder: Path) -> set[str]:
    """Return the names of all tensors in a folder's safetensors files. Without the folder the result is empty."""
    keys: set[str] = set()
    for file in folder.glob("*.safetensors") if folder.is_dir() else ():
        try:
            with safe_open(file, framework="pt") as opened:
                keys.update(opened.keys())
        except (OSError, SafetensorError):
            continue  # the model is loaded already; this only tells more about it
    return keys


class _Folder:
    """A file or the files of a folder on disk."""

    def __init__(self, path: Path):
        self.title, self._path = str(path), path
        self.names = [path.name] if path.is_file() else sorted(child.name for child in path.iterdir())

    def get(self, name: str) -> Path:
        return self._path if self._path.is_file() else self._path / name


class _Repository:
    """A file or the files of a folder in a repository on the hub. Raises what the hub's library raises."""

    def __init__(self, name: str):
        self.title = name
        self._id, path = _split_id(name)
        self._files = HfApi().list_repo_files(self._id)
        in_folder = [file for file in self._files if str(PurePosixPath(file).parent) == (path or ".")]
        self.names = [path] if path in self._files else in_folder

    def get(self, name: str) -> Path:
        folder = PurePosixPath(name).parent
        beside = str(folder / PEFT_FILE)
        if beside in self._files and _has_config(name, [f for f in self._files if PurePosixPath(f).parent == folder]):
            hf_hub_download(self._id, beside)
        return Path(hf_hub_download(self._id, name))


def _place(source: Source) -> _Folder | _Repository:
    path = Path(source).expanduser()
    if path.exists():
        return _Folder(path)
    if not isinstance(source, str) or not HUB_ID.match(source):
        raise ValueError(
            f"{source}: no such file or folder; give the path of a LoRA, or the id of a hub repository (owner/name)."
        )
    try:
        return _Repository(source)
    except Exception as error:  # the network's or the hub's
        found = _in_cache(source)
        if found is not None:
            return _Folder(found)
        first = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(
            f"{source} is not a file or folder here, and the hub did not return it: {first}; check the name."
        ) from error


def _split_id(name: str) -> tuple[str, str]:
    """Return a repository's id, and the path in it."""
    organisation, repository, *inner = name.split("/")
    return f"{organisation}/{repository}", "/".join(inner)


def _in_cache(name: str) -> Path | None:
    """Return the files that were downloaded from the hub before, for use offline."""
    repository, path = _split_id(name)
    try:
        found = Path(snapshot_download(repository, local_files_only=True)) / path
    except Exception:  # the cache has nothing of this name
        return None
    return found if found.exists() else None


def _one_per_expert(place: _Folder | _Repository, experts: int) -> list[str]:
    if "model_index.json" in place.names:
        raise ValueError(
            f"{place.title} is a whole diffusers pipeline, not a LoRA; load it with from_pretrained, then call "
            "use_distilled without source."
        )
    names = [name for name in place.names if name.endswith(SUFFIXES)]
    if experts == 1:
        if len(names) == 1:
            return names
        raise ValueError(f"{place.title} holds {_listed(names)}; give the path of one LoRA file.")
    for of_name in (experts_in, str.lower):  # first as words, then anywhere in the name
        chosen = [[name for name in names if expert in of_name(name)] for expert in EXPERTS]
        if [len(found) for found in chosen] == [1, 1]:
            return [found[0] for found in chosen]
    raise ValueError(
        f"{place.title} holds {_listed(names)}; the pipeline has two transformers: give source=(high, low), or a "
        "folder with one file that has 'high' and one that has 'low' in its name."
    )


def _listed(names: list[str]) -> str:
    return ", ".join(names) or f"no file ending in {', '.join(SUFFIXES)}"
