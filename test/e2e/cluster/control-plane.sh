#!/usr/bin/env bash
# Runs as the first process of the cluster's namespaces. It starts the control plane, and
# each node in nested namespaces. Arguments: the state directory, the number of nodes.
set -euo pipefail
. "$(dirname "$0")/env.sh"
. "$here/inside.sh"
find_state
nodes=$2
exec </dev/null
leave_mounts
fake_sysctls

ip link set lo up
# Without a kube-proxy, the API server itself uses the address of its Service. The
# addresses of kubelets must not be in 127/8.
for a in 10.96.0.1 $(for n in $(seq "$nodes"); do node_ip "$n"; done); do ip addr add "$a/32" dev lo; done
echo 1 >/proc/sys/net/ipv4/ip_forward

start etcd etcd --name e2e --data-dir "$state/etcd" --unsafe-no-fsync --log-level warn \
	--listen-client-urls http://127.0.0.1:2379 --advertise-client-urls http://127.0.0.1:2379 \
	--listen-peer-urls http://127.0.0.1:2380 --initial-advertise-peer-urls http://127.0.0.1:2380 --initial-cluster e2e=http://127.0.0.1:2380
# shellcheck disable=SC2086 # the variables for additional arguments contain several words
start kube-apiserver kube-apiserver --etcd-servers=http://127.0.0.1:2379 \
	--bind-address=0.0.0.0 --secure-port=443 --advertise-address="$(node_ip 1)" --endpoint-reconciler-type=none \
	--tls-cert-file="$state/pki/apiserver.crt" --tls-private-key-file="$state/pki/apiserver.key" \
	--client-ca-file="$state/pki/ca.crt" --token-auth-file="$state/pki/tokens.csv" \
	--authorization-mode=Node,RBAC --enable-admission-plugins=NodeRestriction --allow-privileged=true \
	--service-account-issuer=https://kubernetes.default.svc --service-account-key-file="$state/pki/sa.pub" \
	--service-account-signing-key-file="$state/pki/sa.key" --service-cluster-ip-range=10.96.0.0/16 \
	--kubelet-client-certificate="$state/pki/kubelet-client.crt" --kubelet-client-key="$state/pki/kubelet-client.key" \
	--kubelet-certificate-authority="$state/pki/ca.crt" --kubelet-preferred-address-types=InternalIP ${APISERVER_ARGS:-}

# The image of the driver and the chart come from a registry, in place of ghcr.io.
printf '%s\n' 'version: 0.1' 'log: {level: warn}' "storage: {filesystem: {rootdirectory: $state/registry}}" "http: {addr: $registry}" >"$state/registry.yaml"
OTEL_TRACES_EXPORTER=none start registry registry serve "$state/registry.yaml"
publish() {
	until (: </dev/tcp/"${registry/:/\/}") 2>/dev/null; do sleep 0.1; done
	release push "$cache/release/image.tar" "$registry/trivet-csi/$(cat "$cache/release/name")"
	"$bin/helm" push "$cache"/release/trivet-*.tgz "oci://$registry/trivet-csi/charts" --plain-http
	touch "$state/published"
}
start publish publish

for n in $(seq "$nodes"); do
	start "node$n" unshare --mount --pid --fork --mount-proc --propagation private bash "$here/node.sh" "$state" "$n"
	child=
	until [ -n "$child" ]; do child=$(cat "/proc/$!/task/$!/children" || true); done
	echo "${child% }" >"$state/n$n/pid"
done

wait_for_apiserver
# shellcheck disable=SC2086
start kube-controller-manager kube-controller-manager --kubeconfig="$state/kcm.kubeconfig" \
	--authentication-kubeconfig="$state/kcm.kubeconfig" --authorization-kubeconfig="$state/kcm.kubeconfig" \
	--bind-address=127.0.0.1 --leader-elect=false --use-service-account-credentials=true \
	--service-account-private-key-file="$state/pki/sa.key" --root-ca-file="$state/pki/ca.crt" ${KCM_ARGS:-}
# shellcheck disable=SC2086
start kube-scheduler kube-scheduler --kubeconfig="$state/scheduler.kubeconfig" \
	--authentication-kubeconfig="$state/scheduler.kubeconfig" --authorization-kubeconfig="$state/scheduler.kubeconfig" \
	--bind-address=127.0.0.1 --leader-elect=false ${SCHEDULER_ARGS:-}
reap
