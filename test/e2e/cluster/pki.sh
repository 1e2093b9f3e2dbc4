# shellcheck shell=bash disable=SC2154
# Sourced by up.sh. Writes certificates, tokens and kubeconfigs to $state.

# leaf NAME SUBJECT EXTENSIONS: writes a key, and a certificate for it from the cluster's CA.
leaf() {
	openssl req -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -keyout "$1.key" -out "$1.csr" -subj "$2" 2>/dev/null
	openssl x509 -req -in "$1.csr" -CA ca.crt -CAkey ca.key -CAcreateserial -days 365 -out "$1.crt" -extfile <(printf '%s\n' "$3") 2>/dev/null
}

# kubeconfig FILE USER
kubeconfig() {
	cat >"$1" <<-E
		apiVersion: v1
		kind: Config
		clusters: [{name: trivet, cluster: {server: "https://127.0.0.1", certificate-authority: $state/pki/ca.crt}}]
		users: [{name: user, user: {token: $(awk -F, -v user="$2" '$2 == user {print $1}' "$state/pki/tokens.csv")}}]
		contexts: [{name: trivet, context: {cluster: trivet, user: user}}]
		current-context: trivet
	E
}

make_pki() {
	local n ips='' users=("admin,system:masters" "system:kube-controller-manager," "system:kube-scheduler,") u
	for n in $(seq "$nodes"); do
		ips+=,IP:$(node_ip "$n")
		users+=("system:node:$(node_name "$n"),system:nodes")
	done
	mkdir -p "$state/pki"
	(
		cd "$state/pki" || exit
		openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 365 -keyout ca.key -out ca.crt -subj /CN=trivet-e2e 2>/dev/null
		leaf apiserver /CN=kube-apiserver "subjectAltName=DNS:localhost,DNS:kubernetes,DNS:kubernetes.default,DNS:kubernetes.default.svc,IP:127.0.0.1,IP:10.96.0.1"
		leaf kubelet /CN=kubelet "subjectAltName=DNS:localhost,IP:127.0.0.1$ips"
		leaf kubelet-client /O=system:masters/CN=kube-apiserver-kubelet-client "extendedKeyUsage=clientAuth"
		openssl genrsa -out sa.key 2048 2>/dev/null
		openssl rsa -in sa.key -pubout -out sa.pub 2>/dev/null
		for u in "${users[@]}"; do
			echo "$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n'),${u%%,*},${u%%,*},${u#*,}"
		done >tokens.csv
	)
	kubeconfig "$state/admin.kubeconfig" admin
	kubeconfig "$state/kcm.kubeconfig" system:kube-controller-manager
	kubeconfig "$state/scheduler.kubeconfig" system:kube-scheduler
	for n in $(seq "$nodes"); do kubeconfig "$state/n$n/kubeconfig" "system:node:$(node_name "$n")"; done
}
