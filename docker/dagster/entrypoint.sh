#!/bin/sh
# Dagster's own settings know passwords from variables only: take them from the files that secrets are mounted as.
set -eu
if [ -n "${DAGSTER_POSTGRES_PASSWORD_FILE:-}" ]; then
    DAGSTER_POSTGRES_PASSWORD="$(cat "$DAGSTER_POSTGRES_PASSWORD_FILE")"
    export DAGSTER_POSTGRES_PASSWORD
fi
exec "$@"
