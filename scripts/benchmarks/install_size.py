"""Install this package into empty environments, and write how large they are: results/install.json.

python scripts/benchmarks/install_size.py --json results/install.json

Each environment begins without any package. "gpu" is what `pip install .` brings, "cpu" the same after a CPU build of
torch.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import venv
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # so that turbo_rcm_patch can be imported

from turbo_rcm_patch.cli.files import json_file, write_json

ROOT = Path(__file__).resolve().parents[2]
CPU_TORCH = "torch", "--index-url", "https://download.pytorch.org/whl/cpu"
INSTALLS = {"gpu": [(str(ROOT),)], "cpu": [CPU_TORCH, (str(ROOT),)]}
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
NAMED = ("torch", "triton", "diffusers", "transformers")


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=json_file, required=True, metavar="OUT.json")
    options = parser.parse_args(argv)
    write_json(options.json, {name: measured(installs) for name, installs in INSTALLS.items()})
    return 0


def measured(installs: Sequence[Sequence[str]]) -> dict[str, object]:
    """Return the bytes of an environment with these installs, those of its package, and the versions that pip took."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = str(Path(folder) / "bin/pip")
        for install in installs:
            subprocess.run([pip, "install", "--quiet", *install], check=True, env=ENVIRONMENT)
        listed = subprocess.check_output([pip, "list", "--format", "json"], env=ENVIRONMENT)
        (package,) = Path(folder).glob("lib/*/site-packages/turbo_rcm_patch")
        versions = {entry["name"]: entry["version"] for entry in json.loads(listed)}
        return {
            "bytes": bytes_in(Path(folder)),
            "package_bytes": bytes_in(package),
            **{name: versions[name] for name in NAMED},
        }


def bytes_in(folder: Path) -> int:
    """Return the sum of the sizes of all files in a folder. Links do not count."""
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


if __name__ == "__main__":
    sys.exit(main())
