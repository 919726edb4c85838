#!/usr/bin/env bash
# Download Pulsar's server distribution with Maven once, and unpack it in a cache outside of the tree.
# Prints its directory to stdout; everything else goes to stderr.
set -euo pipefail

version=${1:-4.0.8}
cache=${TXNBUFFER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/txnbuffer}
home=$cache/apache-pulsar-$version

say() { echo "pulsar: $*" >&2; }

mkdir -p "$cache"
exec 9>"$cache/.distribution.lock"
flock 9 # one process downloads, others wait for it

if [ ! -x "$home/bin/pulsar" ]; then
    command -v mvn >/dev/null || { say "Maven downloads the server distribution: install Maven (mvn) and Java 17"; exit 1; }
    scratch=$(mktemp -d "$cache/.fetching.XXXXXX")
    trap 'rm -rf "$scratch"' EXIT
    say "downloading the server distribution $version into $cache (250 MB, once)"
    artifact=org.apache.pulsar:pulsar-server-distribution:$version:tar.gz:bin
    mvn -q -B dependency:copy -DoutputDirectory="$scratch" -Dartifact=$artifact >"$scratch/log" 2>&1 || {
        cat "$scratch/log" >&2
        say "Maven can't download $artifact; see its errors above"
        exit 1
    }
    tar -xzf "$scratch"/*.tar.gz -C "$scratch" # renamed when complete, so that a partial one is never used
    mv "$scratch/apache-pulsar-$version" "$home"
fi
echo "$home"
