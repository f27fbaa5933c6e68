"""GPUs of images: names and edits of CDI specs, and what a container of a real engine gets of a made-up one."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from hypothesis import given
from hypothesis import strategies as st

from gpool.agent.machine.drm import node_groups
from gpool.agent.runtime.docker import cdi
from gpool.agent.runtime.docker.cdi import (
    GpuMounts,
    cdi_names,
    driver_libraries,
    gpu_mounts,
    group_words,
    read_specs,
)
from gpool.agent.runtime.docker.confinement import ContainerSpec, request
from gpool.agent.runtime.docker.engine import facts_from
from gpool.agent.runtime.docker.runtime import DockerRuntime
from gpool.agent.runtime.protocol import CommandJob, GpuShare, PartFailed
from tests.tools import components
from tests.tools.engines import IMAGE, shared_engine
from tests.tools.runtimes import LIMITS, within

CACHE = """2 libs found in cache
\tlibnvidia-ml.so.1 (libc6,x86-64) => /usr/lib/x/libnvidia-ml.so.1
\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/x/libcuda.so.1
\tlibcuda.so.1 (libc6,x86-64) => /opt/old/libcuda.so.1
\tlibcuda.so.1 (libc6) => /usr/lib/i386/libcuda.so.1
\tlibc.so.6 (libc6,x86-64, OS ABI: Linux 3.2.0) => /lib/libc.so.6
"""


def test_only_the_drivers_own_libraries_are_bound_and_the_first_of_a_name() -> None:
    assert driver_libraries(CACHE) == {
        "libnvidia-ml.so.1": "/usr/lib/x/libnvidia-ml.so.1",
        "libcuda.so.1": "/usr/lib/x/libcuda.so.1",
    }


def device(name: str, *nodes: str, **more: Any) -> dict[str, Any]:
    edits = {"deviceNodes": [{"path": node} for node in nodes], **more}
    return {"name": name, "containerEdits": edits}


def document(
    *devices: dict[str, Any], kind: str = "nvidia.com/gpu", **edits: Any
) -> dict[str, Any]:
    return {
        "cdiVersion": "0.5.0",
        "kind": kind,
        "devices": list(devices),
        "containerEdits": edits,
    }


def names(folder: Path, uuids: list[str], nodes: tuple[str, ...] = ()) -> tuple[str, ...]:
    return cdi_names(tuple(read_specs([str(folder)])), uuids, nodes)


@pytest.mark.parametrize(("suffix", "write"), [(".yaml", yaml.safe_dump), (".json", json.dumps)])
def test_gpus_are_named_by_their_uuid_where_one_spec_has_all_of_them(
    tmp_path: Path, suffix: str, write: Callable[[Any], str]
) -> None:
    (tmp_path / f"nvidia{suffix}").write_text(write(document(device("GPU-1"), device("GPU-10"))))
    assert names(tmp_path, ["GPU-1"]) == ("nvidia.com/gpu=GPU-1",)
    assert names(tmp_path, ["GPU-1", "GPU-10"]) == ("nvidia.com/gpu=GPU-1", "nvidia.com/gpu=GPU-10")
    assert names(tmp_path, ["GPU-1", "GPU-2"]) == ()
    assert names(tmp_path / "none", ["GPU-1"]) == ()


def test_a_number_names_a_gpu_only_if_it_has_that_card_alone(tmp_path: Path) -> None:
    devices = (
        device("all", "/dev/nvidia0", "/dev/nvidia1", "/dev/nvidiactl"),
        device("0", "/dev/nvidia0"),
        device("1", "/dev/nvidia1"),
    )
    (tmp_path / "nvidia.yaml").write_text(yaml.safe_dump(document(*devices)))
    nodes = ("/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia1")
    assert names(tmp_path, ["GPU-b"], nodes) == ("nvidia.com/gpu=1",)
    assert names(tmp_path, ["GPU-c"], (*nodes[:2], "/dev/nvidia7")) == ()
    assert names(tmp_path, ["MIG-1"], nodes) == (), "the card is more than its instance"


def test_text_in_another_kinds_spec_names_nothing(tmp_path: Path) -> None:
    (tmp_path / "other.yaml").write_text(yaml.safe_dump(document(device("GPU-1"), kind="x.com/y")))
    (tmp_path / "notes.txt").write_text("kind: nvidia.com/gpu GPU-1")
    (tmp_path / "broken.yaml").write_text("kind: [nvidia.com/gpu")
    (tmp_path / "list.json").write_text("[1, 2]")
    assert names(tmp_path, ["GPU-1"]) == ()


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["name", "containerEdits", "deviceNodes", "mounts", "env", "path"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )
)
def test_no_spec_breaks_the_reader(content: Any) -> None:
    with tempfile.TemporaryDirectory() as folder:
        spec = {"kind": cdi.CDI_KIND, "devices": content, "containerEdits": content}
        (Path(folder) / "odd.json").write_text(json.dumps(spec))
        assert all(isinstance(one.devices, dict) for one in read_specs([folder]))


def test_a_docker_that_reads_specs_is_asked_by_name_and_gets_no_second_set_of_nodes(
    tmp_path: Path,
) -> None:
    (tmp_path / "nvidia.yaml").write_text(yaml.safe_dump(document(device("GPU-1"))))
    share = GpuShare(("/dev/null",), (("CUDA_VISIBLE_DEVICES", "GPU-1"),))
    mounts = gpu_mounts({}, (), share, engine_folders=[str(tmp_path)], folders=())
    assert mounts.cdi == ("nvidia.com/gpu=GPU-1",)
    assert not mounts.libraries
    spec = ContainerSpec("i", ("true",), (), 1, LIMITS, (), {}, cdi=mounts.cdi)
    asked = request(spec, "{}")["HostConfig"]["DeviceRequests"]
    assert asked == [{"Driver": "cdi", "DeviceIDs": ["nvidia.com/gpu=GPU-1"]}]


def test_podman_is_never_asked_by_name_since_it_ignores_names() -> None:
    folders = {"CDISpecDirs": ["/etc/cdi"]}
    docker = facts_from(folders, {"Components": [{"Name": "Engine"}]})
    podman = facts_from(folders, {"Components": [{"Name": "Podman Engine"}]})
    assert (docker.cdi_folders, podman.cdi_folders) == (("/etc/cdi",), ())


def test_a_host_without_the_drivers_libraries_refuses_and_says_what_to_run(tmp_path: Path) -> None:
    share = GpuShare(("/dev/null",), (("CUDA_VISIBLE_DEVICES", "GPU-1"),))
    listed = subprocess.run(cdi.LDCONFIG, capture_output=True, text=True, check=True).stdout
    if driver_libraries(listed):
        pytest.skip("this host has the NVIDIA driver")
    with pytest.raises(PartFailed, match="nvidia-ctk cdi generate"):
        gpu_mounts({}, (), share, folders=[str(tmp_path)])
    amd = GpuShare(("/dev/null",), (("ROCR_VISIBLE_DEVICES", "0"), ("CUDA_VISIBLE_DEVICES", "0")))
    assert gpu_mounts({}, (), amd, folders=[str(tmp_path)]) == GpuMounts(("/dev/null",))


def test_a_closed_nodes_group_is_given_as_the_engine_can_take_it() -> None:
    assert group_words((109,), podman=False, mapped=False) == ("109",)
    assert group_words((109,), podman=True, mapped=True) == ("keep-groups",)
    assert group_words((), podman=False, mapped=True) == ()
    with pytest.raises(PartFailed, match="chmod 666; its group is 109"):
        group_words((109,), podman=False, mapped=True)


OURS, OTHERS, GROUPED = "/dev/net/tun", "/dev/fuse", "/dev/kvm"
"""Stand-ins of cards: without capabilities nothing can be done with them. The last is closed to all but its group."""


@pytest.mark.parametrize("kind", ["podman", "docker"])
def test_a_container_gets_the_nodes_libraries_and_variables_of_the_spec_and_no_other_card(
    kind: str, tmp_path: Path, require: Callable[[str], None]
) -> None:
    require(kind)
    require("root")
    if not all(map(os.path.exists, (OURS, OTHERS))):
        assert not components.must_be_there(kind), f"{OURS} and {OTHERS} must be there in CI"
        pytest.skip(f"the kernel here has no {OURS} or no {OTHERS}")
    library = tmp_path / "libcuda.so.580.95"
    library.write_text("the driver's library")
    folder = tmp_path / "cdi"
    folder.mkdir()
    spec = document(
        device("GPU-1", OURS, env=["OF_THE_CARD=1"]),
        device("GPU-2", OTHERS, env=["OF_ANOTHER=1"]),
        env=["OF_ALL=1"],
        mounts=[{"hostPath": str(library), "containerPath": str(library)}],
    )
    (folder / "nvidia.yaml").write_text(yaml.safe_dump(spec))
    closed = [GROUPED] if os.path.exists(GROUPED) and node_groups([GROUPED]) else []
    opened = " && ".join(f"(exec 3<>{node})" for node in (OURS, *closed))
    script = (
        f"{opened} && echo opened; test -e {OTHERS} || echo alone; "
        'cat "${LD_LIBRARY_PATH%%:*}/libcuda.so.1"; echo; '
        "echo $OF_THE_CARD-$OF_ALL-$OF_ANOTHER-$CUDA_VISIBLE_DEVICES"
    )
    engine = shared_engine(kind)

    async def run() -> list[str]:
        runtime = DockerRuntime(
            tmp_path / "data",
            engine=engine.address,
            default_image=IMAGE,
            cdi_folders=[str(folder)],
        )
        share = GpuShare((OURS, *closed), (("CUDA_VISIBLE_DEVICES", "GPU-1"),))
        try:
            job = CommandJob(("sh", "-c", script), (), (), (), LIMITS, gpu_share=share)
            sandbox = await runtime.start_command(job)
            said = b"".join([text async for _, text in sandbox.output()])
            await sandbox.remove()
            return said.decode().split("\n")
        finally:
            await runtime.close()

    assert within(run())[:4] == ["opened", "alone", "the driver's library", "1-1--GPU-1"]
