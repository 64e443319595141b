"""What is wrong with hosts: who lets us in, which versions, clocks and folders they have; pure."""

from __future__ import annotations

import statistics
from typing import TYPE_CHECKING

from shardwise.doctor.check import Verdict, fail, ok, warn
from shardwise.doctor.network.host_names import count_hosts, name_hosts

if TYPE_CHECKING:
    from collections.abc import Iterable

    from shardwise.doctor.network.facts import NetFacts, StorageFacts

LATE_S, VERY_LATE_S = 0.5, 10.0
"""Clocks apart by so much mix up what happened when; by the second, torchrun drops a node as dead (3 beats of 5 s)."""


def check_login(found: NetFacts) -> list[Verdict]:
    """Every host lets us in without a prompt, and no two names are one machine."""
    bad = [fail("login", problem.fact, problem.fix) for problem in found.problems.values()]
    seen: dict[tuple[str, ...], str] = {}
    for host, its in found.facts.items():
        addresses = tuple(sorted(its.addresses))
        if addresses and addresses in seen:
            fact = f"hosts {seen[addresses]} and {host} are one machine, which has {', '.join(addresses)}"
            bad.append(fail("login", fact, "name it once, or correct what one of the names resolves to"))
        seen[addresses] = host
    return bad or [ok("login", f"{count_hosts(found.hosts)} let us in without a prompt")]


def check_versions(found: NetFacts) -> list[Verdict]:
    """Python, shardwise, torch and NCCL are there, and the same on all hosts."""
    bad, told = [], []
    for name in ("Python", "shardwise", "torch", "NCCL"):
        by_version: dict[str, list[str]] = {}
        for host, its in found.facts.items():
            by_version.setdefault(_compared(name, its.versions.get(name, "")), []).append(host)
        lacking = by_version.get("", [])
        if lacking and (name != "NCCL" or len(by_version) > 1):
            there = next(version for version in [*by_version, ""] if version or len(by_version) == 1)
            where = found.facts[lacking[0]].executable
            fact = f"{name_hosts(lacking)} {_has(lacking)} no {name} in {where}" + (
                f", others {there}" if there else ""
            )
            bad.append(fail("versions", fact, f"install {name} {there}".strip() + " there"))
        elif len(by_version) > 1:
            most = max(by_version, key=lambda version: len(by_version[version]))
            told_of = [f"{name_hosts(hosts)} {_has(hosts)} {version}" for version, hosts in by_version.items()]
            bad.append(fail("versions", f"{name} differs: {', '.join(told_of)}", f"install {name} {most} on all"))
        else:
            told.append(f"{name} {next(iter(by_version), '') or 'not installed, as with CPU builds of torch'}")
    return bad or [ok("versions", f"the same everywhere: {', '.join(told)}")]


def check_clocks(found: NetFacts) -> list[Verdict]:
    """All clocks tell the same time, as far as the way there lets us see."""
    if not found.clocks:
        return []
    usual_s = statistics.median(clock.offset_s for clock in found.clocks.values())
    bad = []
    for host, clock in found.clocks.items():
        off_s = clock.offset_s - usual_s
        sure_s = abs(off_s) - clock.error_s
        if sure_s > LATE_S:
            way = "ahead of" if off_s > 0 else "behind"
            say = fail if sure_s > VERY_LATE_S else warn
            fact = f"the clock of {host} is {abs(off_s):.1f} s {way} the others"
            bad.append(say("clocks", fact, f"run chronyd or ntpd there; see: ssh {host} timedatectl"))
    widest_s = max(abs(clock.offset_s - usual_s) + clock.error_s for clock in found.clocks.values())
    return bad or [ok("clocks", f"apart by less than {1e3 * widest_s:.3g} ms")]


def check_storage(found: NetFacts) -> list[Verdict]:
    """Every folder asked for is there on all hosts, and the same one."""
    return [_check_folder(found, one) for one in found.storage]


def _check_folder(found: NetFacts, one: StorageFacts) -> Verdict:
    if one.missing:
        there = "share it, or copy it to the same path"
        return fail("storage", f"{name_hosts(one.missing)} {_has(one.missing)} no folder {one.folder}", there)
    if not one.writer:
        fact = f"{one.folder} cannot be compared: no host can write there ({one.refusal})"
        return warn("storage", fact, "name a folder that can be written with --folder")
    others = [host for host in found.usable if host not in one.readers]
    if others:
        whose = f"{one.folder} of {name_hosts(others)}"
        fact = f"{whose} is not the storage of {one.writer}: what one writes, others do not see"
        return warn("storage", fact, "keep checkpoints and runs on storage that all share; data may be copied to each")
    return ok("storage", f"{one.folder} is the same on {count_hosts(found.usable)}")


def _compared(name: str, version: str) -> str:
    """Return what has to be equal: of Python major and minor number."""
    return ".".join(version.split(".")[:2]) if name == "Python" else version


def _has(names: Iterable[str]) -> str:
    return "has" if len(list(names)) == 1 else "have"
