"""Write the stand-alone ops as a repository that Hugging Face's `kernels` package loads, from the Hub or a folder.

python scripts/tools/export_kernels.py OUT

    OUT/README.md                 the card
    OUT/LICENSE
    OUT/build/torch-cuda/         a copy of turbo_rcm_patch/kernels, whose imports are relative, and metadata.json
    OUT/build/torch-cpu/          the same for machines without a GPU, where the ops run as plain PyTorch

The copy needs torch and Triton alone. Its custom ops have a namespace of their own, so that it can be loaded beside the
package and beside other versions of itself.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that the package can be imported

from turbo_rcm_patch import __version__, config, kernels
from turbo_rcm_patch.kernels.dispatch import NAMESPACE
from turbo_rcm_patch.tables import table

ROOT = Path(__file__).resolve().parents[2]
NAME = "turbo-rcm-ops"
VERSION = 1  # of the ops' interface: raise it whenever a caller must change
KERNELS_MINVER = "0.17.0"
BACKENDS = ("cuda", "cpu")
OPS = {
    "linear_skip": "`c_skip * residual + c_out * (a @ weight.T + bias)`, in the model's dtype or in 8 bits",
    "skip": "`c_skip * residual + c_out * output`",
    "layer_norm_modulate": "LayerNorm or RMSNorm, then `(1 + scale) * x + shift`; also to 8 bits",
    "rms_norm_rope": "RMSNorm of queries or keys over all heads, then the rotary embedding",
    "attention": "attention, with `c_skip * residual + c_out * attention` if a residual is given",
    "quantize_qkv": "RMSNorm and rotary embedding, then queries, keys and values in 8 bits",
    "attention_8bit": "attention of what `quantize_qkv` returns, with a residual or without",
    "sparse_linear_attention": "sparse-linear attention (SLA): softmax over chosen key blocks, linear over the rest",
    "conv_skip": "a 2D or 3D convolution, channels last, with a residual, and nearest upsampling first if asked for",
    "quantize_rows": "activations in 8 bits with a scale for each row, for `linear_skip`",
    "quantize_weight": "a weight in 8 bits, for `linear_skip`",
}
OPTIONS = ("IMPLEMENTATIONS", "ATTENTION_KERNELS", "LINEAR_KERNELS")  # what kernels/ imports from config.py
NAMESPACE_LINE = f'NAMESPACE = "{NAMESPACE}"'

CARD = """\
---
library_name: kernels
license: apache-2.0
tags:
- kernel
---

# {name}

Triton kernels of transformer blocks of video models, with what follows a matmul, an attention or a convolution computed
in its epilogue. They are the ops of turbo_rcm_patch {version}, which patches Wan pipelines of diffusers with them.

```python
import torch
from kernels import get_kernel

ops = get_kernel("OWNER/{name}", version={major}, trust_remote_code=True)  # OWNER: who published this repository
x, residual = (torch.randn(1, 4096, 1536, device="cuda", dtype=torch.bfloat16) for _ in range(2))
weight = torch.randn(1536, 1536, device="cuda", dtype=torch.bfloat16) / 40
gate = torch.randn(1, 1536, device="cuda", dtype=torch.bfloat16)
y = ops.linear_skip(x, weight, None, residual, c_out=gate[:, None])  # residual + gate * (x @ weight.T)
```

A folder is loaded by `kernels.get_local_kernel(Path("folder"))`.

{ops}

- Each op except `quantize_weight` takes `implementation="auto" | "triton" | "torch"`. "auto" runs a kernel on NVIDIA
  GPUs from sm_80 on, and plain PyTorch elsewhere. `help(ops.linear_skip)` tells shapes, dtypes and errors.
- sm_90 has kernels of its own, in Gluon. Each op picks the first of its kernels that can run.
- Ops without a backward kernel run as plain PyTorch under autograd.
- torch.compile takes each op as one custom op.
"""


def export(folder: Path) -> None:
    """Write the repository. Raises FileExistsError if the folder has files, or is a file."""
    if folder.is_file():
        raise FileExistsError(f"{folder} is a file; give a new folder.")
    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty; give a new folder.")
    for backend in BACKENDS:
        _write_variant(folder / "build" / f"torch-{backend}", backend)
    (folder / "README.md").write_text(card(), encoding="utf-8")
    shutil.copyfile(ROOT / "LICENSE", folder / "LICENSE")


def card() -> str:
    """Return the text of the repository's README."""
    rows = [("op", "what it does"), *((f"`{name}`", text) for name, text in OPS.items())]
    return CARD.format(name=NAME, version=__version__, major=VERSION, ops=table(rows, markdown=True))


def _write_variant(variant: Path, backend: str) -> None:
    source = Path(kernels.__file__).parent
    shutil.copytree(source, variant / "kernels", ignore=shutil.ignore_patterns("__pycache__"))
    options = [f"{name} = {getattr(config, name)!r}" for name in OPTIONS]
    (variant / "config.py").write_text('"""The options of the ops."""\n\n' + "\n".join(options) + "\n")
    names = "\n".join(f"    {name!r}," for name in OPS).replace("'", '"')
    imports = "\n".join(f"    {name}," for name in OPS)
    (variant / "__init__.py").write_text(
        f'"""Stand-alone ops of turbo_rcm_patch {__version__}."""\n\n__version__ = "{__version__}"\n\n'
        f"from .kernels import (\n{imports}\n)\n\n__all__ = [\n{names}\n]\n"
    )
    unique = f"_{NAME.replace('-', '_')}_{backend}_{_digest(variant)}"
    dispatch = variant / "kernels/dispatch.py"
    before, after = dispatch.read_text().split(NAMESPACE_LINE)  # raises ValueError unless it is there once
    dispatch.write_text(f'{before}NAMESPACE = "{unique}"{after}')
    metadata = {
        "id": unique,
        "name": NAME,
        "version": VERSION,
        "license": "apache-2.0",
        "kernels-minver": KERNELS_MINVER,
        "python-depends": [],
        "backend": {"type": backend},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")


def _digest(folder: Path) -> str:
    """Return seven digits that change with any file of a folder."""
    content = hashlib.sha256()
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        content.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return content.hexdigest()[:7]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="OUT")
    folder = parser.parse_args().folder
    try:
        export(folder)
    except OSError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"wrote {folder}; load it by kernels.get_local_kernel(Path({str(folder)!r}))")
    return 0


if __name__ == "__main__":
    sys.exit(main())
