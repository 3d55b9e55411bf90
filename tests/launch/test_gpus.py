"""GPUs: nothing needs one, and who holds their memory is said. NVML is faked, but for the last test."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from bench.launch.gpus import Gpus
from bench.launch.processes import command_line
from bench.secrets import REDACTED

from .conftest import WAIT, Launchpad

GIB = 2**30
MIG_DEVICE = 100
UUIDS = {0: "GPU-8932f937-d72c", 1: "GPU-89aa0001-55e1", MIG_DEVICE: "MIG-c6d4f1ef-42e4"}


@dataclass
class FakeNvml:
    """The calls of pynvml that are used, over cards whose memory the test sets."""

    used_bytes: list[int]
    processes: list[SimpleNamespace] = field(default_factory=list)
    shut_down: bool = False
    lost: bool = False
    memory_version: int = 2
    nvmlMemory_v2: int = 2  # noqa: N815

    class NVMLError(Exception):
        pass

    def nvmlInit(self) -> None: ...

    def nvmlShutdown(self) -> None:
        self.shut_down = True

    def nvmlDeviceGetCount(self) -> int:
        return len(self.used_bytes)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        if index >= len(self.used_bytes):
            raise self.NVMLError("Invalid Argument")
        return index

    def nvmlDeviceGetMaxMigDeviceCount(self, device: int) -> int:
        if device == 0:
            raise self.NVMLError("Not Supported")
        return 2

    def nvmlDeviceGetMigDeviceHandleByIndex(self, device: int, place: int) -> int:
        if place == 0:
            raise self.NVMLError("Not Found")
        return MIG_DEVICE

    def nvmlDeviceGetIndex(self, device: int) -> int:
        return device

    def nvmlDeviceGetMemoryInfo(self, device: int, version: int = 1) -> SimpleNamespace:
        if self.lost:
            raise self.NVMLError("GPU is lost")
        if version > self.memory_version:
            raise self.NVMLError("Function Not Found")
        return SimpleNamespace(total=96 * GIB, used=0 if device == MIG_DEVICE else self.used_bytes[device])

    def nvmlDeviceGetName(self, device: int) -> str:
        return "Fake 96"

    def nvmlDeviceGetUUID(self, device: int) -> str:
        return UUIDS[device]

    def nvmlSystemGetDriverVersion(self) -> bytes:
        return b"580.1"

    def nvmlDeviceGetComputeRunningProcesses(self, device: int) -> list[SimpleNamespace]:
        return self.processes

    def nvmlDeviceGetGraphicsRunningProcesses(self, device: int) -> list[SimpleNamespace]:
        return []


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
    fake = FakeNvml([0, 0])
    monkeypatch.setitem(sys.modules, "pynvml", fake)
    return fake


async def test_a_host_without_gpu_answers_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pynvml", None)
    with Gpus() as gpus:
        assert len(gpus) == 0
        assert gpus.why_none
        assert gpus.facts() == ()
        assert gpus.used_bytes() == ()
        assert gpus.occupants(()) == ()
        assert await gpus.wait_free((), deadline_s=0) == ()


def test_no_visible_gpu_is_none(nvml: FakeNvml) -> None:
    assert len(Gpus(visible="")) == 0


@pytest.mark.parametrize(
    ("visible", "indices"),
    [
        (None, [0, 1]),
        ("1", [1]),
        ("1,0", [1, 0]),
        ("GPU-89aa0001-55e1", [1]),
        ("GPU-8932f937", [0]),  # a prefix that only one has
        ("GPU-89aa, GPU-8932", [1, 0]),
        ("MIG-c6d4", [MIG_DEVICE]),
        ("0,", [0]),  # CUDA sees none from the first name on that names none
        ("1,-1,0", [1]),
        ("0,7,1", [0]),
        ("0,GPU-dead,1", [0]),
        ("0,GPU-89,1", [0]),  # a prefix that both have
    ],
)
def test_the_gpus_are_those_that_the_server_will_see(nvml: FakeNvml, visible: str | None, indices: list[int]) -> None:
    with Gpus(visible) as gpus:
        assert [gpu.index for gpu in gpus.facts()] == indices
        assert gpus.why_none == ""
    assert nvml.shut_down


@pytest.mark.parametrize("visible", ["7", "-1", ",0", "NoDevFiles"])
def test_names_of_no_gpu_are_said_so(nvml: FakeNvml, visible: str) -> None:
    gpus = Gpus(visible)
    assert len(gpus) == 0
    assert gpus.why_none == f"CUDA_VISIBLE_DEVICES={visible} begins with none of the 2 GPUs of this host"


def test_facts_are_the_drivers(nvml: FakeNvml) -> None:
    gpu = Gpus("0").facts()[0]
    assert (gpu.name, gpu.driver, gpu.total_bytes, gpu.used_bytes) == ("Fake 96", "580.1", 96 * GIB, 0)


def test_an_old_driver_tells_memory_too(nvml: FakeNvml) -> None:
    nvml.memory_version = 1
    nvml.used_bytes[1] = 3 * GIB
    assert Gpus().used_bytes() == (0, 3 * GIB)


async def test_memory_that_comes_back_is_waited_for(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    gpus = Gpus()
    baseline = gpus.used_bytes()
    nvml.used_bytes[1] = 40 * GIB
    naps = []

    async def nap(duration_s: float) -> None:
        naps.append(duration_s)
        nvml.used_bytes[1] = max(0, nvml.used_bytes[1] - 20 * GIB)

    monkeypatch.setattr("bench.launch.gpus.asyncio.sleep", nap)
    assert await gpus.wait_free(baseline, deadline_s=600) == ()
    assert len(naps) == 2


async def test_another_process_on_the_gpu_is_named_with_its_pid(nvml: FakeNvml) -> None:
    gpus = Gpus("0")
    baseline = gpus.used_bytes()
    nvml.used_bytes[0] = 30 * GIB
    nvml.processes = [
        SimpleNamespace(pid=1, usedGpuMemory=29 * GIB),
        SimpleNamespace(pid=2**22 - 1, usedGpuMemory=None),
    ]
    assert await gpus.wait_free(baseline, deadline_s=0.05) == (
        f"GPU 0: pid 1 ({command_line(1)}) with 29.0 GiB",
        f"GPU 0: pid {2**22 - 1} (not visible from here)",
    )
    assert gpus.occupants(baseline, ours={1, 2**22 - 1}) == (
        "GPU 0: 30.0 GiB more in use than when it was idle, by processes unseen",
    )


def test_who_computes_before_the_sweep_is_not_part_of_the_idle_memory(nvml: FakeNvml) -> None:
    nvml.used_bytes = [31 * GIB]
    nvml.processes = [SimpleNamespace(pid=1, usedGpuMemory=30 * GIB)]
    assert Gpus("0").idle_bytes() == (GIB,)
    nvml.processes = []  # as in a container: nobody is listed, so what is used cannot be told from what is idle
    assert Gpus("0").idle_bytes() == (31 * GIB,)


async def test_where_the_driver_lists_nobody_the_memory_in_use_is_said(nvml: FakeNvml) -> None:
    gpus = Gpus("0")
    nvml.used_bytes[0] = 30 * GIB
    assert await gpus.wait_free((0,), deadline_s=0.05) == (
        "GPU 0: 30.0 GiB more in use than when it was idle, by processes unseen",
    )


async def test_what_the_driver_itself_takes_is_nobody(nvml: FakeNvml) -> None:
    nvml.used_bytes[0] = 50 * 2**20
    assert await Gpus("0").wait_free((0,), deadline_s=0) == ()


async def test_a_gpu_that_is_lost_keeps_no_server_from_being_put_away(nvml: FakeNvml, pad: Launchpad) -> None:
    server = await pad.start(
        f"print('ARGS', os.environ['MY_PASSWORD'], flush=True)\n{WAIT}",
        env={"MY_PASSWORD": "added-secret"},
        gpus=Gpus("0"),
    )
    await pad.log_has("ARGS")
    nvml.lost = True
    teardown = await server.stop(grace_s=0, deadline_s=5)
    assert teardown.group_gone
    assert teardown.gpu_memory_back is None
    assert teardown.stragglers == ("GPU memory could not be read: GPU is lost",)
    assert not (pad.folder / "launch.json").exists()
    assert (pad.folder / "server.log").read_text() == f"ARGS {REDACTED}\n"


HOLDS_8_GIB = """
import ctypes, time
cuda = ctypes.CDLL("libcuda.so.1")
device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
for result in (
    cuda.cuInit(0),
    cuda.cuDeviceGet(ctypes.byref(device), 0),
    cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device),
    cuda.cuCtxSetCurrent(context),
    cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(8 << 30)),
):
    assert result == 0, result
print("HOLDS", flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(not len(Gpus()), reason="there is no GPU here")
async def test_the_memory_of_a_killed_server_is_back_before_its_stop_returns(pad: Launchpad) -> None:
    with Gpus() as gpus:
        baseline = gpus.used_bytes()
        server = await pad.start(program=HOLDS_8_GIB, gpus=gpus)
        await pad.log_has("HOLDS", deadline_s=60)
        assert gpus.used_bytes()[0] > baseline[0] + 8 * GIB
        print(gpus.facts(), gpus.occupants(baseline), baseline)
        teardown = await server.stop(grace_s=0)
        print(teardown, gpus.used_bytes())
        assert teardown.gpu_memory_back is True
        assert teardown.stragglers == ()
        assert gpus.occupants(baseline) == ()
