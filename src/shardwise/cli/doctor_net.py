"""`shardwise doctor net`: all hosts and the links between them, before hours are spent there."""

from __future__ import annotations

import click

from shardwise.cli.options import present, takes
from shardwise.doctor.network.net import NetSpec, doctor_net


@click.command("net")
@takes(NetSpec)
@click.option("--json", "as_json", is_flag=True, help="Write what was found as JSON to standard output.")
def command(spec: NetSpec, *, as_json: bool) -> int:
    """Check logins, versions, names, clocks, storage, ports and links of all hosts; end with the launch line."""
    return present(doctor_net(spec), as_json=as_json)
