"""Links between ranks with numbers that a test chose."""

from shardwise.measurement.p2p import Pairs, PairSettings, PairTiming, RankPlace, every_pair
from shardwise.measurement.timing import Timing

USUAL_S, USUAL_RATE = 100e-6, 1e9


def made(hosts, latency=None, rate=None, ways=("send",), noise=lambda pair: 1.0):
    """Pairs of ranks on `hosts`, a letter for each rank; `latency` and `rate` have the pairs that are not as usual."""
    latency, rate = latency or {}, rate or {}
    names = sorted(set(hosts))
    cells = []
    for way in ways:
        for pair in every_pair(len(hosts)):
            seconds = latency.get((*pair, way), latency.get(pair, USUAL_S)) * noise(pair)
            speed = rate.get((*pair, way), rate.get(pair, USUAL_RATE)) / noise(pair)
            timing, transfer = Timing.of([seconds]), Timing.of([4e6 / speed])
            cells.append(
                PairTiming(
                    way=way, source=pair[0], target=pair[1], latency=timing, transfer=transfer, bytes_per_s=speed
                )
            )
    places = tuple(RankPlace(host=f"host{name}", node=names.index(name), device="cpu") for name in hosts)
    return Pairs(places=places, backend="gloo", spec=PairSettings(ways=ways, large_bytes=10**6), timings=tuple(cells))


def both(a, b, value):
    return {(a, b): value, (b, a): value}
