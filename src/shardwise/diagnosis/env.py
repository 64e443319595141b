"""`doctor env`: explains and checks the environment variables of this shell, of a preset or of a run."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path  # noqa: TC003 - the Spec reads its annotations
from typing import TYPE_CHECKING, Annotated

import msgspec

from shardwise.diagnosis.catalogue import FAMILIES, find_preset, read_catalogue
from shardwise.diagnosis.machine.checks import nccl_matches
from shardwise.diagnosis.machine.observe import observe_gpus, observe_interfaces, observe_rdma
from shardwise.diagnosis.run.nccl_log import run_effects
from shardwise.diagnosis.verdicts import Verdict, VerdictReport, fail, ok, warn
from shardwise.environment import identify, num_threads, variables, visible_cuda_devices
from shardwise.errors import EnvironmentVariablesError, InputError
from shardwise.hardware import usable_cores
from shardwise.hardware.probe import package_version
from shardwise.runs import RunDirectory
from shardwise.spec import PositiveInt, Spec, option, spec_function

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Environ = Mapping[str, str]


class EnvSpec(Spec, frozen=True, kw_only=True):
    """The request of `shardwise doctor env`."""

    preset: Annotated[str | None, option(metavar="NAME")] = None
    """Also check the variables of a preset: gcp, infiniband, aws-efa, azure-nd, workstation."""
    nproc: PositiveInt = 1
    """Number of ranks on this machine."""
    run: Path | None = None
    """Report the variables that NCCL read in this run instead."""


class EnvReport(VerdictReport, frozen=True, kw_only=True):
    """The report of `shardwise doctor env`."""

    def to_text(self) -> str:
        """Return the verdicts as lines, or a sentence if no variable is set."""
        if not self.verdicts:
            return "No variable of NCCL, gloo, OpenMP, CUDA or torch is set"
        return super().to_text()


@spec_function(EnvSpec)
def doctor_env(spec: EnvSpec) -> EnvReport:
    """Explain NCCL, gloo, OpenMP, CUDA and torch variables: meaning, contradictions, variables without effect."""
    if spec.run is not None:
        return EnvReport(verdicts=tuple(_check_run(spec.run)))
    return EnvReport(verdicts=tuple(_check_shell(spec.preset, spec.nproc)))


def preset_lines(name: str) -> str:
    """Return a preset as `export` lines for a shell, each variable with its meaning."""
    preset, known = find_preset(name), read_catalogue().variables
    lines = [f"# {preset.about} ({preset.source})"]
    lines += [f"# {note}" for note in preset.notes]
    exports = [(f"export {key}={shlex.quote(value)}", known[key].meaning) for key, value in preset.variables.items()]
    width = max(len(export) for export, _ in exports)
    for export, meaning in exports:
        lines.append(f"{export:<{width}}  # {meaning}")
    lines.append(f"# set for each rank by shardwise launch: {' '.join(preset.per_rank)}")
    return "\n".join(lines)


def _check_shell(preset: str | None, nproc: int) -> list[Verdict]:
    environ = variables("")
    if preset is not None:
        environ = {**environ, **find_preset(preset).missing_from(environ)}
    _, gpus, hidden = observe_gpus()
    machine = EnvironmentFacts(
        interfaces=tuple(interface.name for interface in observe_interfaces()),
        has_rdma=any(observe_rdma()),
        num_gpus=len(gpus) + hidden,
        uses_nccl=bool(gpus) and "+cpu" not in package_version("torch"),
        nproc=nproc,
        cores=usable_cores(),
    )
    return explain_variables(environ) + lint(environ, machine)


def _check_run(path: Path) -> list[Verdict]:
    run = RunDirectory(path)
    try:
        requested = msgspec.json.decode(run.environment.read_bytes(), type=dict[str, str])
    except (OSError, msgspec.DecodeError):
        raise InputError(
            f"{path} is not a run directory: it has no environment.json",
            code="run.not-a-run",
            fix="pass a directory below runs/",
        ) from None
    return run_effects(requested, run)


_MAX_SOCKETS = 64
"""NCCL's limit on the product of NCCL_SOCKET_NTHREADS and NCCL_NSOCKS_PERTHREAD."""
_LAUNCHER_VARIABLES = ("TORCHELASTIC_RUN_ID", "SHARDWISE_LAUNCHED")


@dataclass(frozen=True, kw_only=True)
class EnvironmentFacts:
    """Facts about the machine that environment variables are checked against."""

    interfaces: tuple[str, ...]
    """Names of all network interfaces of this machine."""
    num_gpus: int
    """GPUs known to the driver, including GPUs hidden by CUDA_VISIBLE_DEVICES."""
    uses_nccl: bool
    """Whether ranks will use NCCL: a GPU is visible and torch is built with NCCL."""
    nproc: int
    """Ranks on this machine."""
    cores: int
    """CPU cores that all ranks share."""
    has_rdma: bool = False
    """Whether the machine has an InfiniBand, RoCE or EFA device."""
    uses_ddp: bool | None = None
    """Whether the script wraps a model in DDP; None if unknown."""


def detail_with_ddp_on_gloo(environ: Environ, machine: EnvironmentFacts) -> Iterator[Verdict]:
    """Reject TORCH_DISTRIBUTED_DEBUG=DETAIL with DDP on gloo, which crashes in torch 2.13."""
    if (
        environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
        and not machine.uses_nccl
        and machine.uses_ddp is not False
    ):
        yield fail(
            "TORCH_DISTRIBUTED_DEBUG",
            "DETAIL crashes with SIGSEGV if a model is wrapped in DDP on gloo",
            "use INFO; shardwise launch detects mismatched collectives without this variable",
        )


def interface_exists(environ: Environ, machine: EnvironmentFacts) -> Iterator[Verdict]:
    """Reject network interfaces that this machine does not have."""
    fix = f"use one of {', '.join(machine.interfaces)}"
    nccl, gloo = environ.get("NCCL_SOCKET_IFNAME", ""), environ.get("GLOO_SOCKET_IFNAME", "")
    if nccl and not nccl_matches(nccl, machine.interfaces):
        state = fail if machine.uses_nccl else warn
        yield state("NCCL_SOCKET_IFNAME", f"{nccl} does not match any interface of this machine", fix)
    missing = [name for name in gloo.split(",") if name and name not in machine.interfaces]
    if missing:
        fact = f"{missing[0]} is not an interface of this machine"
        if missing[0].startswith(("^", "=")):
            fact += "; gloo requires exact names, without the ^ and = of NCCL"
        yield fail("GLOO_SOCKET_IFNAME", fact, fix)


def infiniband_settings_apply(environ: Environ, machine: EnvironmentFacts) -> Iterator[Verdict]:
    """Find InfiniBand settings that have no effect, because InfiniBand is disabled or absent."""
    is_disabled = environ.get("NCCL_IB_DISABLE") == "1"
    if is_disabled and environ.get("NCCL_NET", "").upper() == "IB":
        yield fail("NCCL_NET", "NCCL_NET=IB contradicts NCCL_IB_DISABLE=1", "unset NCCL_NET or NCCL_IB_DISABLE")
    names = [name for name in read_catalogue().variables if name.startswith("NCCL_IB_") and name != "NCCL_IB_DISABLE"]
    names += ["NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ"]
    given = sorted(environ.keys() & set(names))
    if given and is_disabled:
        yield warn(given[0], f"NCCL_IB_DISABLE=1 disables {', '.join(given)}", "unset NCCL_IB_DISABLE or the others")
    elif given and not machine.has_rdma:
        fact = f"{', '.join(given)} has no effect: this machine has no InfiniBand, RoCE or EFA device"
        yield warn(given[0], fact, f"unset {' '.join(given)}")


def local_transports_are_enabled(environ: Environ, machine: EnvironmentFacts) -> Iterator[Verdict]:
    """Find settings that leave sockets as the only transport between ranks of the same machine."""
    if environ.get("NCCL_P2P_DISABLE") == environ.get("NCCL_SHM_DISABLE") == "1" and machine.nproc > 1:
        fact = "together with NCCL_SHM_DISABLE=1, ranks of this machine communicate over the network"
        yield warn("NCCL_P2P_DISABLE", fact, "unset NCCL_P2P_DISABLE or NCCL_SHM_DISABLE")


def socket_count_is_valid(environ: Environ, _machine: EnvironmentFacts) -> Iterator[Verdict]:
    """Find a number of sockets above NCCL's limit."""
    threads, sockets = environ.get("NCCL_SOCKET_NTHREADS", "1"), environ.get("NCCL_NSOCKS_PERTHREAD", "1")
    if threads.isdigit() and sockets.isdigit() and int(threads) * int(sockets) > _MAX_SOCKETS:
        fact = f"{threads} threads x {sockets} sockets exceed NCCL's limit of {_MAX_SOCKETS}; NCCL reduces them"
        yield warn("NCCL_NSOCKS_PERTHREAD", fact, f"use at most {_MAX_SOCKETS // max(1, int(threads))}")


def thread_count_fits_cores(environ: Environ, machine: EnvironmentFacts) -> Iterator[Verdict]:
    """Find thread counts that oversubscribe the CPU cores."""
    mkl = environ.get("MKL_NUM_THREADS", "")
    for name, threads in (
        ("OMP_NUM_THREADS", num_threads(environ)),
        ("MKL_NUM_THREADS", int(mkl) if mkl.isdigit() else None),
    ):
        if threads and threads > 1 and threads * machine.nproc > machine.cores:
            fact = f"{threads} threads x {machine.nproc} ranks oversubscribe {machine.cores} cores"
            share = max(1, machine.cores // machine.nproc)
            yield warn(name, fact, f"use {share}, or unset it: shardwise launch divides the cores among ranks")


def rank_variables_are_consistent(environ: Environ, _machine: EnvironmentFacts) -> Iterator[Verdict]:
    """Find rank variables that are incomplete, contradictory or exported by hand."""
    try:
        identity = identify(environ)
    except EnvironmentVariablesError as error:
        yield fail("RANK", error.fact, error.fix)
        return
    if "RANK" in environ and environ.keys().isdisjoint(_LAUNCHER_VARIABLES):
        rank = f"rank {identity.rank} of {identity.world_size}"
        fact = f"exported by hand: every process of this shell runs as {rank}"
        yield warn("RANK", fact, "unset RANK WORLD_SIZE LOCAL_RANK: launchers set them for each rank")
    if identity.num_nodes > 1 and identity.master_addr in {"localhost", "127.0.0.1", "::1"}:
        fact = f"{identity.master_addr} is a different machine on each of the {identity.num_nodes} nodes"
        yield fail("MASTER_ADDR", fact, "set MASTER_ADDR to the address of node 0")


def single_launch_queue(environ: Environ, _machine: EnvironmentFacts) -> Iterator[Verdict]:
    """Warn about CUDA_DEVICE_MAX_CONNECTIONS=1, which serializes kernel launches."""
    if environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield warn(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1 serializes kernel launches of all streams: Megatron's tensor parallelism needs it, FSDP loses overlap",
            "unset it for FSDP",
        )


def visible_gpus_exist(environ: Environ, machine: EnvironmentFacts) -> Iterator[Verdict]:
    """Find invalid entries of CUDA_VISIBLE_DEVICES, which hide all later entries."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None or not machine.num_gpus:
        return
    entries = visible_cuda_devices(environ) or ()
    absent = [entry for entry in entries if entry.isdecimal() and int(entry) >= machine.num_gpus]
    duplicates = [entry for entry in entries if entries.count(entry) > 1]
    if absent:
        fact = f"{absent[0]} is not a GPU of this machine: CUDA ignores it and all later entries"
        yield warn("CUDA_VISIBLE_DEVICES", fact, f"use 0 to {machine.num_gpus - 1}")
    elif duplicates:
        yield warn(
            "CUDA_VISIBLE_DEVICES", f"{duplicates[0]} is listed twice: CUDA hides all GPUs", "list each GPU once"
        )
    elif not entries:
        yield warn(
            "CUDA_VISIBLE_DEVICES", f"hides all {machine.num_gpus} GPUs", "unset it, unless ranks train on the CPU"
        )


def debug_settings_are_off(environ: Environ, _machine: EnvironmentFacts) -> Iterator[Verdict]:
    """Find debugging settings that slow down training."""
    for name in ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        if environ.get(name) == "1":
            yield warn(name, "1 is for debugging and slows down every step", f"unset {name}")


def renamed_variables_agree(environ: Environ, _machine: EnvironmentFacts) -> Iterator[Verdict]:
    """Find renamed variables whose old and new names have different values."""
    for name in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "ENABLE_TIMING"):
        old, new = f"NCCL_{name}", f"TORCH_NCCL_{name}"
        if old in environ and environ.get(new, environ[old]) != environ[old]:
            fact = f"{environ[new]} contradicts {old}={environ[old]}: torch reads the new name"
            yield warn(new, fact, f"unset {old}")
    if environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1" and environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0") != "0":
        fact = "1 contradicts TORCH_NCCL_ASYNC_ERROR_HANDLING, which aborts the process before a timeout is raised"
        yield warn("TORCH_NCCL_BLOCKING_WAIT", fact, "unset one of the two variables")


def flight_recorder_has_a_buffer(environ: Environ, _machine: EnvironmentFacts) -> Iterator[Verdict]:
    """Find a flight-recorder dump that is enabled although its buffer is disabled."""
    sizes = environ.get("TORCH_FR_BUFFER_SIZE"), environ.get("TORCH_NCCL_TRACE_BUFFER_SIZE")
    if environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == "1" and "0" in sizes:
        fact = "1 has no effect: the buffer of the flight recorder has size 0"
        yield warn("TORCH_NCCL_DUMP_ON_TIMEOUT", fact, "set TORCH_FR_BUFFER_SIZE=2000")


def log_files_are_per_rank(environ: Environ, machine: EnvironmentFacts) -> Iterator[Verdict]:
    """Find an NCCL log file that all ranks would overwrite."""
    path = environ.get("NCCL_DEBUG_FILE", "")
    if path and "%p" not in path and not path.startswith("/dev/std") and machine.nproc > 1:
        fact = f"{machine.nproc} ranks would overwrite the same file {path}"
        yield warn("NCCL_DEBUG_FILE", fact, "add %h.%p, or unset it: shardwise launch sets one file per rank")


def nccl_is_used(environ: Environ, machine: EnvironmentFacts) -> Iterator[Verdict]:
    """Find NCCL settings that have no effect, because ranks use gloo."""
    given = [name for name in environ if name.startswith(("NCCL_", "TORCH_NCCL_"))]
    if given and not machine.uses_nccl:
        names = given[0]
        if len(given) > 1:
            names += f" and {len(given) - 1} more"
        fix = "unset them; if this machine has GPUs, run shardwise doctor"
        yield warn("NCCL", f"ranks use gloo on this machine and ignore {names}", fix)


CERTAIN: tuple[Callable[[Environ, EnvironmentFacts], Iterator[Verdict]], ...] = (
    detail_with_ddp_on_gloo,
    interface_exists,
)
"""Rules that every launch applies because they are cheap and certain: training cannot work if one of them fails."""

RULES: tuple[Callable[[Environ, EnvironmentFacts], Iterator[Verdict]], ...] = (
    *CERTAIN,
    infiniband_settings_apply,
    local_transports_are_enabled,
    socket_count_is_valid,
    thread_count_fits_cores,
    rank_variables_are_consistent,
    single_launch_queue,
    visible_gpus_exist,
    debug_settings_are_off,
    renamed_variables_agree,
    flight_recorder_has_a_buffer,
    log_files_are_per_rank,
    nccl_is_used,
)
"""All rules, in the order of the report."""


def explain_variables(environ: Mapping[str, str]) -> list[Verdict]:
    """Return a verdict on each variable that a distributed job reads, sorted by name."""
    return [_explain(name, environ[name]) for name in sorted(environ) if FAMILIES.fullmatch(name)]


def lint(environ: Mapping[str, str], machine: EnvironmentFacts) -> list[Verdict]:
    """Return the variables that are contradictory, without effect or unusable, failures first."""
    found: list[Verdict] = []
    for rule in RULES:
        found += rule(environ, machine)
    return sorted(found, key=lambda verdict: verdict.state != "fail")


def _explain(name: str, value: str) -> Verdict:
    """Return the meaning of one variable and whether its value is valid."""
    catalogue = read_catalogue()
    shown = f"is {value or '(empty)'}"
    known = catalogue.variables.get(name)
    if known is None:
        meant = catalogue.correct_spelling(name)
        if meant:
            return warn(name, f"{shown}; no library reads this variable", f"did you mean {meant}?")
        return ok(name, f"{shown}; not in the catalogue, not checked")
    if known.state == "removed":
        return warn(name, f"{shown}; no library reads this variable any more", f"use {known.use}")
    if known.state == "deprecated":
        return warn(name, f"{shown}; the variable is deprecated", f"use {known.use}")
    allowed = known.allowed_values(value)
    if allowed:
        return warn(name, f"{shown}; {known.meaning}; the value is invalid", f"use {allowed}")
    text = f"{shown}; {known.meaning}"
    return ok(name, f"{text} (default {known.default})" if known.default else text)
