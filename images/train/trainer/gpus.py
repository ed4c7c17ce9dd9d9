"""What NVML tells of this machine's GPUs: the driver's own library by ctypes, so that looking needs no package of ours.

Source: https://docs.nvidia.com/deploy/nvml-api (the structures and constants below are those of version 2 and later).
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from pydantic import BaseModel, ConfigDict

LIBRARY = "libnvidia-ml.so.1"
VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable with the cards that CUDA is to show; NVML numbers all of them whatever it says."""

_UNCORRECTED, _SINCE_BOOT, _OF_THE_GPU = 1, 0, 0
_NOT_SUPPORTED = 3


class Gpu(BaseModel):
    """A card: name, memory in bytes, what it can do (major and minor compute capability), and its health.

    `ecc_errors` counts uncorrected memory errors since the driver was loaded, `remap_failed` says that a row of its
    memory is broken beyond repair, `remap_pending` that a reset is due. None where the card does not tell.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    memory: int
    capability: tuple[int, int] | None = None
    ecc_errors: int | None = None
    remap_failed: bool | None = None
    remap_pending: bool | None = None


class Cards(BaseModel):
    """All cards of a machine. `fault` is what NVML answered instead, where it is there and does not work."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    fault: str | None = None


def look(library: Any = None) -> Cards:
    """The cards of this machine that CUDA shows to this process, in its order; none where there is no driver."""
    try:
        nvml = library or ctypes.CDLL(LIBRARY)
    except OSError:
        return Cards()
    try:
        _check(nvml.nvmlInit_v2(), "nvmlInit")
    except OSError as error:
        return Cards(fault=str(error))
    try:
        driver = ctypes.create_string_buffer(80)
        _check(nvml.nvmlSystemGetDriverVersion(driver, 80), "nvmlSystemGetDriverVersion")
        gpus = tuple(_gpu(nvml, index, name) for index, name in enumerate(_visible(nvml)))
        return Cards(driver=driver.value.decode(), gpus=gpus)
    except OSError as error:
        return Cards(fault=str(error))
    finally:
        nvml.nvmlShutdown()


class _Memory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def _visible(nvml: Any) -> list[int | bytes]:
    """By what NVML finds the cards that CUDA shows, in CUDA's order: by a number, or by a UUID."""
    count = ctypes.c_uint()
    _check(nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), "nvmlDeviceGetCount")
    asked = os.environ.get(VISIBLE)
    if asked is None:
        return list(range(count.value))
    names: list[int | bytes] = []
    for name in map(str.strip, asked.split(",")):
        if name.isdigit() and int(name) < count.value:
            names.append(int(name))
        elif name.startswith(("GPU-", "MIG-")):
            names.append(name.encode())
        else:  # CUDA shows none of what comes after a name that it does not know
            break
    return names


def _card(nvml: Any, index: int, name: int | bytes) -> ctypes.c_void_p:
    card = ctypes.c_void_p()
    find = nvml.nvmlDeviceGetHandleByIndex_v2 if isinstance(name, int) else nvml.nvmlDeviceGetHandleByUUID
    _check(find(name, ctypes.byref(card)), f"card {index}")
    return card


def _gpu(nvml: Any, index: int, of: int | bytes) -> Gpu:
    card, name, memory = _card(nvml, index, of), ctypes.create_string_buffer(96), _Memory()
    _check(nvml.nvmlDeviceGetName(card, name, 96), f"card {index}: name")
    _check(nvml.nvmlDeviceGetMemoryInfo(card, ctypes.byref(memory)), f"card {index}: memory")
    able = ctypes.c_int(), ctypes.c_int()
    _check(nvml.nvmlDeviceGetCudaComputeCapability(card, *map(ctypes.byref, able)), f"card {index}: capability")
    errors = ctypes.c_ulonglong()
    told = nvml.nvmlDeviceGetTotalEccErrors(card, _UNCORRECTED, _SINCE_BOOT, ctypes.byref(errors))
    rows = [ctypes.c_uint() for _ in range(4)]  # remapped for correctable, for uncorrectable errors; pending; failed
    remap = nvml.nvmlDeviceGetRemappedRows(card, *(ctypes.byref(row) for row in rows))
    return Gpu(
        name=name.value.decode(), memory=memory.total,
        capability=(able[0].value, able[1].value) if able[0].value else None,
        ecc_errors=errors.value if _told(told, f"card {index}: ECC errors") else None,
        remap_pending=bool(rows[2].value) if _told(remap, f"card {index}: remapped rows") else None,
        remap_failed=bool(rows[3].value) if remap == 0 else None,
    )  # fmt: skip


class Meter:
    """Looks at one card again and again: NVML is asked as long as this lives."""

    def __init__(self, nvml: Any, card: Any) -> None:
        self._nvml, self._card = nvml, card

    @classmethod
    def of(cls, index: int, library: Any = None) -> Meter | None:
        """Of the card that has that number in CUDA; None where there is no driver or no such card."""
        try:
            nvml = library or ctypes.CDLL(LIBRARY)
            _check(nvml.nvmlInit_v2(), "nvmlInit")
            return cls(nvml, _card(nvml, index, _visible(nvml)[index]))
        except (OSError, IndexError):
            return None

    def read(self) -> dict[str, float]:
        """What the card tells now: `utilisation` (share of the last second in which it computed at all), `temperature`
        in degrees Celsius, `power` in watts, `device_memory` in bytes."""
        rates, memory = _Rates(), _Memory()
        heat, power = ctypes.c_uint(), ctypes.c_uint()
        ask, card = self._nvml, self._card
        told: dict[str, float] = {}
        if ask.nvmlDeviceGetUtilizationRates(card, ctypes.byref(rates)) == 0:
            told["utilisation"] = rates.gpu / 100
        if ask.nvmlDeviceGetTemperature(card, _OF_THE_GPU, ctypes.byref(heat)) == 0:
            told["temperature"] = float(heat.value)
        if ask.nvmlDeviceGetPowerUsage(card, ctypes.byref(power)) == 0:
            told["power"] = power.value / 1000
        if ask.nvmlDeviceGetMemoryInfo(card, ctypes.byref(memory)) == 0:
            told["device_memory"] = float(memory.used)
        return told


class _Rates(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_uint), ("memory", ctypes.c_uint)]


def _told(code: int, what: str) -> bool:
    if code == _NOT_SUPPORTED:
        return False
    _check(code, what)
    return True


def _check(code: int, what: str) -> None:
    if code != 0:
        raise OSError(f"NVML: {what} gave error {code}")
