"""What the interfaces and names of a machine mean for a job; pure."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING

from shardwise.doctor.check import Verdict, fail, ok, warn
from shardwise.doctor.machine.interfaces import gloo_choice, nccl_choice

if TYPE_CHECKING:
    from shardwise.doctor.machine.facts import Machine

_EFA = "efa"


def check_interfaces(machine: Machine) -> Verdict:
    """Interfaces with an address, and which of them gloo and NCCL would take."""
    usable = [one for one in machine.network.interfaces if one.up and one.addresses]
    told = ", ".join(f"{one.name} {one.addresses[0]}" for one in usable)
    if not any(one.loopback for one in usable):
        return fail("interfaces", told or "none is up", "bring loopback up: ip link set lo up")
    taken = f"gloo takes {gloo_choice(machine.network)}, NCCL {', '.join(nccl_choice(usable))}"
    if len(usable) == 1:
        fix = "one machine alone needs no other; for several, bring an interface up and give it an address"
        return warn("interfaces", f"{told} only; {taken}", fix)
    return ok("interfaces", f"{told}; {taken}")


def check_host_name(machine: Machine) -> Verdict:
    """A host name that other machines could use: it means an address of this one, and that address means the name."""
    network = machine.network
    own = {address for one in network.interfaces if not one.loopback for address in one.addresses}
    one_machine = "matters only for several machines: there use --local-addr or GLOO_SOCKET_IFNAME, or mend /etc/hosts"
    if not network.addresses:
        return warn("host name", f"{network.hostname} means no address", one_machine)
    told = f"{network.hostname} is {', '.join(network.addresses)}"
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in network.addresses):
        return warn("host name", f"{told}, which other machines cannot reach", one_machine)
    if not own & set(network.addresses):
        return fail("host name", f"{told}, which is no address of this machine", "mend /etc/hosts or the name service")
    back = network.back_name
    if back.partition(".")[0] != network.hostname.partition(".")[0]:
        called = f"called {back}" if back else "without a name"
        return warn("host name", f"{told}, and that address is {called}", "mend /etc/hosts or the reverse zone")
    return ok("host name", f"{told}, and back")


def check_rdma(machine: Machine) -> Verdict:
    """InfiniBand, RoCE or EFA that NCCL can use."""
    devices = machine.network.rdma
    if not devices:
        return ok("rdma", "no InfiniBand, RoCE or EFA: between machines NCCL uses sockets")
    idle = [device.name for device in devices if not device.active]
    told = ", ".join(f"{device.name} ({device.driver or 'unknown driver'})" for device in devices)
    if idle:
        fact = f"{told}; no active port on {', '.join(idle)}"
        return warn("rdma", fact, "see ibstat; leave dead ones out with NCCL_IB_HCA=^" + ",".join(idle))
    if any(device.driver == _EFA for device in devices) and not machine.network.net_plugins:
        fix = "install aws-ofi-nccl and put its folder into LD_LIBRARY_PATH: NCCL falls back to sockets without it"
        return warn("rdma", f"{told}, and no libnccl-net.so was found", fix)
    return ok("rdma", told)
