"""GPUs dedicated to guests: which qualify, how they change drivers and come back, and QEMU's own view of its arguments."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpool.agent.machine.findings import Level, passthrough_findings
from gpool.agent.machine.gpus import Detector
from gpool.agent.machine.vendors import ParsedGpus
from gpool.agent.runtime.microvm.guest_cards import GuestCards
from gpool.agent.runtime.microvm.image import drivers
from gpool.agent.runtime.microvm.image.disks import DiskContents, DiskStore
from gpool.agent.runtime.microvm.image.kernel import find_kernel
from gpool.agent.runtime.microvm.monitors.protocol import (
    GuestMachine,
    MonitorCommand,
    monitor_arguments,
)
from gpool.agent.runtime.microvm.monitors.qemu import TCG, Qemu, command_line, find_qemu
from gpool.agent.runtime.microvm.passthrough import (
    DedicatedCard,
    DedicatedCards,
    PciTree,
    parse_dedicated,
    unfit_card,
)
from gpool.agent.runtime.microvm.runtime import MicrovmRuntime
from gpool.agent.runtime.protocol import CommandJob, PartFailed, RuntimeAbility, SandboxFailed
from gpool.core.errors import Invalid
from gpool.core.model import GIB, MIB, Sharing, Slice
from tests.agent.microvm.fake_sysfs import FakeKernel
from tests.tools.runtimes import LIMITS, microvm_disks, within

qemu = pytest.mark.usefixtures("qemu_here")
CARD, AUDIO = "0000:41:00.0", "0000:41:00.1"
SMI = "GPU-1-2, NVIDIA H100 80GB HBM3, 81559\n"


@pytest.fixture
def qemu_here(require: Callable[[str], None]) -> None:
    require("qemu")


def kernel_with_card(root: Path) -> FakeKernel:
    kernel = FakeKernel(root)
    kernel.add(CARD)
    kernel.add(AUDIO, kind="0x040300", driver="snd_hda_intel")
    kernel.add("0000:40:01.0", kind="0x060400", driver="")
    return kernel


def dedicated(
    data: Path, kernel: FakeKernel, text: str = CARD, ask: str | None = SMI, **more: Any
) -> DedicatedCards:
    return DedicatedCards(
        data,
        parse_dedicated(text),
        tree=PciTree(kernel.root, kernel.write),
        ask=lambda _: ask,
        **{"proc": data / "no-proc", **more},
    )


def test_a_setting_names_cards_and_what_no_driver_can_tell() -> None:
    found = parse_dedicated(" 0000:41:00.0, 0000:C1:00.0=H100:80GB,")
    memory = found[1].memory_bytes
    assert found == (DedicatedCard(CARD), DedicatedCard("0000:c1:00.0", "H100", memory))
    assert memory == 80 * 10**9 or memory == 80 * GIB
    assert parse_dedicated("") == ()


@pytest.mark.parametrize("text", ["41:00.0", "0000:41:00.0=H100", f"{CARD},{CARD}", "all"])
def test_a_wrong_setting_is_refused_with_the_value(text: str) -> None:
    with pytest.raises(Invalid) as refused:
        parse_dedicated(text)
    assert text.split(",")[0] in refused.value.detail


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({}, ""),
        ({"group": ""}, "no IOMMU group"),
        ({"boot_vga": "1"}, "boots with"),
        ({"kind": "0x020000"}, "no GPU"),
        ({"vendor": "0x1a03"}, "no GPU"),
        ({"reset": None}, "reset"),
        ({"sriov_numvfs": "4"}, "virtual functions"),
    ],
)
def test_a_card_qualifies_or_the_reason_is_named(
    changed: dict[str, Any], why: str, tmp_path: Path
) -> None:
    kernel = FakeKernel(tmp_path)
    kernel.add(CARD, **changed)
    said = unfit_card(PciTree(tmp_path), CARD)
    assert why in said
    assert bool(said) == bool(why)


def test_a_group_may_hold_the_cards_other_functions_and_bridges_only(tmp_path: Path) -> None:
    kernel = kernel_with_card(tmp_path)
    tree = PciTree(tmp_path)
    assert unfit_card(tree, CARD) == ""
    kernel.add("0000:42:00.0", kind="0x010802", driver="")
    assert "0000:42:00.0" in unfit_card(tree, CARD)
    assert "no such PCI device" in unfit_card(tree, "0000:99:00.0")


def test_the_doctor_names_each_card_and_why_not() -> None:
    good, bad = passthrough_findings({CARD: "", "0000:61:00.0": "it is busy"})
    assert good.level is bad.level is Level.NOTE
    assert good.fix == f"GPOOL_AGENT_VFIO={CARD} dedicates it to them"
    assert "0000:61:00.0 cannot be given to guests (tier 'vm'): it is busy" in bad.text


def test_all_functions_of_a_card_go_to_vfio_and_come_back(tmp_path: Path) -> None:
    kernel = kernel_with_card(tmp_path / "sys")
    cards = dedicated(tmp_path, kernel)
    cards.bind()
    assert [kernel.driver(one) for one in (CARD, AUDIO)] == ["vfio-pci", "vfio-pci"]
    (gpu,) = cards.gpus(3)
    assert (gpu.index, gpu.uuid, gpu.model) == (3, "GPU-1-2", "H100")
    assert (gpu.memory_bytes, gpu.guest, gpu.untested) == (81559 * MIB, True, True)
    assert gpu.sharing is Sharing.EXCLUSIVE
    cards.release()
    assert [kernel.driver(one) for one in (CARD, AUDIO)] == ["nvidia", "snd_hda_intel"]
    assert kernel.resets == [CARD]  # before it is the host's again
    assert cards.gpus(0) == ()


def test_the_next_agent_knows_the_drivers_after_a_crash(tmp_path: Path) -> None:
    kernel = kernel_with_card(tmp_path / "sys")
    dedicated(tmp_path, kernel).bind()
    later = dedicated(tmp_path, kernel, ask=None)
    later.bind()
    assert later.gpus(0)[0].uuid == "GPU-1-2"
    later.release()
    assert [kernel.driver(one) for one in (CARD, AUDIO)] == ["nvidia", "snd_hda_intel"]


def test_a_card_that_is_no_longer_named_is_returned_at_the_start(tmp_path: Path) -> None:
    kernel = kernel_with_card(tmp_path / "sys")
    dedicated(tmp_path, kernel).bind()
    dedicated(tmp_path, kernel, "").bind()
    assert kernel.driver(CARD) == "nvidia"


def test_a_card_bound_at_boot_stays_with_vfio_and_needs_its_description(tmp_path: Path) -> None:
    kernel = FakeKernel(tmp_path / "sys")
    kernel.add(CARD, driver="vfio-pci")
    with pytest.raises(Invalid, match=r"=H100:80GB"):
        dedicated(tmp_path, kernel).bind()
    cards = dedicated(tmp_path, kernel, f"{CARD}=H100:80GB")
    cards.bind()
    assert cards.gpus(0)[0].uuid.startswith("VFIO-")
    cards.release()
    assert kernel.driver(CARD) == "vfio-pci"


def test_a_card_that_does_not_qualify_leaves_all_with_their_drivers(tmp_path: Path) -> None:
    kernel = kernel_with_card(tmp_path / "sys")
    kernel.add("0000:61:00.0", group="")
    with pytest.raises(Invalid, match=r"0000:61:00\.0 cannot be given to guests: it has no IOMMU"):
        dedicated(tmp_path, kernel, f"{CARD},0000:61:00.0").bind()
    assert kernel.driver(CARD) == "nvidia"


def test_a_card_that_a_program_holds_open_is_refused(tmp_path: Path) -> None:
    kernel, proc = kernel_with_card(tmp_path / "sys"), tmp_path / "proc"
    facts = proc / "driver/nvidia/gpus" / CARD
    facts.mkdir(parents=True)
    (facts / "information").write_text("Model: \t H100\nDevice Minor: \t 5\n")
    (proc / "77/fd").mkdir(parents=True)
    (proc / "77/fd/3").symlink_to("/dev/nvidia4")
    dedicated(tmp_path, kernel, proc=proc).bind()  # another card's
    dedicated(tmp_path, kernel, "", proc=proc).bind()
    (proc / "77/fd/4").symlink_to("/dev/nvidia5")
    with pytest.raises(Invalid, match="process 77 has it open"):
        dedicated(tmp_path, kernel, proc=proc).bind()
    assert kernel.driver(CARD) == "nvidia"


def test_the_agent_lists_dedicated_cards_after_all_others(tmp_path: Path) -> None:
    kernel = kernel_with_card(tmp_path / "sys")
    cards = dedicated(tmp_path, kernel, untested=False)
    cards.bind()
    detector = Detector(others=ParsedGpus, guests=cards.gpus, pci=kernel.root / "bus/pci/devices")
    (gpu,) = [gpu for gpu in detector.survey().gpus if gpu.guest]
    assert not gpu.untested
    assert gpu.details is not None
    assert gpu.details.bus == CARD
    cards.unclean[CARD] = "it could not be reset"
    assert detector.survey().gpus[-1].closed == "it could not be reset"


# ---- leases


def leasing(tmp_path: Path, kernel: FakeKernel) -> tuple[DedicatedCards, GuestCards]:
    devices = tmp_path / "dev"
    (devices / "vfio").mkdir(parents=True)
    for name in ("vfio", "7"):
        (devices / "vfio" / name).touch()
    cards = dedicated(tmp_path, kernel, devices=devices)
    cards.bind()

    def none(vendor: str, _: Path) -> drivers.GuestDrivers:
        raise PartFailed(f"no driver for {vendor}")

    leases = GuestCards(cards, DiskStore(tmp_path / "disks"), tmp_path / "unpacked", none)
    leases.use(cards.gpus(2))
    return cards, leases


def test_a_card_is_reset_before_each_guest_and_opened_to_its_monitor_alone(tmp_path: Path) -> None:
    kernel = kernel_with_card(tmp_path / "sys")
    _, leases = leasing(tmp_path, kernel)
    group, uid = tmp_path / "dev/vfio/7", os.geteuid() or 4711

    async def twice() -> None:
        for resets in (1, 2):
            lease = await leases.take([Slice(2, GIB, 1000)], uid)
            assert lease is not None
            assert len(kernel.resets) == resets
            assert lease.addresses == (CARD,)
            assert lease.nodes == (str(tmp_path / "dev/vfio/vfio"), str(group))
            assert group.stat().st_uid == uid
            lease.close()
            assert group.stat().st_uid == os.geteuid()

    asyncio.run(twice())
    assert asyncio.run(leases.take([], uid)) is None


def test_a_card_that_does_not_reset_is_set_aside(tmp_path: Path) -> None:
    kernel = kernel_with_card(tmp_path / "sys")
    cards, leases = leasing(tmp_path, kernel)
    kernel.broken.add(CARD)
    for _ in range(2):
        with pytest.raises(PartFailed, match="could not be reset"):
            asyncio.run(leases.take([Slice(2, GIB, 1000)], os.geteuid()))
        kernel.broken.clear()  # it stays aside even so
    assert "could not be reset" in cards.gpus(0)[0].closed
    cards.release()
    assert kernel.driver(CARD) == "vfio-pci"  # a dirty card is not the host's again


def test_a_guest_gets_no_card_but_dedicated_ones(tmp_path: Path) -> None:
    _, leases = leasing(tmp_path, kernel_with_card(tmp_path / "sys"))
    with pytest.raises(SandboxFailed, match="no others"):
        asyncio.run(leases.take([Slice(0, GIB, 1000)], os.geteuid()))


# ---- drivers for the guest


def a_host(root: Path, version: str = "6.1.0-9-amd64", *, module: bool = True) -> None:
    """A kernel whose needed modules are built in, and NVIDIA's driver from DKMS."""
    (root / "boot").mkdir(parents=True)
    (root / "boot" / f"vmlinuz-{version}").write_bytes(b"kernel")
    folder = root / "lib/modules" / version
    (folder / "updates/dkms").mkdir(parents=True)
    names = ("virtio_mmio", "virtio_blk", "virtio_console", "squashfs", "ext4")
    (folder / "modules.builtin").write_text("".join(f"kernel/{name}.ko\n" for name in names))
    if module:
        text = b"\0version=580.1\0depends=\0"
        (folder / "updates/dkms/nvidia.ko").write_bytes(text)
        (folder / "updates/dkms/nvidia-uvm.ko").write_bytes(b"\0depends=nvidia\0")
    for release in ("570.0", "580.1"):
        (root / "lib/firmware/nvidia" / release).mkdir(parents=True)
        (root / "lib/firmware/nvidia" / release / "gsp_ga10x.bin").write_text(release)


def test_the_disk_of_drivers_holds_modules_firmware_and_libraries_of_one_version(
    tmp_path: Path,
) -> None:
    a_host(tmp_path / "host")
    library = tmp_path / "libcuda.so.580.1"
    library.touch()
    cache = f"\tlibcuda.so.1 (libc6,x86-64) => {library}\n\tlibm.so.6 (libc6,x86-64) => /m\n"
    found = drivers.find_drivers(
        "nvidia", tmp_path / "unpacked", root=tmp_path / "host", cache=lambda: cache
    )
    assert found.modules == ("nvidia.ko", "nvidia-uvm.ko")
    assert found.kernel.version == "6.1.0-9-amd64"
    assert set(found.disk.files) == {
        "/modules/nvidia.ko",
        "/modules/nvidia-uvm.ko",
        "/firmware/nvidia/580.1/gsp_ga10x.bin",
        "/lib/libcuda.so.1",
    }
    assert found.scrubs


def test_a_host_without_the_module_for_any_kernel_is_told_what_to_install(tmp_path: Path) -> None:
    a_host(tmp_path, module=False)
    with pytest.raises(PartFailed, match=r"has the module nvidia.*DKMS.*it has no nvidia"):
        drivers.find_drivers("nvidia", tmp_path / "unpacked", root=tmp_path, cache=str)


# ---- QEMU


def a_machine(*cards: str) -> GuestMachine:
    return GuestMachine("/kernel", "/archive", (), (), 64, 1, cards=cards, card_nodes=("/dev/7",))


def test_a_monitor_sees_the_groups_of_its_cards_and_pci_read_only() -> None:
    made = Qemu("qemu", TCG).command(a_machine(CARD), 3)
    assert made.devices == ("/dev/7",)
    assert made.pins_memory
    words = " ".join(monitor_arguments(MonitorCommand((), ("/dev/7",), ("/sys/bus/pci",)), (), "/"))
    assert "--ro-bind /sys/bus/pci /sys/bus/pci" in words
    assert "--dev-bind /dev/7 /dev/7" in words
    plain = Qemu("qemu", TCG).command(replace(a_machine(), card_nodes=()), 3)
    assert (plain.devices, plain.folders, plain.pins_memory) == ((), (), False)
    assert "pcie" not in " ".join(plain.argv)


@qemu
def test_qemu_takes_every_argument_and_looks_for_the_card() -> None:
    """The control: without PCI the same device is refused for its bus."""
    words = command_line(find_qemu(), TCG, a_machine(CARD), 3)
    chosen = words[: words.index("-kernel")]  # files that are not there
    device = words[words.index(f"vfio-pci,host={CARD},id=card0,bus=pcie.0,rombar=0") - 1 :][:2]

    def said(machine: str) -> str:
        argv = [*(machine if one.startswith("microvm") else one for one in chosen), "-S", *device]
        ran = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=False)
        return ran.stderr

    machine = chosen[chosen.index("-M") + 1]
    assert machine.endswith(",pcie=on")
    assert f"{CARD}: no such host device" in said(machine)
    assert "Bus 'pcie.0' not found" in said(machine.removesuffix(",pcie=on"))


class StandIn(Qemu):
    """QEMU with a device of its own where a host's card would be: a window of 128 GiB, as large cards have."""

    def command(self, machine: GuestMachine, line: int) -> MonitorCommand:
        made = super().command(replace(machine, cards=machine.cards or (CARD,)), line)
        memory = "memory-backend-ram,id=window,size=128G,share=on,reserve=off"
        device = "ivshmem-plain,memdev=window,bus=pcie.0"
        words = [device if one.startswith("vfio-pci") else one for one in made.argv]
        folders = tuple(folder for folder in made.folders if os.path.isdir(folder))
        return replace(made, argv=(*words, "-object", memory), folders=folders, devices=())


LOOK = "print(open('/proc/bus/pci/devices').read())"


def ran(runtime: MicrovmRuntime, job: CommandJob) -> str:
    async def whole() -> str:
        try:
            sandbox = await runtime.start_command(job)
            said = b"".join([data async for _, data in sandbox.output()])
            await sandbox.ended()
            await sandbox.remove()
            return said.decode()
        finally:
            await runtime.close()

    return within(whole(), 900)


@qemu
def test_a_guest_gives_a_large_card_its_memory_window(tmp_path: Path) -> None:
    runtime = MicrovmRuntime(tmp_path, disks=microvm_disks(), monitor=StandIn(find_qemu(), TCG))
    said = ran(runtime, CommandJob(("python3", "-c", LOOK), (), (), (), LIMITS))
    rows = [line.split() for line in said.splitlines() if line.strip()]
    (card,) = [row for row in rows if row[1] == "1af41110"]
    start, size = int(card[5], 16), int(card[12], 16)
    assert size == 128 * GIB
    assert start & ~0xF >= 4 * GIB  # assigned, above 32 bits


def guest_with_card(
    data: Path, *, vendor: str, nodes: tuple[str, ...]
) -> tuple[MicrovmRuntime, Path]:
    """A runtime whose guests load a module of this machine's kernel as their GPU's driver, and the node of the card's group."""
    kernel = find_kernel()
    (module,) = (Path("/lib/modules") / kernel.version / "kernel").rglob("dummy.ko")
    disk = DiskContents({"/modules/dummy.ko": str(module)}, ("/firmware", "/lib"))
    fake = FakeKernel(data / "sys", ("nvidia", "amdgpu"))
    facts = {"mem_info_vram_total": str(64 * GIB), "product_name": "MI300X"}
    number, driver = {"nvidia": ("0x10de", "nvidia"), "amd": ("0x1002", "amdgpu")}[vendor]
    fake.add(CARD, vendor=number, driver=driver, **(facts if vendor == "amd" else {}))
    cards, _ = leasing(data / "agent", fake)
    runtime = MicrovmRuntime(
        data,
        disks=microvm_disks(),
        monitor=StandIn(find_qemu(), TCG),
        cards=cards,
        drivers=lambda _vendor, _: drivers.GuestDrivers(kernel, ("dummy.ko",), disk, False, nodes),
    )
    assert RuntimeAbility.GPUS in runtime.abilities
    runtime.use_gpus(cards.gpus(0))
    return runtime, data / "agent/dev/vfio/7"


ONE_GPU = (Slice(0, GIB, 1000),)
SEES = """
import json, os
def refused():
    try:
        open("/sys/kernel/profiling", "w")
    except OSError as error:
        return error.strerror
print(json.dumps({
    "module": "dummy" in open("/proc/modules").read(),
    "node": os.stat("/dev/ttyS0").st_rdev == os.makedev(4, 64),
    "sys": refused(),
    "visible": os.environ["ROCR_VISIBLE_DEVICES"],
    "pci": len(os.listdir("/sys/bus/pci/devices")),
}))
"""


@qemu
def test_a_guest_with_a_card_has_its_driver_its_nodes_and_a_read_only_sys(tmp_path: Path) -> None:
    """No real card: a module of the kernel plays the driver, and the console's node that of a GPU."""
    runtime, _ = guest_with_card(tmp_path, vendor="amd", nodes=("none*", "ttyS0"))
    said = json.loads(ran(runtime, CommandJob(("python3", "-c", SEES), (), (), ONE_GPU, LIMITS)))
    wanted = {"module": True, "node": True, "sys": "Read-only file system", "visible": "0"}
    assert said == wanted | {"pci": 2}  # the host bridge and the card


@qemu
def test_a_guest_whose_driver_finds_no_card_says_so(tmp_path: Path) -> None:
    runtime, node = guest_with_card(tmp_path, vendor="nvidia", nodes=())
    job = CommandJob(("true",), (), (), ONE_GPU, LIMITS)
    with pytest.raises(SandboxFailed, match="its driver found 0 of 1 GPUs"):
        ran(runtime, job)
    assert node.stat().st_uid == os.geteuid()  # closed again
