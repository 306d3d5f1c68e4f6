"""Building an image with a real daemon, and what a build is said to have failed of."""

from __future__ import annotations

import io
import socket
import tarfile
from pathlib import Path

import pytest
import trio

from runner.core.errors import (
    BaseImageMissing,
    ImageBuildFailed,
    MirrorUnreachable,
    ProviderBusy,
    ProviderFailed,
    RunnerError,
    UsageError,
)
from runner.sandbox.docker_api import Engine
from runner.sandbox.image_build import Build, build_image, cause_of
from tests.support import dockerd

TAG = "runner-tests-built:1"
STEP = "Step 8/9 : RUN bash /run/build.sh packages"


def build_of(*lines: str) -> Build:
    buffer, text = io.BytesIO(), "\n".join(lines).encode()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        entry = tarfile.TarInfo("here/Dockerfile")
        entry.size = len(text)
        tar.addfile(entry, io.BytesIO(text))
    return Build(
        context=buffer.getvalue(),
        dockerfile="here/Dockerfile",
        tag=TAG,
        arguments={"WORD": "given"},
        labels={"runner-tests.label": "yes"},
    )


async def test_an_image_is_built_with_its_arguments_and_labels_and_each_line_is_said() -> None:
    said: list[str] = []
    build = build_of(
        f"FROM {dockerd.IMAGE}", "ARG WORD", 'RUN echo "so $WORD"; printf "half "; echo "a line"', "RUN echo oh >&2"
    )

    image = await build_image(Engine(dockerd.host()), build, said.append)

    with dockerd.session().client() as client:
        found = client.inspect_image(TAG)
        client.remove_image(TAG, force=True)
    assert found["Id"] == image
    assert found["Config"]["Labels"]["runner-tests.label"] == "yes"
    assert {"so given", "half a line", "oh"} <= set(said)


@pytest.mark.parametrize(
    ("line", "error", "words"),
    [
        ("RUN echo oh >&2; exit 3", ImageBuildFailed, "non-zero code: 3"),
        ("ARG HERE=nowhere\nFROM runner-tests-$HERE", BaseImageMissing, "the base image `runner-tests-nowhere` is not"),
        ("NONSENSE", UsageError, "docker refuses: .*unknown instruction: NONSENSE"),
    ],
)
async def test_what_ends_a_build_is_said(line: str, error: type[RunnerError], words: str) -> None:
    lines = [line] if "FROM" in line else [f"FROM {dockerd.IMAGE}", line]

    with pytest.raises(error, match=words):
        await build_image(Engine(dockerd.host()), build_of(*lines), lambda _: None)


async def test_cancelling_ends_the_build_and_its_container() -> None:
    build = build_of(f"FROM {dockerd.IMAGE}", "RUN echo runner-tests-begun && sleep 1000")
    began = trio.Event()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(
            build_image,
            Engine(dockerd.host()),
            build,
            lambda line: began.set() if line == "runner-tests-begun" else None,
        )
        await began.wait()
        nursery.cancel_scope.cancel()

    with dockerd.session().client() as client, trio.fail_after(20):
        while any("runner-tests-begun" in container["Command"] for container in client.containers()):
            await trio.sleep(0.05)


async def test_stages_that_are_to_be_forgotten_are_gone_with_what_they_were_made_from() -> None:
    lines = (f"FROM {dockerd.IMAGE} AS before", "LABEL runner-tests.stage=1", "RUN touch /it", f"FROM {dockerd.IMAGE}")
    engine = Engine(dockerd.host())

    await build_image(engine, build_of(*lines, "COPY --from=before /it /it"), lambda _: None)
    await engine.prune_images("runner-tests.stage")

    with dockerd.session().client() as client:
        assert client.images(all=True, filters={"label": "runner-tests.stage"}) == []
        client.remove_image(TAG)


async def test_a_daemon_that_is_not_there_is_said_with_what_starts_it() -> None:
    with pytest.raises(ProviderFailed) as caught:
        await build_image(Engine("unix:///nowhere/docker.sock"), build_of("FROM x"), lambda _: None)

    assert (caught.value.hint or "").startswith("start the daemon that listens there")


async def test_a_file_that_is_no_socket_is_said_to_be_none(tmp_path: Path) -> None:
    """And not that a daemon is busy, which would be asked again, and started, for nothing."""
    (tmp_path / "file").touch()
    engine = Engine(f"unix://{tmp_path}/file")

    for asked in (engine.about, lambda: build_image(engine, build_of("FROM x"), lambda _: None)):
        with pytest.raises(ProviderFailed, match=r"cannot be reached: it is not a socket\Z") as caught:
            await asked()
        assert (caught.value.code, "DOCKER_HOST" in str(caught.value.hint)) == ("provider.failed", True)


async def test_a_daemon_that_does_not_listen_is_busy(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "left"))
    with pytest.raises(ProviderBusy, match=r"cannot be reached: Connection refused\Z"):
        await Engine(f"unix://{tmp_path}/left").about()


@pytest.mark.parametrize(
    ("said", "error", "hint"),
    [
        pytest.param("npm ERR! code SELF_SIGNED_CERT_IN_CHAIN", MirrorUnreachable, "--ca FILE", id="npm, TLS"),
        pytest.param(
            "Err:1 https://x bookworm InRelease Certificate verification failed: the certificate is NOT trusted.",
            MirrorUnreachable,
            "--ca FILE",
            id="apt, TLS",
        ),
        pytest.param("Temporary failure resolving 'x'", MirrorUnreachable, "--apt-sources FILE", id="apt, name"),
        pytest.param("npm ERR! code ENOTFOUND", MirrorUnreachable, "--npmrc FILE", id="npm, name"),
        pytest.param("npm ERR! code E401", MirrorUnreachable, "--npmrc FILE", id="npm, no token"),
        pytest.param(
            "NewConnectionError: [Errno -3] Temporary failure in name resolution",
            MirrorUnreachable,
            "--pip-conf FILE",
            id="pip, name",
        ),
        pytest.param(
            "ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE.",
            ImageBuildFailed,
            "--pip-conf",
            id="pip, other bytes",
        ),
        pytest.param("npm ERR! code EINTEGRITY", ImageBuildFailed, "only the pinned bytes", id="other bytes"),
        pytest.param("E: Unable to locate package fzf", ImageBuildFailed, "the lines above", id="another distribution"),
    ],
)
def test_what_a_mirror_lacks_comes_with_the_flag_that_helps(said: str, error: type[RunnerError], hint: str) -> None:
    found = cause_of("The command '...' returned a non-zero code: 1", [said, "more"], STEP)

    assert type(found) is error
    assert hint in str(found.hint)
