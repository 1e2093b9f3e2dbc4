#!/usr/bin/env bash
# Runs a command inside: in.sh kubectl get nodes. With IN=2 it is in node 2, with its
# mounts and processes, else in node 1. ctr speaks to the node's containerd.
set -euo pipefail
. "$(dirname "$0")/env.sh"
find_state
[ -e "$state/n${IN:-1}/pid" ] || fail "no such node in $state"
export KUBECONFIG=$state/admin.kubeconfig PATH=$bin:$PATH:/usr/sbin:/sbin
exec nsenter -t "$(cat "$state/pid")" -m -n -p -- nsenter -t "$(cat "$state/n${IN:-1}/pid")" -m -p --wd="$PWD" -- "$@"
