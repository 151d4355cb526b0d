"""Which errors of the Hub are retried, after how long, and with which advice they end."""

import re
import time
from email.utils import formatdate

import pytest
from hub_testing import REPO, assert_published
from huggingface_hub import constants
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled

from hf_vanilla import hub as hub_package
from hf_vanilla.hub import client, publish, roll_back
from hf_vanilla.hub.client import MAX_ATTEMPTS


# huggingface_hub uses its HTTP library in a deprecated way.
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")


@pytest.mark.promise("error of the Hub")
@pytest.mark.parametrize("form", ["seconds", "date", "past", "nonsense"])
def test_retry_waits_as_long_as_the_hub_asks(hub, folder, waits, caplog, form):
    now = time.time()
    asked = {"seconds": "250", "date": formatdate(now + 250, usegmt=True), "past": formatdate(0), "nonsense": "soon"}
    fault = {"status": 503, "headers": {"Retry-After": asked[form]}}
    hub.fail({"method": "POST", "path": "/commit/", **fault})
    publish(folder, REPO)
    assert_published(hub, folder)
    (waited,) = waits
    expected = {"seconds": 250, "date": pytest.approx(250, abs=60), "past": 0, "nonsense": 1}
    assert waited == expected[form]
    assert f"Attempt 2 of {MAX_ATTEMPTS} in {waited:.0f} s" in caplog.text


def test_retry_waits_for_the_rate_limit(hub, folder, waits):
    limit = {"ratelimit": '"api";r=0;t=123'}
    hub.fail({"method": "POST", "path": "/commit/", "status": 429, "headers": limit})
    publish(folder, REPO)
    assert_published(hub, folder)
    assert waits == [124]


@pytest.mark.parametrize("form", ["seconds", "date"])
def test_retry_gives_up_if_the_wait_is_too_long(hub, folder, waits, caplog, form):
    asked = "86400" if form == "seconds" else formatdate(time.time() + 86400, usegmt=True)
    hub.fail({"method": "POST", "path": "/commit/", "status": 503, "headers": {"Retry-After": asked}})
    with pytest.raises(HfHubHTTPError, match="503"):
        publish(folder, REPO)
    assert waits == []
    assert re.search(r"The Hub asks to wait for 86[34]\d\d s, which is too long; try again then", caplog.text)
    publish(folder, REPO)
    assert_published(hub, folder)


@pytest.mark.promise("error of the Hub")
@pytest.mark.parametrize(
    ("method", "path", "status", "advice"),
    [
        ("POST", "/preupload/", 401, "Log in with `hf auth login`"),
        ("POST", "/preupload/", 403, "no right to write there"),
        ("POST", "/preupload/", 404, ""),
        ("PUT", "/lfs/", 403, "no right to write there"),
    ],
)
def test_refusal_is_not_retried_and_comes_with_advice(hub, folder, waits, method, path, status, advice):
    hub.fail({"method": method, "path": path, "status": status, "times": 99})
    with pytest.raises(HfHubHTTPError, match=str(status)) as refusal:
        publish(folder, REPO)
    assert advice in "".join(getattr(refusal.value, "__notes__", ()))
    assert waits == []
    assert hub.titles() == ["initial commit"]


@pytest.mark.promise("token of the Hub")
def test_wrong_token_is_not_shown(hub, folder, caplog):
    wrong = "hf_" + "B" * 37
    with pytest.raises(HfHubHTTPError, match="401") as error:
        publish(folder, REPO, token=wrong)
    assert wrong not in str(error.value) + caplog.text
    assert REPO not in hub.ask("/test/log")


def test_missing_token_is_found_before_any_request(hub, folder, monkeypatch):
    monkeypatch.delenv("HF_TOKEN")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "none"))
    for push in (lambda: publish(folder, REPO), lambda: roll_back(REPO, "v1")):
        with pytest.raises(ValueError, match="no token for the Hub. Log in with `hf auth login`, or set HF_TOKEN"):
            push()
    assert hub.ask("/test/log") == []


@pytest.mark.promise("offline")
def test_offline_mode_is_not_retried(hub, folder, waits, monkeypatch):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(OfflineModeIsEnabled):
        publish(folder, REPO)
    assert waits == []


@pytest.mark.parametrize(
    ("old", "new"), [("retry", "retry"), ("ATTEMPTS", "MAX_ATTEMPTS"), ("LONGEST_WAIT", "MAX_WAIT")]
)
def test_old_names_warn(old, new):
    with pytest.warns(FutureWarning, match=f"`{old}` is now called `hf_vanilla.hub.client.{new}`; .* removed in 0.3"):
        assert getattr(hub_package, old) is getattr(client, new)
