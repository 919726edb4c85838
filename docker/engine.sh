#!/usr/bin/env bash
# Docker engine and Pulsar image for a Debian machine without access to an image registry. As root:
#
#     settings=$(docker/engine.sh start) && eval "$settings"    # DOCKER_HOST, TXNBUFFER_PULSAR_IMAGE
#     docker/engine.sh stop                                     # stops the engine if this script started it
#
# Uses a running engine, else starts Debian's on its own socket. The image has Debian's Java (debootstrap) and Pulsar's
# server distribution (Maven), with the layout of the official image. An existing image is kept. The settings go to
# stdout, progress to stderr.
set -euo pipefail

version=4.0.8
image=txnbuffer-pulsar:$version
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
cache=${TXNBUFFER_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/txnbuffer}
run=/run/txnbuffer-engine
socket=$run/docker.sock

say() { echo "engine: $*" >&2; }
fail() { say "$*"; exit 1; }

# Run a command and print its output only if it fails.
quietly() {
    local log status=0
    log=$(mktemp)
    "$@" >"$log" 2>&1 || status=$?
    [ $status -eq 0 ] || tail -n 30 "$log" >&2
    rm -f "$log"
    return $status
}

install_packages() {
    say "installing $* by apt"
    quietly apt-get update || fail "apt-get update failed; see above"
    DEBIAN_FRONTEND=noninteractive quietly apt-get install -y --no-install-recommends "$@" ||
        fail "apt-get install $* failed; see above"
}

answers() { timeout 20 docker version >/dev/null 2>&1; }

ours() { [ -f $run/pid ] && [ "$(cat "/proc/$(cat $run/pid)/comm" 2>/dev/null)" = dockerd ]; }

start_engine() {
    answers && return
    export DOCKER_HOST=unix://$socket
    ours && answers && return
    command -v dockerd >/dev/null && command -v docker >/dev/null && command -v iptables >/dev/null ||
        install_packages docker.io iptables
    mkdir -p $run "$cache/engine"
    local flags
    # Not every kernel supports the first line; the last one is slow and works on all.
    for flags in "--storage-driver=overlay2" \
        "--storage-driver=overlay2 --iptables=false --ip6tables=false" \
        "--storage-driver=vfs --iptables=false --ip6tables=false"; do
        say "starting dockerd $flags"
        rm -f $run/pid
        # shellcheck disable=SC2086
        setsid dockerd --host "$DOCKER_HOST" --data-root "$cache/engine" --exec-root $run/exec --pidfile $run/pid \
            $flags >"$cache/engine.log" 2>&1 </dev/null &
        local dockerd=$! waited
        for ((waited = 0; waited < 120; waited++)); do
            answers && return
            kill -0 $dockerd 2>/dev/null || break
            sleep 0.5
        done
        kill $dockerd 2>/dev/null || :
        wait $dockerd 2>/dev/null || :
    done
    tail -n 20 "$cache/engine.log" >&2
    fail "no Docker engine could be started; see above"
}

# The mirror of this machine's apt sources.
mirror() {
    apt-get indextargets --format '$(CODENAME) $(COMPONENT) $(REPO_URI)' 'Created-By: Packages' |
        awk -v release="$1" '$1 == release && $2 == "main" {print $3; exit}'
}

make_image() {
    if docker image inspect $image >/dev/null 2>&1; then
        say "image $image exists"
        return
    fi
    local distribution root release from proxy
    distribution=$("$here/distribution.sh" $version)
    release=$(. /etc/os-release && echo "$VERSION_CODENAME")
    command -v debootstrap >/dev/null || install_packages debootstrap
    from=$(mirror "$release")
    [ -n "$from" ] || { install_packages debootstrap; from=$(mirror "$release"); }
    [ -n "$from" ] || fail "apt has no mirror of $release main in its sources: add one, and run apt-get update"
    proxy=$(apt-config dump --format '%v' Acquire::http::Proxy)
    root=$(mktemp -d "$cache/.image.XXXXXX")
    # shellcheck disable=SC2064
    trap "rm -rf --one-file-system '$root'" EXIT
    say "creating Debian $release with Java 17 (a minute)"
    http_proxy=${proxy:-${http_proxy:-}} quietly debootstrap --variant=minbase \
        --include=ca-certificates,openjdk-17-jre-headless "$release" "$root" "$from" ||
        fail "debootstrap of $release failed; see above"
    rm -rf "$root"/var/cache/apt/archives/*.deb "$root"/var/lib/apt/lists/*
    cp -a "$distribution" "$root/pulsar"
    rm -rf "$root/pulsar/data" "$root/pulsar/logs"
    say "importing $image"
    tar -C "$root" --one-file-system -cf - . |
        docker import --change 'WORKDIR /pulsar' --change 'ENV LANG=C.UTF-8' - $image >/dev/null
    rm -rf --one-file-system "$root"
    trap - EXIT
}

stop_engine() {
    ours || return 0
    local pid
    pid=$(cat $run/pid)
    kill "$pid" 2>/dev/null || return 0
    while [ -d "/proc/$pid" ] && ! grep -q '^State:.Z' "/proc/$pid/status" 2>/dev/null; do sleep 0.1; done
    awk -v under="$run/" 'index($2, under) == 1 {print $2}' /proc/mounts | xargs -r umount # dockerd leaves some mounted
    rm -rf --one-file-system $run
}

case ${1:-} in
start)
    [ "$(id -u)" = 0 ] || fail "run this as root, or use your own engine and the image of docker/compose.yaml"
    start_engine
    make_image
    [ -z "${DOCKER_HOST:-}" ] || echo "export DOCKER_HOST=$DOCKER_HOST"
    echo "export TXNBUFFER_PULSAR_IMAGE=$image"
    ;;
stop) stop_engine ;;
*) fail "unknown command '${1:-}': run engine.sh start or engine.sh stop" ;;
esac
