"""Where the values of weights come from, one whole parameter at a time: a file, a recipe, or rank 0's own model."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from shardwise.errors import JobError
from shardwise.hardware import available_memory
from shardwise.parallel.skeleton import initialize
from shardwise.torch_private.modules import own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from shardwise.parallel.skeleton import Recipe


class Weights(Protocol):
    """Gives the whole value of one parameter or buffer after another."""

    description: str
    """How the values come to be, for the start report."""
    from_model: bool
    """Whether the values are those that the job's model function gives under the job's seed."""

    def value(self, name: str, like: Tensor, device: torch.device, *, wanted: bool) -> Tensor | None:
        """Return the value on `device`, None where it is not wanted; called on every rank in the same order."""


class InitializedWeights:
    """Each value is drawn by its recipe, from the job's seed and the parameter's name: no rank needs another."""

    description = "initialized by parameter name, shard by shard"
    from_model = False

    def __init__(self, recipes: Mapping[str, Recipe], seed: int) -> None:
        self._recipes = recipes
        self._seed = seed

    def value(self, name: str, like: Tensor, device: torch.device, *, wanted: bool) -> Tensor | None:
        """Draw the value; no communication."""
        if not wanted:
            return None
        # Always in fp32: every dtype then starts from the same values, up to its rounding.
        value = torch.empty(like.shape, dtype=torch.float32, device=device)
        initialize(self._recipes[name], value, name=name, seed=self._seed)
        return value.to(like.dtype)


class StreamedWeights:
    """Rank 0 builds the model once on its host and hands out one tensor after another."""

    from_model = True

    def __init__(self, make_values: Callable[[], dict[str, Tensor]], *, num_bytes: int, rank: int, size: int) -> None:
        """`make_values` is called on rank 0 only; `num_bytes` is what that takes."""
        if rank == 0 and num_bytes > available_memory():
            raise JobError(
                f"building the model takes {num_bytes / 1e9:.1f} GB of host memory,"
                f" {available_memory() / 1e9:.1f} GB are free",
                code="model.exceeds-host-memory",
                fix="start from a file (Job.weights=), or give the model an init_weights() that sets every parameter",
            )
        self.description = f"built on rank 0's host ({num_bytes / 1e9:.2g} GB) and broadcast"
        self._values = make_values() if rank == 0 else {}
        self._size = size

    def value(self, name: str, like: Tensor, device: torch.device, *, wanted: bool) -> Tensor | None:
        """Communicate over the world: rank 0's value on every rank."""
        source = self._values.get(name)
        if source is None:
            value = torch.empty(like.shape, dtype=like.dtype, device=device)
        else:
            value = source.detach().to(device, like.dtype)
        if self._size > 1:
            dist.broadcast(value, src=0)
        return value if wanted else None


class BuiltWeights:
    """Every rank built the model for real: its parameters have their values, which are returned by name."""

    def __init__(self, values: Mapping[str, Tensor], source: Weights | None = None) -> None:
        """`source` is where the values came from, if not from the model's own construction."""
        self.description = (
            "built on every rank's host" if source is None else f"{source.description}, into a model built for real"
        )
        self.from_model = source is None
        self._values = values

    def value(self, name: str, like: Tensor, device: torch.device, *, wanted: bool) -> Tensor | None:
        """Return the value; no communication."""
        return self._values[name].to(device, like.dtype) if wanted else None


class FileWeights:
    """Every rank reads what it wants out of files that are mapped into memory, not loaded."""

    from_model = False

    def __init__(self, values: Mapping[str, Tensor], saved_as: Mapping[str, str], path: Path) -> None:
        """`saved_as` gives each tensor's name in the file."""
        self.description = f"read from {path}"
        self._values = values
        self._saved_as = saved_as
        self._path = path

    def value(self, name: str, like: Tensor, device: torch.device, *, wanted: bool) -> Tensor | None:
        """Read the value; no communication."""
        if not wanted:
            return None
        value = self._values[self._saved_as[name]]
        if value.shape != like.shape:
            shapes = f"{name} is {list(value.shape)}, the model's {list(like.shape)}"
            raise JobError(
                f"Job.weights {self._path} does not load ({shapes})",
                code="model.weights-shape-mismatch",
                fix="name the state dict of this model",
            )
        return value.to(device, like.dtype)


def fill_parameters(
    module: nn.Module, specs: Iterable[tuple[str, Tensor]], weights: Weights, device: torch.device
) -> None:
    """Give real values to the parameters on the meta device among `specs`; may communicate, on every rank.

    `specs` are (name, whole tensor on meta), the same on every rank; a rank passes over what its module lacks. Tied
    parameters stay tied.
    """
    own = dict(module.named_parameters())
    holders = _holders(module)
    for name, spec in specs:
        parameter = own.get(name)
        wanted = parameter is not None and parameter.is_meta
        value = weights.value(name, spec, device, wanted=wanted)
        if parameter is None or value is None:
            continue
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        filled = nn.Parameter(value, requires_grad=parameter.requires_grad)
        for holder, attribute in holders[id(parameter)]:
            own_parameters(holder)[attribute] = filled


def fill_buffers(
    module: nn.Module, specs: Iterable[tuple[str, Tensor]], weights: Weights, device: torch.device
) -> None:
    """Give every buffer among `specs` the value that `weights` has for it; may communicate, on every rank."""
    own = dict(module.named_buffers())
    for name, spec in specs:
        value = weights.value(name, spec, device, wanted=name in own)
        if value is not None:
            own[name].copy_(value)


def share_values(module: nn.Module, device: torch.device) -> None:
    """Give every rank rank 0's parameters and buffers, in place; communicates over the world."""
    for tensor in [*module.parameters(), *module.buffers()]:
        value = tensor.detach().to(device).contiguous()
        dist.broadcast(value, src=0)
        # An expanded buffer is one memory under many indices and cannot be written; equal values need not be.
        if value.data_ptr() != tensor.data_ptr() and not torch.equal(value.to(tensor.device), tensor.detach()):
            tensor.data.copy_(value)


def _holders(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for submodule in module.modules():
        for attribute, parameter in own_parameters(submodule).items():
            if parameter is not None:
                holders.setdefault(id(parameter), []).append((submodule, attribute))
    return holders


# Weights in files: a torch state dict, a safetensors file, or a Hugging Face folder, read without loading it whole.


def open_weights(path: Path) -> Mapping[str, Tensor]:
    """Return the tensors of a file or folder by name; each is read when it is asked for."""
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise JobError(
                f"Job.weights {path} has no .safetensors file",
                code="model.weights-no-safetensors",
                fix="name a folder saved by save_pretrained",
            )
        return _Safetensors(files)
    if not path.is_file():
        raise JobError(
            f"Job.weights {path} is not a file",
            code="model.weights-not-found",
            fix="name a state dict saved by torch.save, or a folder",
        )
    if path.suffix == ".safetensors":
        return _Safetensors([path])
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, TypeError, OSError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise JobError(
            f"Job.weights {path} does not load (it is no state dict)",
            code="model.weights-not-state-dict",
            fix="save model.state_dict()",
        )
    return state


class _Safetensors(Mapping[str, Tensor]):
    """Tensors of several files under one roof, of which one at a time is open: mapped pages count as host memory."""

    def __init__(self, files: list[Path]) -> None:
        self._paths: dict[str, Path] = {}
        for path in files:
            self._paths.update(dict.fromkeys(_open(path).keys(), path))
        self._open: tuple[Path, Any] | None = None

    def __getitem__(self, name: str) -> Tensor:
        path = self._paths[name]
        if self._open is None or self._open[0] != path:
            self._open = None  # before the next one is mapped
            self._open = (path, _open(path))
        value: Tensor = self._open[1].get_tensor(name)
        return value

    def __iter__(self) -> Iterator[str]:
        return iter(self._paths)

    def __len__(self) -> int:
        return len(self._paths)


def _open(path: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(path, framework="pt", device="cpu")
    except (SafetensorError, OSError) as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: Exception) -> JobError:
    reason = (str(error).splitlines() or [""])[-1].strip()
    return JobError(
        f"Job.weights {path} does not load ({reason})",
        code="model.weights-unreadable",
        fix="name a matching state dict",
    )
