#!/bin/sh
# Makes the secrets of compose.yaml, each once. The directory is closed to other users of this machine; the files in it
# are readable, because containers read them as users of their own.
set -eu
directory="$(dirname "$0")/secrets"
mkdir -p "$directory"
chmod 0700 "$directory"
for name in api_token postgres_password grafana_password; do
    [ -s "$directory/$name" ] && continue
    od -An -N32 -tx1 /dev/urandom | tr -d ' \n' >"$directory/$name"
    chmod 0444 "$directory/$name"
done
