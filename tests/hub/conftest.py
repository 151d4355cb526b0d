"""A Hub on localhost, and a model to publish on it."""

import time

import pytest
from hub_server import TOKEN
from hub_testing import Hub, save_model
from huggingface_hub import constants


@pytest.fixture
def waits(monkeypatch):
    """Skip every wait, and return the list of their lengths in seconds."""
    found = []
    monkeypatch.setattr(time, "sleep", found.append)
    return found


@pytest.fixture
def hub(tmp_path_factory, monkeypatch, waits):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    # The commits of several servers have the same names.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    server = Hub(tmp_path_factory.mktemp("hub"))
    template = constants.HUGGINGFACE_CO_URL_TEMPLATE.replace(constants.ENDPOINT, server.url)
    monkeypatch.setattr(constants, "ENDPOINT", server.url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # is cached, with the address
    yield server
    server.close()


@pytest.fixture
def folder(tmp_path):
    return save_model(tmp_path / "model")
