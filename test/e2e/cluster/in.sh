#!/usr/bin/env bash
# in.sh COMMAND [ARG]...: runs a command in the namespaces of node 1, or of node 2 with IN=2.
# There, ctr calls the node's containerd. With IN=0 the command runs in the namespaces of
# the control plane, where the processes of all nodes are visible, but no mounts of nodes.
set -euo pipefail
. "$(dirname "$0")/env.sh"
find_state
n=${IN:-1}
# The process ID may have been reused since the cluster ended.
first=$(cat "$state/pid" 2>/dev/null) || fail "$state contains no running cluster"
runs "/proc/$first" control-plane.sh || fail "the cluster in $state has ended; down.sh removes what is left"
export KUBECONFIG=$state/admin.kubeconfig PATH=$bin:$PATH:/usr/sbin:/sbin
[ "$n" != 0 ] || exec nsenter -t "$first" -m -n -p --wd="$PWD" -- "$@"
# A process ID of the cluster's pid namespace, which only its own /proc contains.
node=$(cat "$state/n$n/pid" 2>/dev/null) || fail "the cluster in $state has no node $n"
runs "/proc/$first/root/proc/$node" node.sh || fail "node $n in $state has ended"
exec nsenter -t "$first" -m -n -p -- nsenter -t "$node" -m -p --wd="$PWD" -- "$@"
