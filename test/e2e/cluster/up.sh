#!/usr/bin/env bash
# Starts a cluster of NODES nodes (default 1) and waits until it is ready. The cluster has
# private namespaces without access to other networks, private cgroups, and its files in
# $TRIVET_E2E_STATE (default: a new directory in /tmp). README.md describes what else
# changes on machines with cgroup v2.
# TIMEOUT is the time in seconds after which it gives up. INTERVAL is the time in seconds
# between two checks. With UNPACKED, the nodes start with the images of `build.sh vm`.
# KUBELET_V is the log level of the kubelets. KUBELET_ARGS, APISERVER_ARGS, KCM_ARGS and
# SCHEDULER_ARGS are additional arguments of the programs.
set -euo pipefail
. "$(dirname "$0")/env.sh"
. "$here/pki.sh"
. "$here/cgroups.sh"
. "$here/node-files.sh"
nodes=${NODES:-1}
[[ $nodes == [1-9] ]] || fail "NODES must be a number from 1 to 9"
[ "$(id -u)" = 0 ] || fail "must run as root"
[ -e "$cache/stamps/images" ] || fail "the cache is empty: run build.sh first"
[ -e "$cache/release/image.tar" ] || fail "the cache has no image of the driver: run image.sh first"
[ -n "${TRIVET_E2E_STATE:-}" ] || TRIVET_E2E_STATE=$(mktemp -d /tmp/trivet-e2e.XXXXXX)
find_state
mkdir -p "$state"
[ -z "$(ls -A "$state")" ] || fail "$state is not empty; if it contains a cluster, remove it with down.sh"

: >"$state/$marker"
mkdir "$state/log"
: >"$state/resolv.conf"
for n in $(seq "$nodes"); do make_node "$n"; done
make_pki
make_cgroups

export TRIVET_E2E_CACHE=$cache PATH=$bin:$PATH:/usr/sbin:/sbin
setsid unshare --mount --net --pid --fork --kill-child --mount-proc --propagation private \
	bash "$here/control-plane.sh" "$state" "$nodes" </dev/null >"$state/log/control-plane.log" 2>&1 &
child=
until [ -n "$child" ]; do
	kill -0 $! 2>/dev/null || fail "the cluster did not start; see $state/log"
	child=$(cat "/proc/$!/task/$!/children" 2>/dev/null || true)
done
echo "${child% }" >"$state/pid"

ready() {
	[ -e "$state/published" ] && [ "$(find "$state" -maxdepth 2 -name images.done | wc -l)" = "$nodes" ] &&
		[ "$("$here/in.sh" kubectl get nodes -o 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}' | grep -ow True | wc -l)" = "$nodes" ] &&
		"$here/in.sh" kubectl get serviceaccount default
}
until ready >/dev/null 2>&1; do
	kill -0 "$child" 2>/dev/null || fail "control-plane.sh has ended; see $state/log"
	[ $SECONDS -lt "${TIMEOUT:-180}" ] || fail "the cluster is not ready after $SECONDS s; see $state/log"
	sleep "$interval"
done
echo "ready in $SECONDS s: TRIVET_E2E_STATE=$state"
