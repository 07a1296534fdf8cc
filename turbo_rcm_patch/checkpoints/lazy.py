"""Files of tensors, opened without reading them: each tensor is read when it is asked for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open

from ..wording import name_of_dtype, with_article

PICKLED = (".pth", ".pt", ".bin", ".ckpt")
SUFFIXES = (".safetensors", *PICKLED)
_INDEX = "*.safetensors.index.json"
# The keys under which trainers store a state dict. Distillation trains a generator, and files of its training may hold
# other models too. TurboT2AV's own loader takes the generator first.
_GENERATOR = "generator"
_WRAPPERS = ("state_dict", _GENERATOR, "model", "net", "module")

_FORMAT = ".comfy_quant"  # the end of the keys of ComfyUI's descriptions of formats
_KINDS = {"F": "float", "BF": "bfloat", "I": "int", "U": "uint"}  # safetensors' names of dtypes, and torch's


class LazyTensor(NamedTuple):
    """A tensor in a file.

    load: reads it. dtype: the name of its dtype, as in torch, or "float" for any floating-point dtype.
    """

    shape: tuple[int, ...]
    load: Callable[[], torch.Tensor]
    dtype: str = "float"

    @property
    def floating(self) -> bool:
        return "float" in self.dtype


Tensors = Mapping[str, LazyTensor]


@contextmanager
def open_tensors(source: str | Path) -> Iterator[Tensors]:
    """Open all tensors of a file or of a folder's files, by name. They can be read until this closes.

    source: a .safetensors or a pickled file, an index of shards, or a folder with one of these.
        Code in pickled files does not run (weights_only).

    Raises ValueError for other sources, and for files that cannot be read.
    """
    files = files_of(Path(source).expanduser())
    with ExitStack() as stack:
        tensors: dict[str, LazyTensor] = {}
        for file in files:
            opened = _open_safetensors(file, stack) if file.suffix == ".safetensors" else _open_pickled(file)
            if doubled := sorted(tensors.keys() & opened.keys()):
                raise ValueError(
                    f"{source} has the tensor {doubled[0]} in more than one file; keep the files of one model only."
                )
            tensors |= opened
        if not tensors:
            raise ValueError(f"{source} holds no tensors; give a file with a model's or a LoRA's weights.")
        yield tensors


def files_of(path: Path) -> list[Path]:
    """Return the files that `open_tensors` opens for a path. Raises ValueError if it cannot tell which."""
    if path.is_file() and path.match(_INDEX):
        return _shards(path)
    if path.is_file():
        if path.suffix.lower() == ".gguf":
            raise ValueError(
                f"{path}: diffusers loads GGUF files, by from_single_file of the transformer's class or turbo-rcm's "
                "--transformer; they run in all tiers but sparse."
            )
        if path.suffix not in SUFFIXES:
            raise ValueError(f"{path} is not a file of weights; accepted are files ending in {', '.join(SUFFIXES)}.")
        return [path]
    if not path.is_dir():
        raise ValueError(f"{path}: no such file or folder; give a file of weights, or the folder of one.")
    indices = sorted(path.glob(_INDEX))
    if len(indices) == 1:
        return _shards(indices[0])
    files = sorted(file for file in path.iterdir() if file.suffix in SUFFIXES)
    if len(files) != 1:
        listed = ", ".join(file.name for file in files) or f"no file ending in {', '.join(SUFFIXES)}"
        raise ValueError(f"{path} holds {listed}; give the path of one file of weights.")
    return files


def _shards(index: Path) -> list[Path]:
    """Return the files that an index lists. Raises ValueError for a file that is not an index, or if one is missing."""
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise ValueError(f"cannot read {index} as an index of safetensors files; download it again.") from error
    folder = index.parent
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        raise ValueError(f"{folder} lacks {', '.join(missing)}, which {index.name} lists; download what is missing.")
    return [folder / name for name in names]


def _open_safetensors(file: Path, stack: ExitStack) -> dict[str, LazyTensor]:
    try:
        opened = stack.enter_context(safe_open(file, framework="pt"))
        tensors = {name: _lazy(opened, name) for name in opened.keys()}  # noqa: SIM118
        return tensors if any(name.endswith(_FORMAT) for name in tensors) else tensors | _formats(opened.metadata())
    except (OSError, SafetensorError) as error:
        raise ValueError(f"cannot read {file} ({error}); download it again.") from error


def _lazy(opened: safe_open, name: str) -> LazyTensor:
    described = opened.get_slice(name)
    kind, size = re.match(r"([A-Z]+)(.*)", described.get_dtype()).groups()  # for example from "BF16"
    dtype = _KINDS.get(kind, kind.lower()) + size.lower()
    dtype = {"float8_e4m3": "float8_e4m3fn"}.get(dtype, dtype)
    return LazyTensor(tuple(described.get_shape()), lambda: opened.get_tensor(name), dtype)


def _formats(metadata: Mapping[str, str] | None) -> dict[str, LazyTensor]:
    """Return the layers' 8-bit formats in a file's metadata as tensors, as ComfyUI writes them into other files."""
    try:
        layers = json.loads((metadata or {}).get("_quantization_metadata", "{}")).get("layers", {}).items()
    except (ValueError, AttributeError) as error:
        raise SafetensorError(f"its _quantization_metadata: {error}") from error
    texts = {name: json.dumps(one if isinstance(one, dict) else {"format": one}).encode() for name, one in layers}
    return {
        f"{name}{_FORMAT}": LazyTensor((len(text),), lambda text=text: torch.tensor(list(text)), "uint8")
        for name, text in texts.items()
    }


def _open_pickled(file: Path) -> dict[str, LazyTensor]:
    content = _load(file)
    while isinstance(content, Mapping):
        inner = {name: content[name] for name in _WRAPPERS if isinstance(content.get(name), Mapping)}
        if _GENERATOR in inner:
            content = inner[_GENERATOR]
        elif len(inner) == 1:
            (content,) = inner.values()
        else:
            break
    if not isinstance(content, Mapping):
        raise ValueError(f"{file} holds {with_article(type(content).__name__)}; accepted is a dictionary of tensors.")
    tensors = {name: tensor for name, tensor in content.items() if isinstance(tensor, torch.Tensor)}
    if not tensors:
        held = ", ".join(map(str, list(content)[:8])) or "nothing"
        raise ValueError(f"{file} holds {held}; accepted is a dictionary of tensors.")
    return {
        name: LazyTensor(tuple(tensor.shape), lambda tensor=tensor: tensor, name_of_dtype(tensor.dtype))
        for name, tensor in tensors.items()
    }


def _load(file: Path) -> object:
    """Return a pickled file's content. Its tensors are mapped into memory, not read, unless its format is old."""
    options = {"map_location": "cpu", "weights_only": True}
    try:
        try:
            return torch.load(file, mmap=True, **options)
        except RuntimeError:  # not a zip file: torch's format before 1.6
            return torch.load(file, **options)
    except Exception as error:  # unpickling raises many kinds; torch would advise to run the code
        raise ValueError(
            f"cannot read {file} without running code in it ({type(error).__name__}): it is broken, or holds more than "
            "a dictionary of tensors. Download it again, or save its tensors as a .safetensors file."
        ) from None
