"""scripts/benchmarks/install_size.py, without an installation."""

import json
from pathlib import Path

from scripts.benchmarks import install_size


def test_every_file_of_an_environment_counts(monkeypatch, tmp_path):
    installed = []

    def create(folder, with_pip):
        assert with_pip
        package = Path(folder) / "lib/python3/site-packages/turbo_rcm_patch"
        package.mkdir(parents=True)
        (package / "a").write_bytes(b"12345")
        (package.parent / "b").write_bytes(b"123")
        (package.parent / "link").symlink_to(package / "a")

    def run(command, check, env):
        assert "PYTHONPATH" not in env
        installed.append(command[1:])

    monkeypatch.setenv("PYTHONPATH", "x")
    monkeypatch.setattr(install_size.venv, "create", create)
    monkeypatch.setattr(install_size.subprocess, "run", run)
    listed = json.dumps([{"name": name, "version": "1"} for name in install_size.NAMED])
    monkeypatch.setattr(install_size.subprocess, "check_output", lambda *_, **__: listed)
    assert install_size.main(["--json", str(tmp_path / "install.json")]) == 0
    sizes = json.loads((tmp_path / "install.json").read_text())
    found = {"bytes": 8, "package_bytes": 5, **dict.fromkeys(install_size.NAMED, "1")}
    assert sizes == {"gpu": found, "cpu": found}
    package = ["install", "--quiet", str(install_size.ROOT)]
    assert installed == [package, ["install", "--quiet", *install_size.CPU_TORCH], package]
