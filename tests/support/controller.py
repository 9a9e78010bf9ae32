# SPDX-License-Identifier: GPL-3.0-or-later
"""Runs of ansible-playbook with the collection's plugins, and roles and playbooks made up for a test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parents[2]


@dataclass
class Controller:
    """A folder with a collection that has the checkout's plugins and playbooks, and roles of a test's own."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.collection = self.root / "ansible_collections" / "ringmaster" / "inference"
        self.evidence = self.root / "evidence"
        self.collection.mkdir(parents=True)
        for name in ("plugins", "playbooks", "meta", "galaxy.yml"):
            (self.collection / name).symlink_to(CHECKOUT / name)

    def write(self, path: str, text: str) -> Path:
        target = self.root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
        return target

    def role(self, name: str, tasks: str, **files: str) -> None:
        for part, text in {"tasks": tasks, **files}.items():
            self.write(f"ansible_collections/ringmaster/inference/roles/{name}/{part}/main.yml", text)

    def play(self, playbook: str | Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a playbook with the inventory ``inventory.yml``; both outputs are in ``stdout``."""
        binary = Path(sys.executable).with_name("ansible-playbook")
        return subprocess.run(
            [binary, "-i", self.root / "inventory.yml", playbook, *arguments],
            cwd=self.root,
            env={
                **{name: value for name, value in os.environ.items() if not name.startswith("ANSIBLE_")},
                "HOME": str(self.root / "home"),
                "ANSIBLE_COLLECTIONS_PATH": str(self.root),
                "ANSIBLE_CALLBACKS_ENABLED": "ringmaster.inference.evidence",
                "ANSIBLE_LOCALHOST_WARNING": "false",
                "ANSIBLE_NOCOLOR": "true",
                "ANSIBLE_PYTHON_INTERPRETER": sys.executable,
                "RINGMASTER_EVIDENCE_DIRECTORY": str(self.evidence),
                **self.environment,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=600,  # a busy machine takes its time; only a run that hangs gets here
            check=False,
        )

    def documents(self) -> list[dict[str, Any]]:
        """The evidence so far, oldest first."""
        paths = sorted(self.evidence.glob("*.json"), key=lambda path: path.stat().st_mtime_ns)
        return [json.loads(path.read_text(encoding="utf-8")) for path in paths]
