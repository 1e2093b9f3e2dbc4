#!/usr/bin/env bash
# Starts a cluster of NODES (1) nodes in namespaces of its own, which have no way out,
# and waits until it is ready. It lives in $TRIVET_E2E_STATE, by default a new folder
# under /tmp, and in cgroups of its own; nothing else of the machine is changed, but
# for what README.md says of cgroup v2.
# KUBELET_V, KUBELET_ARGS, APISERVER_ARGS, KCM_ARGS, SCHEDULER_ARGS: for those programs.
set -euo pipefail
. "$(dirname "$0")/env.sh"
. "$here/pki.sh"
. "$here/cgroups.sh"
. "$here/node-files.sh"
nodes=${NODES:-1}
[[ $nodes == [1-9] ]] || fail "NODES is one of 1 to 9"
[ "$(id -u)" = 0 ] || fail "namespaces, mounts and cgroups want root"
[ -e "$cache/stamps/images" ] || fail "build.sh has not been run"
[ -n "${TRIVET_E2E_STATE:-}" ] || TRIVET_E2E_STATE=$(mktemp -d /tmp/trivet-e2e.XXXXXX)
find_state
mkdir -p "$state"
[ -z "$(ls -A "$state")" ] || fail "$state is not empty; if it is a cluster's, down.sh removes it"

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
	kill -0 $! 2>/dev/null || fail "not started, see $state/log"
	child=$(cat "/proc/$!/task/$!/children" 2>/dev/null || true)
done
echo "${child% }" >"$state/pid"

ready() {
	[ "$(find "$state" -maxdepth 2 -name images.done | wc -l)" = "$nodes" ] &&
		[ "$("$here/in.sh" kubectl get nodes -o 'jsonpath={.items[*].status.conditions[?(@.type=="Ready")].status}' | grep -ow True | wc -l)" = "$nodes" ] &&
		"$here/in.sh" kubectl get serviceaccount default
}
until ready >/dev/null 2>&1; do
	kill -0 "$child" 2>/dev/null || fail "the first process ended, see $state/log"
	[ $SECONDS -lt 180 ] || fail "not ready after $SECONDS s, see $state/log"
	sleep 0.2
done
echo "ready in $SECONDS s: TRIVET_E2E_STATE=$state"
