import pytest

from tests.tiny_wan import tiny_wan_pipeline


@pytest.fixture(scope="package")
def saved_models(tmp_path_factory):
    """Folders of saved pipelines: text to video, image to video, and two that cannot be used."""
    root = tmp_path_factory.mktemp("models")
    tiny_wan_pipeline("t2v").save_pretrained(root / "t2v")
    tiny_wan_pipeline("i2v").save_pretrained(root / "i2v")
    for name, index in (("flux", '{"_class_name": "FluxPipeline"}'), ("broken", "{"), ("listed", "[]")):
        (root / name).mkdir()
        (root / name / "model_index.json").write_text(index)
    (root / "empty").mkdir()
    return root
