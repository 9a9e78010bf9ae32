# SPDX-License-Identifier: GPL-3.0-or-later
"""Calls of modules as Ansible makes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def module_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., dict[str, Any]]:
    """Call a module's main as Ansible does; gives its result."""

    def run(main: Callable[[], None], **arguments: Any) -> dict[str, Any]:
        from ansible.module_utils import basic

        given = json.dumps({"ANSIBLE_MODULE_ARGS": arguments}).encode("utf-8")
        monkeypatch.setattr(basic, "_ANSIBLE_ARGS", given)
        monkeypatch.setattr(basic, "_ANSIBLE_PROFILE", "legacy", raising=False)
        with pytest.raises(SystemExit) as ended:
            main()
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert bool(result.get("failed")) == bool(ended.value.code)
        return result

    return run
