"""Agent types in a folder: what people write there, and what of it a change leaves."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from runner.core.errors import AgentTypeChanged, AgentTypeExists, BadConfig, Rejected, RunnerError, UnknownAgentType
from runner.ops.agent_type_store import AgentTypeFolder
from runner.ops.agent_types import Resources, WorkspaceConfig

WRITTEN = """\
# Works on the shop.
enabled: true
provider: 'docker'   # since May

tools:
    - bash   # all of it
    - read
resource_limits: {memory: 4G, cpu: 2}
setup_commands:
    - make deps
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "worker.yaml").write_text(WRITTEN)
    return tmp_path


async def put(folder: Path, config: WorkspaceConfig) -> None:
    types = AgentTypeFolder(folder)
    await types.put_config("worker", config, version=(await types.get("worker")).version)


async def test_a_file_is_the_configuration_of_its_name(folder: Path) -> None:
    (folder / "none.yaml").write_text("")
    (folder / ".hidden.yaml").write_text("enabled: maybe")
    (folder / "README.md").write_text("of people")

    found = {one.name: one.workspace for one in await AgentTypeFolder(folder).all()}

    assert found == {
        "none": WorkspaceConfig(),
        "worker": WorkspaceConfig(
            enabled=True,
            provider="docker",
            tools=("bash", "read"),
            resource_limits=Resources(memory="4G", cpu=2),
            setup_commands=("make deps",),
        ),
    }


async def test_a_change_leaves_what_says_the_same_and_every_comment(folder: Path) -> None:
    (folder / "worker.yaml").chmod(0o640)
    before = (await AgentTypeFolder(folder).get("worker")).workspace

    await put(folder, before)
    assert (folder / "worker.yaml").read_text() == WRITTEN

    limits = Resources(memory="8G", cpu=2)
    await put(folder, WorkspaceConfig(enabled=True, tools=("bash", "read", "edit"), resource_limits=limits))
    assert (folder / "worker.yaml").read_text() == (
        "# Works on the shop.\nenabled: true\n"
        "tools:\n    - bash   # all of it\n    - read\n    - edit\n"
        "resource_limits: {memory: 8G, cpu: 2}\nsetup_commands: []\n"
    )
    assert (folder / "worker.yaml").stat().st_mode & 0o777 == 0o640
    assert os.listdir(folder) == ["worker.yaml"]


async def test_an_agent_type_is_made_and_removed_as_a_file(folder: Path) -> None:
    types = AgentTypeFolder(folder)

    await types.create("next", WorkspaceConfig(enabled=True, resource_limits=Resources(disk="2G")))
    assert (folder / "next.yaml").read_text() == "enabled: true\nresource_limits:\n  disk: 2G\n"
    with pytest.raises(AgentTypeExists):
        await types.create("worker", WorkspaceConfig())
    assert (folder / "worker.yaml").read_text() == WRITTEN
    await types.delete("next")
    with pytest.raises(UnknownAgentType):
        await types.delete("next")
    for name in ("../worker", "", "..", "WORKER"):
        with pytest.raises(UnknownAgentType):
            await types.get(name)


async def test_what_somebody_has_written_meanwhile_is_not_lost(folder: Path) -> None:
    types = AgentTypeFolder(folder)
    version = (await types.get("worker")).version
    (folder / "worker.yaml").write_text(WRITTEN.replace("4G", "6G"))

    with pytest.raises(AgentTypeChanged):
        await types.put_config("worker", WorkspaceConfig(), version=version)

    assert "6G" in (folder / "worker.yaml").read_text()


@pytest.mark.parametrize(
    ("content", "at", "message"),
    [
        ("enabled: maybe\n", (1, 10), "`maybe` does not fit: expected `bool`, got `str`"),
        ("enabled: true\nprovder: docker\n", (2, 1), "`provder` is no field of a workspace-config"),
        ("warm_pool:\n  size: -1\n", (2, 9), "`-1` does not fit: expected `int` >= 0"),
        ("resource_limits: {gpu: 1}\n", (1, 19), "`gpu` is no field of a workspace-config"),
        ("tools: [bash, ssh]\n", (1, 8), "`ssh` cannot be a tool"),
        ("provider: nomad\n", (1, 11), "`nomad` is not a provider"),
        ("[]\n", (1, 1), "a list does not fit: expected `object`, got `array`"),
        ("enabled: true\n---\nenabled: true\n", (3, 1), "there is a second document"),
        ("enabled: true\nenabled: true\n", (2, 1), "the key `enabled` is written twice"),
    ],
)
async def test_what_is_wrong_is_told_with_its_place(
    folder: Path, content: str, at: tuple[int, int], message: str
) -> None:
    (folder / "bad.yaml").write_text(content)

    with pytest.raises(RunnerError) as caught:
        await AgentTypeFolder(folder).all()

    assert isinstance(caught.value, Rejected)
    [fault] = caught.value.findings
    assert fault.message == message
    assert fault.at is not None
    assert (fault.at.file, (fault.at.line, fault.at.column)) == (str(folder / "bad.yaml"), at)
    assert (await AgentTypeFolder(folder).get("worker")).workspace.enabled


async def test_a_folder_that_cannot_be_used_is_told(folder: Path) -> None:
    (folder / "My type.yaml").write_text("")
    with pytest.raises(Rejected) as caught:
        await AgentTypeFolder(folder).all()
    assert "is not named after an agent type" in caught.value.findings[0].message
    with pytest.raises(BadConfig, match="No such file"):
        await AgentTypeFolder(folder / "gone").all()
