#!/usr/bin/env bash
# Pulsar's server distribution, fetched by Maven once and unpacked in a cache outside of the tree.
# Prints its directory on stdout; everything else goes to stderr.
set -euo pipefail

version=${1:-4.0.8}
cache=${TXNBUFFER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/txnbuffer}
home=$cache/apache-pulsar-$version

say() { echo "pulsar: $*" >&2; }

mkdir -p "$cache"
exec 9>"$cache/.distribution.lock"
flock 9 # whoever else asks waits for the one that fetches

if [ ! -x "$home/bin/pulsar" ]; then
    command -v mvn >/dev/null || { say "the server distribution comes by Maven: install it (mvn) and Java 17"; exit 1; }
    scratch=$(mktemp -d "$cache/.fetching.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    say "fetching the server distribution $version into $cache (250 MB, once)"
    artifact=org.apache.pulsar:pulsar-server-distribution:$version:tar.gz:bin
    mvn -q -B dependency:copy -DoutputDirectory="$scratch" -Dartifact=$artifact >"$scratch/log" 2>&1 || {
        cat "$scratch/log" >&2
        say "Maven can't fetch $artifact; it says why above"
        exit 1
    }
    tar -xzf "$scratch"/*.tar.gz -C "$scratch" # moved into place whole, so that a half one is never taken for it
    mv "$scratch/apache-pulsar-$version" "$home"
fi
echo "$home"
