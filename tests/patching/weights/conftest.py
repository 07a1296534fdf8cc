import pytest

from tests.tiny_wan import tiny_wan_transformer


@pytest.fixture
def model():
    return tiny_wan_transformer()
