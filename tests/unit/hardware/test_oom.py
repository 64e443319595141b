from shardwise.hardware.probe import _counters, oom_kills


def test_counter_is_looked_for_where_the_cgroup_is():
    v1 = _counters("9:name=systemd:/\n4:memory:/jobs/7\n")
    assert [str(path) for path in v1] == ["/sys/fs/cgroup/memory/jobs/7/memory.oom_control"]
    v2 = _counters("0::/user.slice\n")
    assert str(v2[0]) == "/sys/fs/cgroup/user.slice/memory.events"


def test_count_never_falls():
    first = oom_kills()
    assert first is None or oom_kills() >= first
