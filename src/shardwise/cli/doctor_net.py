"""`shardwise doctor net`: all hosts and the ways between them, before hours are spent there."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from shardwise.cli.doctor import say_json, say_verdicts
from shardwise.runs.console import complain, say

if TYPE_CHECKING:
    from shardwise.doctor.catalogue import Verdict
    from shardwise.doctor.network.facts import NetFacts
    from shardwise.launcher.ssh.run import HostSpec

_MOST_COLUMNS = 8
"""Hosts whose matrix can be read on a terminal."""


@click.command("net")
@click.option("--hosts", required=True, metavar="HOSTS", help="Hosts such as a,me@b:8, or a file of them.")
@click.option(
    "--folder",
    "folders",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Of runs, data or checkpoints, to be the same storage everywhere (default: where you are).",
)
@click.option(
    "--port", type=click.IntRange(1, 65535), default=29500, show_default=True, help="At which nodes are to meet."
)
@click.option("--json", "as_json", is_flag=True, help="Write what was found as JSON to standard output.")
def command(*, hosts: str, folders: tuple[Path, ...], port: int, as_json: bool) -> int:
    """Check logins, versions, names, clocks, storage, ports and links of all hosts; end with the launch line."""
    from shardwise.doctor.catalogue import exit_code
    from shardwise.doctor.network.advice import diagnose, launch_lines
    from shardwise.doctor.network.net import examine, label_hosts
    from shardwise.launcher.ssh.run import read_hosts

    specs = read_hosts(hosts)
    places = [Path.cwd() / folder.expanduser() for folder in folders] or [Path.cwd()]
    found = examine(specs, folders=places, port=port, note=lambda text: complain(f"shardwise: {text}"))
    verdicts = diagnose(found)
    typed = {label: _typed(spec) for label, spec in zip(label_hosts(specs), specs, strict=True)}
    lines = launch_lines(found, typed)
    if as_json:
        say_json({"facts": found, "verdicts": verdicts, "launch": lines})
    else:
        _show(found, verdicts, lines)
    return exit_code(verdicts)


def _show(found: NetFacts, verdicts: list[Verdict], lines: list[str]) -> None:
    say_verdicts(verdicts)
    if found.links:
        say("")
        _show_matrix(found)
    say("")
    for line in lines or ["no two of these hosts can run a job together"]:
        say(line)


def _show_matrix(found: NetFacts) -> None:
    from shardwise.doctor.network.link_checks import matrix

    if len(found.usable) > _MOST_COLUMNS:
        say(f"the links of {len(found.usable)} hosts are too many for a terminal: add --json")
        return
    rows = matrix(found.usable, found.links)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        say("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _typed(host: HostSpec) -> str:
    """Return how to name a host to --hosts."""
    name = f"[{host.name}]" if ":" in host.name else host.name
    return (f"{host.user}@" if host.user else "") + name + (f":{host.slots}" if host.slots else "")
