#!/usr/bin/env bash
# Start a command, and kill all its processes as soon as a file exists: as if the machine lost its power.
#
#   ./kill_when.sh FILE COMMAND...
set -euo pipefail
file=$1
shift

"$@" &
pid=$!
until [[ -e $file ]]; do
  kill -0 "$pid" || exit 1  # the command has ended without the file
  sleep 0.05
done
# SIGKILL cannot be handled: nothing is saved, and no process group is destroyed.
kill -KILL "$pid" $(pgrep -P "$pid")
wait "$pid" 2>/dev/null || echo "killed when $file was written"
