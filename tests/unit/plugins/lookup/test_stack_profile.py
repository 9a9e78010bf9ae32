# SPDX-License-Identifier: GPL-3.0-or-later
"""The lookup of profiles: the collection's, a site's own, changed ones, and files that are none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from ansible.errors import AnsibleError
from ansible.parsing.dataloader import DataLoader
from ansible.plugins.loader import lookup_loader
from ansible.template import Templar

from tests.support.stack import NAMES, profile


def look(*names: str, **options: Any) -> list[dict[str, Any]]:
    loader = DataLoader()
    plugin = lookup_loader.get(
        "ringmaster.inference.stack_profile", loader=loader, templar=Templar(loader=loader, variables={})
    )
    found: list[dict[str, Any]] = plugin.run(list(names), {}, **options)
    return found


def refusal(*names: str, **options: Any) -> str:
    with pytest.raises(AnsibleError) as raised:
        look(*names, **options)
    return str(raised.value)


def write(folder: Path, name: str, text: str | None = None, **changes: Any) -> None:
    document = profile("debian12-r535", **{"name": name, **changes})
    (folder / f"{name}.yml").write_text(text or yaml.safe_dump(document), encoding="utf-8")


def test_shipped_profiles_by_name_and_all_of_them() -> None:
    assert look("debian12-r535", "el9-r580") == [profile("debian12-r535"), profile("el9-r580")]
    assert [each["name"] for each in look()] == NAMES


def test_profile_of_the_site_goes_before_the_collections(tmp_path: Path) -> None:
    write(tmp_path, "debian12-r535", summary="the site's own")
    write(tmp_path, "site-one")
    options = {"directories": [str(tmp_path)]}
    assert look("debian12-r535", **options)[0]["summary"] == "the site's own"
    assert [each["name"] for each in look(**options)] == sorted([*NAMES, "site-one"])


def test_overrides_are_checked_like_a_file() -> None:
    (changed,) = look("ubuntu2404-r580", overrides={"kernel": {"release": "6.8.0-52-generic"}})
    assert changed["kernel"]["release"] == "6.8.0-52-generic"
    assert "driver: 'modul' is no field (did you mean modules?)" in refusal(
        "debian12-r535", overrides={"driver": {"modul": "open"}}
    )


@pytest.mark.parametrize("name", ["nonsuch", "../runtime", "", "debian12-r535.yml", "/etc/passwd"])
def test_name_of_no_profile(name: str) -> None:
    text = refusal(name)
    assert "Expected one of the profiles debian12-r535, debian13-r550" in text
    assert repr(name) in text


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("schema: 1\nschema: 2\n", "schema is there twice"),
        ("os: {name: a, name: b}", "name is there twice"),
        ("{", "can't be read"),
        ("", "expected a mapping, found None"),
        ("- 1", "expected a mapping, found [1]"),
        ("!!python/object/apply:os.system [ls]", "can't be read"),
    ],
)
def test_file_that_is_no_profile(tmp_path: Path, text: str, complaint: str) -> None:
    (tmp_path / "x.yml").write_text(text, encoding="utf-8")
    assert complaint in refusal("x", directories=[str(tmp_path)])


def test_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "x.yml").write_bytes(b"\xff\xfe\0")
    assert "can't be read" in refusal("x", directories=[str(tmp_path)])


def test_date_without_quotes_is_the_same_date(tmp_path: Path) -> None:
    text = yaml.safe_dump(profile("debian12-r535", name="x")).replace("'2028-06-30'", "2028-06-30")
    assert "'2028-06-30'" not in text
    write(tmp_path, "x", text)
    assert look("x", directories=[str(tmp_path)])[0]["os"]["support_ends"] == "2028-06-30"


def test_name_has_to_be_the_files(tmp_path: Path) -> None:
    write(tmp_path, "x")
    (tmp_path / "y.yml").write_text((tmp_path / "x.yml").read_text(encoding="utf-8"), encoding="utf-8")
    assert "expected the name y, found x" in refusal("y", directories=[str(tmp_path)])
