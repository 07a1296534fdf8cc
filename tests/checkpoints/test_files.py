"""Sources and the files that they mean. A table stands in for the hub."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from turbo_rcm_patch.checkpoints import files
from turbo_rcm_patch.checkpoints.files import find_files, keys_in, read_tensors


@pytest.fixture
def folder(tmp_path):
    for name in ("high_noise_model.safetensors", "low_noise_model.safetensors"):
        save_file({"x": torch.ones(2)}, tmp_path / name)
    (tmp_path / "README.md").write_text("text")
    return tmp_path


def test_a_file_a_folder_and_a_pair(folder):
    high, low = folder / "high_noise_model.safetensors", folder / "low_noise_model.safetensors"
    assert find_files(high, 1) == find_files(str(high), 1) == find_files([high], 1) == [high]
    assert find_files(folder, 2) == find_files((high, low), 2) == [high, low]
    assert find_files((low, low), 2) == [low, low]
    low.unlink()
    assert find_files(str(folder), 1) == [high]


@pytest.mark.parametrize(
    "names",
    [
        ("Wan2.2-I2VHighNoise", "Wan2.2-I2VLowNoise"),
        ("slowmo_high", "slowmo_low"),
        ("wan22_t2vhigh", "wan22_t2vlow"),
        ("A14B_HIGH", "A14B_LOW"),
    ],
)
def test_both_experts_in_a_folder_are_told_by_their_names(tmp_path, names):
    high, low = (tmp_path / f"{name}.safetensors" for name in names)
    for path in (low, high):
        path.touch()
    assert find_files(tmp_path, 2) == [high, low]


@pytest.mark.parametrize(
    ("source", "experts", "message"),
    [
        ("", 1, r"holds high_noise_model.safetensors, low_noise_model.safetensors; give the path of one LoRA file"),
        ("high_noise_model.safetensors", 2, r"two transformers: give source=\(high, low\)"),
        ("missing.safetensors", 1, r"missing.safetensors: no such file or folder"),
        (
            ("high_noise_model.safetensors",),
            2,
            r"has 1 entries, but the pipeline has two transformers; give a pair \(high, low\)",
        ),
        (
            ("high_noise_model.safetensors",) * 2,
            1,
            "source has 2 entries, but the pipeline has one transformer; give one file",
        ),
        ("empty", 1, "holds no file ending in .safetensors, .pt"),
    ],
)
def test_wrong_sources(folder, source, experts, message):
    (folder / "empty").mkdir()
    sources = folder / source if isinstance(source, str) else [folder / one for one in source]
    with pytest.raises(ValueError, match=message):
        find_files(sources, experts)


def test_the_hub(folder, monkeypatch):
    listing = [
        "README.md",
        "T2V-4steps/high_noise_model.safetensors",
        "T2V-4steps/low_noise_model.safetensors",
        "loras/one_rank64.safetensors",
    ]

    def listed(self, repository):
        if repository != "lightx2v/Wan2.2-Lightning":
            raise OSError("Repository Not Found\nand more")
        return listing

    def download(repository, name):
        return str(folder / Path(name).name)

    def cached(repository, local_files_only):
        assert local_files_only
        if repository != "offline/loras":
            raise OSError("not in the cache")
        return str(folder)

    monkeypatch.setattr(files.HfApi, "list_repo_files", listed)
    monkeypatch.setattr(files, "snapshot_download", cached)
    monkeypatch.setattr(files, "hf_hub_download", download)
    repository = "lightx2v/Wan2.2-Lightning"
    pair = [folder / "high_noise_model.safetensors", folder / "low_noise_model.safetensors"]
    assert find_files(f"{repository}/T2V-4steps", 2) == pair
    assert find_files([f"{repository}/{name}" for name in listing[1:3]], 2) == pair
    assert find_files(f"{repository}/loras", 1) == [folder / "one_rank64.safetensors"]
    assert find_files("offline/loras", 2) == pair
    assert find_files("offline/loras/low_noise_model.safetensors", 1) == pair[1:]
    with pytest.raises(ValueError, match="Lightning holds no file"):
        find_files(repository, 1)
    with pytest.raises(ValueError, match=r"the hub did not return it: Repository Not Found; check the name"):
        find_files("some/thing", 1)
    with pytest.raises(ValueError, match="Repository Not Found"):
        find_files("offline/loras/missing", 1)


def test_peft_s_configuration_on_the_hub_comes_with_its_matrices(tmp_path, monkeypatch):
    listing = ["a/adapter_config.json", "a/adapter_model.safetensors", "a/comfy.safetensors", "b/lora.safetensors"]

    def download(repository, name):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
        return str(path)

    monkeypatch.setattr(files.HfApi, "list_repo_files", lambda self, repository: listing)
    monkeypatch.setattr(files, "hf_hub_download", download)
    assert find_files("some/loras/a/comfy.safetensors", 1) == [tmp_path / "a/comfy.safetensors"]
    assert not (tmp_path / "a/adapter_config.json").exists()
    assert find_files("some/loras/a/adapter_model.safetensors", 1) == [tmp_path / "a/adapter_model.safetensors"]
    assert (tmp_path / "a/adapter_config.json").is_file()
    assert find_files("some/loras/b/lora.safetensors", 1) == [tmp_path / "b/lora.safetensors"]
    assert not (tmp_path / "b/adapter_config.json").exists()


def test_tensors_and_metadata_of_either_kind(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / "a.safetensors", metadata={"format": "pt"})
    tensors, metadata = read_tensors(tmp_path / "a.safetensors")
    assert torch.equal(tensors["x"], torch.ones(2))
    assert metadata == {"format": "pt"}
    for content in ({"x": torch.ones(2), "n": 1}, {"state_dict": {"x": torch.ones(2)}}):
        torch.save(content, tmp_path / "a.pt")
        assert list(read_tensors(tmp_path / "a.pt")[0]) == ["x"]
    torch.save([1], tmp_path / "a.pt")
    with pytest.raises(ValueError, match="holds a list; accepted is a dictionary"):
        read_tensors(tmp_path / "a.pt")
    torch.save({"x": Path("code")}, tmp_path / "a.pt")
    with pytest.raises(ValueError, match="without running code"):
        read_tensors(tmp_path / "a.pt")
    (tmp_path / "b.safetensors").write_bytes(b"short")
    with pytest.raises(ValueError, match="cannot read"):
        read_tensors(tmp_path / "b.safetensors")


def test_keys_of_a_folder(folder):
    (folder / "broken.safetensors").write_bytes(b"short")
    assert keys_in(folder) == {"x"}
    assert keys_in(folder / "missing") == set()
