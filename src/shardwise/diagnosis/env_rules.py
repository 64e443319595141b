"""Rules between environment variables and the machine, and the lint that applies them; pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shardwise.diagnosis.catalogue import FAMILIES, read_catalogue
from shardwise.diagnosis.machine.checks import nccl_matches
from shardwise.diagnosis.verdicts import Verdict, fail, ok, warn
from shardwise.environment import identify, num_threads, visible_cuda_devices
from shardwise.errors import EnvironmentVariablesError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    Environ = Mapping[str, str]

_MOST_SOCKETS = 64
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "SHARDWISE_LAUNCHED")


@dataclass(frozen=True, kw_only=True)
class EnvironmentFacts:
    """Facts of the machine that variables are checked against."""

    interfaces: tuple[str, ...]
    """Names of all interfaces of this machine."""
    num_gpus: int
    """That the driver has, hidden ones included."""
    uses_nccl: bool
    """Ranks will talk through NCCL: there are visible GPUs, and torch has NCCL."""
    nproc: int
    """Ranks on this machine."""
    cores: int
    """That they may use together."""
    has_rdma: bool = False
    """An InfiniBand, RoCE or EFA device is here."""
    uses_ddp: bool | None = None
    """Whether the script wraps a model in DDP; None: not known."""


def detail_with_ddp_on_gloo(environ: Environ, here: EnvironmentFacts) -> Iterator[Verdict]:
    """Refuse TORCH_DISTRIBUTED_DEBUG=DETAIL where DDP on gloo would crash on it (torch 2.13)."""
    if (
        environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
        and not here.uses_nccl
        and here.uses_ddp is not False
    ):
        yield fail(
            "TORCH_DISTRIBUTED_DEBUG",
            "DETAIL crashes (SIGSEGV) where a model is wrapped in DDP on gloo",
            "use INFO; mismatched collectives are found by the guard of shardwise launch, which needs no variable",
        )


def interface_is_here(environ: Environ, here: EnvironmentFacts) -> Iterator[Verdict]:
    """Refuse interfaces that this machine does not have."""
    has = f"use one of {', '.join(here.interfaces)}"
    nccl, gloo = environ.get("NCCL_SOCKET_IFNAME", ""), environ.get("GLOO_SOCKET_IFNAME", "")
    if nccl and not nccl_matches(nccl, here.interfaces):
        fact = f"{nccl} matches no interface of this machine"
        yield fail("NCCL_SOCKET_IFNAME", fact, has) if here.uses_nccl else warn("NCCL_SOCKET_IFNAME", fact, has)
    missing = [name for name in gloo.split(",") if name and name not in here.interfaces]
    if missing:
        hint = "; gloo takes exact names, without NCCL's ^ and =" if missing[0][0] in "^=" else ""
        yield fail("GLOO_SOCKET_IFNAME", f"{missing[0]} is not an interface of this machine{hint}", has)


def infiniband_is_wanted(environ: Environ, here: EnvironmentFacts) -> Iterator[Verdict]:
    """Find settings of InfiniBand where it is off or absent."""
    off = environ.get("NCCL_IB_DISABLE") == "1"
    if off and environ.get("NCCL_NET", "").upper() == "IB":
        yield fail("NCCL_NET", "IB is demanded, and NCCL_IB_DISABLE=1 turns it off", "unset one of them")
    known = read_catalogue().variables
    given = [name for name in environ if name.startswith("NCCL_IB_") and name in known and name != "NCCL_IB_DISABLE"]
    given += [name for name in ("NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ") if name in environ]
    if given and off:
        yield warn(given[0], f"has no effect beside NCCL_IB_DISABLE=1{_more(given)}", "unset NCCL_IB_DISABLE, or these")
    elif given and not here.has_rdma:
        yield warn(given[0], f"no InfiniBand, RoCE or EFA device is here{_more(given)}", f"unset {' '.join(given)}")


def _more(names: list[str]) -> str:
    return f" (nor has {', '.join(names[1:])})" if names[1:] else ""


def local_paths_are_open(environ: Environ, here: EnvironmentFacts) -> Iterator[Verdict]:
    """Find ranks of one machine that are left with sockets alone."""
    if environ.get("NCCL_P2P_DISABLE") == environ.get("NCCL_SHM_DISABLE") == "1" and here.nproc > 1:
        fact = "with NCCL_SHM_DISABLE=1, ranks of this machine talk through the network"
        yield warn("NCCL_P2P_DISABLE", fact, "unset one of them")


def sockets_fit(environ: Environ, _here: EnvironmentFacts) -> Iterator[Verdict]:
    """Find more sockets than NCCL opens."""
    threads, each = environ.get("NCCL_SOCKET_NTHREADS", "1"), environ.get("NCCL_NSOCKS_PERTHREAD", "1")
    if threads.isdigit() and each.isdigit() and int(threads) * int(each) > _MOST_SOCKETS:
        fact = f"{threads} threads x {each} sockets is more than {_MOST_SOCKETS}: NCCL cuts it"
        yield warn("NCCL_NSOCKS_PERTHREAD", fact, f"use at most {_MOST_SOCKETS // max(1, int(threads))}")


def threads_fit(environ: Environ, here: EnvironmentFacts) -> Iterator[Verdict]:
    """Find more threads than cores."""
    mkl = environ.get("MKL_NUM_THREADS", "")
    for name, threads in (
        ("OMP_NUM_THREADS", num_threads(environ)),
        ("MKL_NUM_THREADS", int(mkl) if mkl.isdigit() else None),
    ):
        if threads and threads > 1 and threads * here.nproc > here.cores:
            fact = f"{threads} threads x {here.nproc} ranks on {here.cores} cores: they wait for each other"
            yield warn(
                name, fact, f"use {max(1, here.cores // here.nproc)}, or unset it: shardwise launch divides the cores"
            )


def ranks_agree(environ: Environ, _here: EnvironmentFacts) -> Iterator[Verdict]:
    """Find half-set, contradicting or hand-made identities."""
    try:
        identity = identify(environ)
    except EnvironmentVariablesError as error:
        yield fail("RANK", error.fact, error.fix)
        return
    if "RANK" in environ and not any(name in environ for name in _LAUNCHED):
        who = f"rank {identity.rank} of {identity.world_size}"
        fact = f"exported by hand: every process of this shell takes itself for {who}"
        yield warn("RANK", fact, "unset RANK WORLD_SIZE LOCAL_RANK: launchers set them for each rank")
    if identity.num_nodes > 1 and identity.master_addr in {"localhost", "127.0.0.1", "::1"}:
        fact = f"{identity.master_addr} is another machine on every node, and there are {identity.num_nodes}"
        yield fail("MASTER_ADDR", fact, "name the address of node 0")


def one_launch_queue(environ: Environ, _here: EnvironmentFacts) -> Iterator[Verdict]:
    """Explain what CUDA_DEVICE_MAX_CONNECTIONS=1 is for."""
    if environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        yield warn(
            "CUDA_DEVICE_MAX_CONNECTIONS",
            "1 puts kernels of all streams in one order: tensor parallel (Megatron) overlaps by it, FSDP then cannot",
            "unset it for FSDP",
        )


def gpus_are_there(environ: Environ, here: EnvironmentFacts) -> Iterator[Verdict]:
    """Find entries of CUDA_VISIBLE_DEVICES that name no GPU, which hide all after them."""
    text = environ.get("CUDA_VISIBLE_DEVICES")
    if text is None or not here.num_gpus:
        return
    entries = visible_cuda_devices(environ) or ()
    absent = [entry for entry in entries if entry.isdecimal() and int(entry) >= here.num_gpus]
    twice = [entry for entry in entries if entries.count(entry) > 1]
    if absent:
        fact = f"{absent[0]} is not a GPU of this machine: CUDA ignores it and all after it"
        yield warn("CUDA_VISIBLE_DEVICES", fact, f"use 0 to {here.num_gpus - 1}")
    elif twice:
        yield warn("CUDA_VISIBLE_DEVICES", f"{twice[0]} stands there twice: CUDA shows no GPU at all", "name each once")
    elif not entries:
        yield warn(
            "CUDA_VISIBLE_DEVICES", f"hides all {here.num_gpus} GPUs", "unset it, unless ranks are meant for the CPU"
        )


def kernels_run_ahead(environ: Environ, _here: EnvironmentFacts) -> Iterator[Verdict]:
    """Find settings that are for finding errors only."""
    for name in ("CUDA_LAUNCH_BLOCKING", "PYTORCH_NO_CUDA_MEMORY_CACHING"):
        if environ.get(name) == "1":
            yield warn(name, "1 is for finding errors and makes every step slow", f"unset {name}")


def names_agree(environ: Environ, _here: EnvironmentFacts) -> Iterator[Verdict]:
    """Find an old and a new name with different values."""
    for name in ("ASYNC_ERROR_HANDLING", "BLOCKING_WAIT", "DESYNC_DEBUG", "ENABLE_TIMING"):
        old, new = f"NCCL_{name}", f"TORCH_NCCL_{name}"
        if old in environ and environ.get(new, environ[old]) != environ[old]:
            yield warn(new, f"{environ[new]}, and {old}={environ[old]}: the new name wins", f"unset {old}")
    if environ.get("TORCH_NCCL_BLOCKING_WAIT") == "1" and environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0") != "0":
        fact = "1 beside TORCH_NCCL_ASYNC_ERROR_HANDLING: a time-out is raised by the wait, or ends the process"
        yield warn("TORCH_NCCL_BLOCKING_WAIT", fact, "keep one of them")


def dump_has_a_buffer(environ: Environ, _here: EnvironmentFacts) -> Iterator[Verdict]:
    """Find a dump of the flight recorder that is switched off."""
    sizes = [environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")]
    if environ.get("TORCH_NCCL_DUMP_ON_TIMEOUT") == "1" and "0" in sizes:
        yield warn(
            "TORCH_NCCL_DUMP_ON_TIMEOUT", "1, and the flight recorder keeps nothing", "set TORCH_FR_BUFFER_SIZE=2000"
        )


def log_files_differ(environ: Environ, here: EnvironmentFacts) -> Iterator[Verdict]:
    """Find one log file for all ranks."""
    path = environ.get("NCCL_DEBUG_FILE", "")
    if path and "%p" not in path and not path.startswith("/dev/std") and here.nproc > 1:
        fact = f"{path} is one file for {here.nproc} ranks, which overwrite each other"
        yield warn("NCCL_DEBUG_FILE", fact, "add %h.%p, or unset it: shardwise launch names one per rank")


def nccl_is_used(environ: Environ, here: EnvironmentFacts) -> Iterator[Verdict]:
    """Find settings of NCCL where ranks talk through gloo."""
    given = [name for name in environ if name.startswith(("NCCL_", "TORCH_NCCL_"))]
    if given and not here.uses_nccl:
        others = f" and {len(given) - 1} more" if given[1:] else ""
        yield warn(
            "NCCL",
            f"{given[0]}{others} ignored: ranks use gloo here",
            "unset them, or see shardwise doctor if there are GPUs",
        )


CERTAIN: tuple[Callable[[Environ, EnvironmentFacts], Iterator[Verdict]], ...] = (
    detail_with_ddp_on_gloo,
    interface_is_here,
)
"""Rules cheap and certain enough for every launch: what they fail cannot work."""

RULES: tuple[Callable[[Environ, EnvironmentFacts], Iterator[Verdict]], ...] = (
    *CERTAIN,
    infiniband_is_wanted,
    local_paths_are_open,
    sockets_fit,
    threads_fit,
    ranks_agree,
    one_launch_queue,
    gpus_are_there,
    kernels_run_ahead,
    names_agree,
    dump_has_a_buffer,
    log_files_differ,
    nccl_is_used,
)
"""All rules, in the order of the report."""


# The lint of environment variables: what each does, what contradicts, what is ignored; pure.


def explain_variables(environ: Mapping[str, str]) -> list[Verdict]:
    """Return a verdict on each variable that a distributed job reads, by name."""
    return [_explain(name, environ[name]) for name in sorted(environ) if FAMILIES.fullmatch(name)]


def lint(environ: Mapping[str, str], here: EnvironmentFacts) -> list[Verdict]:
    """Return what contradicts, is ignored or cannot work in `environ`; failures first."""
    found: list[Verdict] = []
    for rule in RULES:
        found += rule(environ, here)
    return sorted(found, key=lambda verdict: verdict.state != "fail")


def _explain(name: str, value: str) -> Verdict:
    """Return what one variable does, and whether its value is valid."""
    catalogue = read_catalogue()
    shown = f"is {value or '(empty)'}"
    known = catalogue.variables.get(name)
    if known is None:
        meant = catalogue.misspelt(name)
        if meant:
            return warn(name, f"{shown}; no library reads this name", f"did you mean {meant}?")
        return ok(name, f"{shown}; not in the catalogue, not judged")
    if known.state:
        gone = "no library reads this name any more" if known.state == "removed" else "an old name"
        return warn(name, f"{shown}; {gone}", f"use {known.use}")
    wanted = known.refuses(value)
    if wanted:
        return warn(name, f"{shown}; {known.meaning}; this value is not one of its own", f"use {wanted}")
    default = f" (default {known.default})" if known.default else ""
    return ok(name, f"{shown}; {known.meaning}{default}")
