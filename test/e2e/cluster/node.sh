#!/usr/bin/env bash
# Runs as the first process of a node's namespaces. It starts containerd, imports the
# images, and starts the kubelet. Arguments: the state directory, the node's number.
set -euo pipefail
. "$(dirname "$0")/env.sh"
. "$here/inside.sh"
find_state
n=$2
dir=$state/n$n
fake_sysctls

# The node's files are in the state directory. It is mounted only on directories that
# exist: a new mount point would be visible on the machine, and could not be removed while
# another cluster uses it.
mount -t tmpfs -o mode=755 tmpfs /run
mkdir -m 1777 /run/lock
mount --bind "$dir/lib" /var/lib
mount --bind "$dir/log" /var/log
mkdir -p /var/lib/kubelet /var/log/pods /var/log/containers
mount --make-rshared /

start "containerd$n" containerd -c "$dir/containerd.toml"
import_images() {
	local archive
	until ctr version >/dev/null 2>&1; do sleep 0.2; done
	[ -n "${UNPACKED:-}" ] || for archive in "$images"/*.tar; do ctr -n k8s.io images import --local "$archive"; done
	touch "$dir/images.done"
}
start "images$n" import_images
wait_for_apiserver

# keep_kubelet restarts the kubelet when it ends, unless kubelet.stop exists.
keep_kubelet() {
	while :; do
		if [ ! -e "$dir/kubelet.stop" ]; then
			# shellcheck disable=SC2086 # KUBELET_ARGS contains several words
			start "kubelet$n" kubelet --config="$dir/kubelet.yaml" --kubeconfig="$dir/kubeconfig" \
				--hostname-override="$(node_name "$n")" --node-ip="$(node_ip "$n")" --cert-dir="$dir/pki" \
				--volume-plugin-dir="$dir/flexvolume" --v="${KUBELET_V:-2}" ${KUBELET_ARGS:-}
			echo $! >"$dir/kubelet.pid"
			wait $! || true
		fi
		sleep 0.3
	done
}
keep_kubelet &
reap
