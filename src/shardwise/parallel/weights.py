"""Sources of initial weights, read one parameter at a time: a file, recorded initialization, or a built model."""

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
from shardwise.torch_private.dispatch import own_parameters

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from shardwise.parallel.skeleton import Recipe


class Weights(Protocol):
    """A source of the full values of parameters and buffers, one at a time."""

    description: str
    """A description of the source for the start report."""
    from_model: bool
    """Whether the values come from the job's model function with the job's seed."""

    def value(self, name: str, like: Tensor, device: torch.device, *, wanted: bool) -> Tensor | None:
        """Return the full tensor on `device`, or None if not `wanted`; call on every rank in the same order."""


class InitializedWeights:
    """Values sampled from the job's seed and the parameter's name; ranks do not communicate."""

    description = "initialized by parameter name, shard by shard"
    from_model = False

    def __init__(self, recipes: Mapping[str, Recipe], seed: int) -> None:
        self._recipes = recipes
        self._seed = seed

    def value(self, name: str, like: Tensor, device: torch.device, *, wanted: bool) -> Tensor | None:
        """Return a newly initialized tensor; does not communicate."""
        if not wanted:
            return None
        # Always in fp32, so that every dtype starts from the same values, up to rounding.
        value = torch.empty(like.shape, dtype=torch.float32, device=device)
        initialize(self._recipes[name], value, name=name, seed=self._seed)
        return value.to(like.dtype)


class StreamedWeights:
    """Values of a model that rank 0 builds in host memory and broadcasts one tensor at a time."""

    from_model = True

    def __init__(self, make_values: Callable[[], dict[str, Tensor]], *, num_bytes: int, rank: int, size: int) -> None:
        """Build the values on rank 0 with `make_values`, which needs `num_bytes` of host memory."""
        if rank == 0 and num_bytes > available_memory():
            raise JobError(
                f"building the model requires {num_bytes / 1e9:.1f} GB of host memory, but only"
                f" {available_memory() / 1e9:.1f} GB are free",
                code="model.exceeds-host-memory",
                fix="set Job(weights=...) to a file, or define an init_weights() that initializes every parameter",
            )
        self.description = f"built on rank 0's host ({num_bytes / 1e9:.2g} GB) and broadcast"
        self._values = make_values() if rank == 0 else {}
        self._size = size

    def value(self, name: str, like: Tensor, device: torch.device, *, wanted: bool) -> Tensor | None:
        """Return rank 0's tensor on every rank; communicates over the world."""
        source = self._values.get(name)
        if source is None:
            value = torch.empty(like.shape, dtype=like.dtype, device=device)
        else:
            value = source.detach().to(device, like.dtype)
        if self._size > 1:
            dist.broadcast(value, src=0)
        return value if wanted else None


class BuiltWeights:
    """Values of a model that every rank built in host memory."""

    def __init__(self, values: Mapping[str, Tensor], source: Weights | None = None) -> None:
        """Use `values` of the built model; pass their `source` if they do not come from the constructor."""
        self.description = "built on every rank's host"
        if source is not None:
            self.description = f"{source.description}, copied to a model built on every rank's host"
        self.from_model = source is None
        self._values = values

    def value(self, name: str, like: Tensor, device: torch.device, *, wanted: bool) -> Tensor | None:
        """Return the built tensor; does not communicate."""
        if not wanted:
            return None
        return self._values[name].to(device, like.dtype)


class FileWeights:
    """Values that every rank reads from memory-mapped files as needed."""

    from_model = False

    def __init__(self, values: Mapping[str, Tensor], saved_as: Mapping[str, str], path: Path) -> None:
        """Read `values` of the file `path`; `saved_as` maps each tensor's name to its name in the file."""
        self.description = f"read from {path}"
        self._values = values
        self._saved_as = saved_as
        self._path = path

    def value(self, name: str, like: Tensor, device: torch.device, *, wanted: bool) -> Tensor | None:
        """Read the tensor from the file; does not communicate."""
        if not wanted:
            return None
        value = self._values[self._saved_as[name]]
        if value.shape != like.shape:
            raise JobError(
                f"{name} in Job.weights {self._path} must have the shape {list(like.shape)}, got {list(value.shape)}",
                code="model.weights-shape-mismatch",
                fix="set Job(weights=...) to a state dict of this model",
            )
        return value.to(device, like.dtype)


def fill_parameters(
    module: nn.Module, specs: Iterable[tuple[str, Tensor]], weights: Weights, device: torch.device
) -> None:
    """Materialize the meta parameters in `specs`; may communicate over the world, call on every rank.

    `specs` has (name, full meta tensor) pairs, equal on every rank; names that this rank's module does not have are
    skipped. Tied parameters stay tied.
    """
    own = dict(module.named_parameters())
    uses = _registrations(module)
    for name, spec in specs:
        parameter = own.get(name)
        wanted = parameter is not None and parameter.is_meta
        value = weights.value(name, spec, device, wanted=wanted)
        if parameter is None or value is None:
            continue
        if isinstance(parameter, DTensor):
            value = distribute_tensor(value, parameter.device_mesh, parameter.placements, src_data_rank=None)
        filled = nn.Parameter(value, requires_grad=parameter.requires_grad)
        for owner, attribute in uses[id(parameter)]:
            own_parameters(owner)[attribute] = filled


def fill_buffers(
    module: nn.Module, specs: Iterable[tuple[str, Tensor]], weights: Weights, device: torch.device
) -> None:
    """Copy values from `weights` to the buffers in `specs`; may communicate, call on every rank."""
    own = dict(module.named_buffers())
    for name, spec in specs:
        value = weights.value(name, spec, device, wanted=name in own)
        if value is not None:
            own[name].copy_(value)


def broadcast_values(module: nn.Module, device: torch.device) -> None:
    """Broadcast rank 0's parameters and buffers in place. Communicates over the world; call on every rank."""
    for tensor in [*module.parameters(), *module.buffers()]:
        value = tensor.detach().to(device).contiguous()
        dist.broadcast(value, src=0)
        # An expanded buffer shares memory between elements and cannot be written; equal values need no copy.
        if value.data_ptr() != tensor.data_ptr() and not torch.equal(value.to(tensor.device), tensor.detach()):
            tensor.data.copy_(value)


def _registrations(module: nn.Module) -> dict[int, list[tuple[nn.Module, str]]]:
    """Return the (module, attribute) pairs under which each parameter is registered, keyed by the parameter's id."""
    found: dict[int, list[tuple[nn.Module, str]]] = {}
    for submodule in module.modules():
        for attribute, parameter in own_parameters(submodule).items():
            if parameter is not None:
                found.setdefault(id(parameter), []).append((submodule, attribute))
    return found


# Weight files (a torch state dict, a safetensors file, or a Hugging Face directory) are read tensor by tensor.


def open_weights(path: Path) -> Mapping[str, Tensor]:
    """Return a mapping of the tensors in a file or directory by name; each tensor is read on access."""
    if (path / "weights.pt").is_file():
        path = path / "weights.pt"  # a run directory
    is_checkpoint = (path / "manifest.json").is_file() or (path.parent.name == "checkpoints" and path.is_file())
    if is_checkpoint:
        raise JobError(
            f"Job.weights {path} is a training checkpoint, which also has optimizer states",
            code="model.weights-checkpoint",
            fix=f"run shardwise checkpoint convert {path} best.pt --to torch --weights, and set weights=best.pt",
        )
    if path.is_dir():
        files = sorted(path.glob("*.safetensors"))
        if not files:
            raise JobError(
                f"Job.weights directory {path} contains no .safetensors file",
                code="model.weights-no-safetensors",
                fix="use a directory written by save_pretrained()",
            )
        return _Safetensors(files)
    if not path.is_file():
        raise JobError(
            f"Job.weights {path} does not exist",
            code="model.weights-not-found",
            fix="set Job(weights=...) to a state dict saved by torch.save, or to a directory",
        )
    if path.suffix == ".safetensors":
        return _Safetensors([path])
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, ValueError, TypeError, OSError, pickle.UnpicklingError) as error:
        raise _unreadable(path, error) from error
    if not isinstance(state, Mapping) or not all(isinstance(value, Tensor) for value in state.values()):
        raise JobError(
            f"Job.weights {path} contains a {type(state).__name__} that is not a state dict of tensors",
            code="model.weights-not-state-dict",
            fix="save the weights with torch.save(model.state_dict(), path)",
        )
    return state


class _Safetensors(Mapping[str, Tensor]):
    """Tensors of several safetensors files; one file is open at a time, because mapped pages count as host memory."""

    def __init__(self, files: list[Path]) -> None:
        self._paths: dict[str, Path] = {}
        for path in files:
            self._paths.update(dict.fromkeys(_open(path).keys(), path))
        self._open: tuple[Path, Any] | None = None

    def __getitem__(self, name: str) -> Tensor:
        path = self._paths[name]
        if self._open is None or self._open[0] != path:
            self._open = None  # closes the file before the next is mapped
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
        f"Job.weights {path} cannot be read ({reason})",
        code="model.weights-unreadable",
        fix="set Job(weights=...) to a state dict of this model",
    )
