# SPDX-License-Identifier: GPL-3.0-or-later
"""Prepare the home folder that ansible-test gets, so that the pip it starts works as the caller's pip does.

ansible-test hands nothing of pip's environment (index, certificates, proxy) on, so what pip is set to here is written
to the file that pip reads there. For an empty environment ansible-test wants a program that starts pip, and looks for
it in a folder of that home before it asks a server: pip's wheel, which runs without being unpacked, is enough.

Usage: prepare_pip.py HOME
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import ansible_test

STARTER = """\
import sys

sys.path.insert(0, {wheel!r})

from pip._internal.cli.main import main

sys.exit(main(["install", *(word for word in sys.argv[1:] if word not in ("--no-setuptools", "--no-wheel"))]))
"""


def pip_settings() -> dict[str, dict[str, str]]:
    """Return what pip is set to, from its files and its environment: section of the configuration → option → value."""
    listing = subprocess.run(["pip", "config", "list"], check=True, capture_output=True, text=True).stdout
    sections: dict[str, dict[str, str]] = {"global": {}}
    for line in listing.splitlines():
        name, value = line.split("=", 1)
        section, option = name.rsplit(".", 1)
        sections.setdefault("global" if section == ":env:" else section, {})[option] = ast.literal_eval(value)
    sections["global"]["quiet"] = "1"
    return sections


def wanted_version() -> str:
    """Return the version of pip that ansible-test installs, as its source has it."""
    source = Path(next(iter(ansible_test.__path__))) / "_internal" / "python_requirements.py"
    found = re.search(r"pip='([\d.]+)'", source.read_text())
    if found is None:
        raise SystemExit(f"expected the version of pip in {source}, found none; to do: adapt {__file__}")
    return found.group(1)


def main() -> None:
    """Write pip's configuration and its start program."""
    home = Path(sys.argv[1])

    configuration = home / ".config" / "pip" / "pip.conf"
    configuration.parent.mkdir(parents=True, exist_ok=True)
    configuration.touch(mode=0o600)  # an index may have a password
    with configuration.open("w") as file:
        for section, options in pip_settings().items():
            file.write(f"[{section}]\n")
            file.writelines(f"{option} = {value}\n" for option, value in options.items())

    version = wanted_version()
    cache = home / ".ansible" / "test" / "cache"
    cache.mkdir(parents=True, exist_ok=True)
    wheel = cache / f"pip-{version}-py3-none-any.whl"
    if not wheel.exists():
        subprocess.run(["pip", "download", "--quiet", "--no-deps", f"--dest={cache}", f"pip=={version}"], check=True)
    (cache / f"get_pip_{version.replace('.', '_')}.py").write_text(STARTER.format(wheel=str(wheel)))


if __name__ == "__main__":
    main()
