"""Installing harness programs once: against an npm on PATH that does what npm can do to us."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest

from rollout.config import Home, open_home
from rollout.errors import ConfigError
from rollout.harness import ADAPTERS
from rollout.harness.install import MARKER, Recipe, find, folder_of, install, require

RECIPE = Recipe(name="tool", version="1.2.3", packages=("@x/tool@1.2.3",), program="node_modules/@x/tool/bin/*")
NPM = """#!/bin/bash
echo run >> "{log}"
{before}
while [ "$1" != --prefix ]; do shift; done
bin="$2/node_modules/@x/tool/bin"
mkdir -p "$bin"
echo '{{"version": "{came}"}}' > "$bin/../package.json"
printf '#!/bin/bash\\necho tool {says}\\n' > "$bin/tool"
chmod +x "$bin/tool"
"""


class Npm:
    """An `npm` in a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.log = folder, folder / "log"
        folder.mkdir()
        self.write()

    def write(self, *, came: str = "1.2.3", says: str = "1.2.3", before: str = "") -> None:
        path = self.folder / "npm"
        path.write_text(NPM.format(log=self.log, came=came, says=says, before=before))
        path.chmod(0o755)

    @property
    def runs(self) -> int:
        return self.log.read_text().count("run") if self.log.exists() else 0


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return open_home(tmp_path / "home", min_free_mb=1)


@pytest.fixture
def npm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Npm:
    npm = Npm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{npm.folder}:/usr/bin:/bin")
    return npm


def test_a_version_is_installed_once_and_the_marker_comes_last(home: Home, npm: Npm) -> None:
    lines: list[str] = []
    seen: list[bool] = []
    recipe = Recipe(**{**RECIPE.__dict__, "warm": lambda folder: seen.append((folder / MARKER).exists())})
    folder = install(home, recipe, lines.append)
    assert folder == home.harnesses / "tool-1.2.3"
    assert seen == [False]
    assert require(home, recipe) == (folder, "node_modules/@x/tool/bin/tool")
    assert [line.split(": ")[1].split(" in ")[0] for line in lines] == [
        "downloading",
        "checking",
        "warming its compile cache",
        "installed",
    ]
    install(home, recipe, lines.append)
    assert npm.runs == 1


def test_two_at_once_install_once(home: Home, npm: Npm) -> None:
    npm.write(before="sleep 0.5")
    threads = [threading.Thread(target=install, args=(home, RECIPE, lambda line: None)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert npm.runs == 1
    assert find(home, RECIPE)


def test_what_was_left_half_done_is_made_anew(home: Home, npm: Npm) -> None:
    folder = folder_of(home, RECIPE)
    folder.mkdir(parents=True)
    (folder / "rest").write_text("x")
    (folder / MARKER).write_text('{"name": "tool"')
    install(home, RECIPE, lambda line: None)
    assert not (folder / "rest").exists()
    assert json.loads((folder / MARKER).read_text())["version"] == "1.2.3"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"came": "0.0.1"}, r"asked for @x/tool 1\.2\.3, but 0\.0\.1 was installed"),
        ({"says": "0.9"}, r"was to be 1\.2\.3, but says: tool 0\.9"),
        ({"before": "echo 'npm error code ENOTFOUND' >&2; exit 1"}, "does not reach its registry.*ENOTFOUND"),
        ({"before": "echo broken >&2; exit 3"}, "npm ended with 3: broken"),
        ({"before": "exit 0"}, "but none was installed"),
    ],
)
def test_another_version_no_network_and_a_failure_are_told_and_leave_nothing(
    home: Home, npm: Npm, change: dict[str, str], message: str
) -> None:
    npm.write(**change)
    with pytest.raises(ConfigError, match=message):
        install(home, RECIPE, lambda line: None)
    with pytest.raises(ConfigError, match="openforge harness install tool"):
        require(home, RECIPE)


def test_a_missing_npm_says_what_to_install(home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match=r"npm is missing.*Node\.js"):
        install(home, RECIPE, lambda line: None)


@pytest.mark.parametrize("name", [name for name, adapter in ADAPTERS.items() if adapter.recipe])
def test_every_package_is_pinned(name: str) -> None:
    recipe = ADAPTERS[name].recipe
    assert recipe
    assert recipe.version in recipe.packages[0]
    assert all(package.rpartition("=" if recipe.python else "@")[2][0].isdigit() for package in recipe.packages)
