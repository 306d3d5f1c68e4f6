"""Which provider an MCP server of a run gets, and with which limits."""

from __future__ import annotations

from runner.core.model import Feature, IsolationClass, Limits
from runner.core.settings import Settings
from runner.ops.planning.mcp_servers import place_servers
from runner.ports.provider import Probe
from runner.spec.mcp import WantedServer


async def test_a_server_gets_the_first_provider_that_keeps_its_limits_and_defaults_for_others() -> None:
    weak = Probe(
        provider="local",
        available=True,
        isolation=IsolationClass.NAMESPACES,
        missing={Feature.MEMORY: "no control group", Feature.DISK: "no loop device"},
    )
    strong = Probe(provider="process", available=True, isolation=IsolationClass.KERNEL, ends_whole=True)
    settings = Settings.from_env({})
    asked = {"docs": Limits(memory_bytes=1 << 28), "other": Limits(), "third": Limits(disk_bytes=1 << 28)}
    wanted = [
        WantedServer(
            name=name,
            providers=("local",) if name == "third" else ("local", "process"),
            image=None,
            toolchains=(),
            limits=limits,
        )
        for name, limits in asked.items()
    ]

    found, missing = await place_servers(wanted, settings, {"local": weak, "process": strong}, {})

    assert {name: (fact.provider, fact.ends_whole) for name, fact in found.items()} == {
        "docs": ("process", True),
        "other": ("local", False),
    }
    assert found["docs"].limits == Limits(settings.default_cpus, 1 << 28, settings.default_disk, 512)
    assert found["other"].limits == Limits(settings.default_cpus, None, None, 512)
    (one,) = missing
    assert "cannot enforce the limits that are asked for" in str(one.error)
