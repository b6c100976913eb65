"""The router's settings."""

from __future__ import annotations

from pathlib import Path

import pytest
from whimbrel.chassis.config import ConfigError, from_env

from services.router.config import RouterConfig


@pytest.mark.parametrize(
    ("change", "variable"),
    [
        ({"router_id": "a.b"}, "WB_ROUTER_ID"),
        ({"repository_url": "/plain/path"}, "WB_REPOSITORY_URL"),
        ({"requests_max": 0}, "WB_REQUESTS_MAX"),
        ({"idle_s_max": -1.0}, "WB_IDLE_S_MAX"),
        ({"http_port": 70_000}, "WB_HTTP_PORT"),
    ],
    ids=str,
)
def test_a_bad_setting_names_its_variable(change: dict[str, object], variable: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=variable):
        RouterConfig(**{"repository_url": "file:///x", "cache_dir": tmp_path, **change})  # type: ignore[arg-type]


def test_settings_come_from_the_environment(tmp_path: Path) -> None:
    environ = {
        "WB_REPOSITORY_URL": tmp_path.as_uri(),
        "WB_CACHE_DIR": str(tmp_path),
        "WB_ROUTER_ID": "router-7",
        "WB_COLD_START_S_MAX": "5.5",
    }
    config = from_env(RouterConfig, environ)
    assert (config.router_id, config.cold_start_s_max, config.http_port) == ("router-7", 5.5, 8343)
