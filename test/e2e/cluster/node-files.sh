# shellcheck shell=bash disable=SC2154
# Sourced by up.sh. Writes the configuration of a node's containerd and kubelet.

# make_node N
make_node() {
	local n=$1 dir=$state/n$1
	mkdir -p "$dir"/{cni,lib/containerd,log,pki,flexvolume}
	[ -z "${UNPACKED:-}" ] || tar -C "$dir/lib/containerd" -xf "$cache/unpacked.tar"
	# A node without a CNI configuration does not become Ready.
	cat >"$dir/cni/10-trivet.conflist" <<-E
		{"cniVersion": "1.0.0", "name": "trivet", "plugins": [{
		  "type": "bridge", "bridge": "cni$n", "isGateway": true, "hairpinMode": true,
		  "ipam": {"type": "host-local", "dataDir": "/run/cni-ipam",
		           "ranges": [[{"subnet": "10.88.$n.0/24"}]], "routes": [{"dst": "0.0.0.0/0"}]}}]}
	E
	mkdir -p "$dir/registries/ghcr.io"
	cat >"$dir/registries/ghcr.io/hosts.toml" <<-E
		server = "http://$registry"
		[host."http://$registry"]
		  capabilities = ["pull", "resolve"]
	E
	# restrict_oom_score_adj, because lowering an OOM score needs CAP_SYS_RESOURCE.
	cat >"$dir/containerd.toml" <<-E
		version = 3
		root = "/var/lib/containerd"
		state = "/run/containerd"
		disabled_plugins = ["io.containerd.internal.v1.tracing", "io.containerd.tracing.processor.v1.otlp", "io.containerd.nri.v1.nri", "io.containerd.internal.v1.opt"]
		[grpc]
		  address = "/run/containerd/containerd.sock"
		[plugins.'io.containerd.cri.v1.images']
		  snapshotter = "overlayfs"
		[plugins.'io.containerd.cri.v1.images'.pinned_images]
		  sandbox = "$(awk '$1 == "pause" {print $2}' "$cache/imagenames")"
		[plugins.'io.containerd.cri.v1.images'.registry]
		  config_path = "$dir/registries"
		[plugins.'io.containerd.cri.v1.runtime']
		  disable_apparmor = true
		  restrict_oom_score_adj = true
		[plugins.'io.containerd.cri.v1.runtime'.cni]
		  bin_dirs = ["$bin/cni"]
		  conf_dir = "$dir/cni"
		[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
		  runtime_type = "io.containerd.runc.v2"
		[plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
		  BinaryName = "$(command -v runc)"
		  SystemdCgroup = false
		[plugins.'io.containerd.grpc.v1.cri']
		  stream_server_address = "127.0.0.1"
		  stream_server_port = "0"
	E
	# The kubelet must not remove images because the machine's disk is 85 % full. They cannot
	# be pulled again.
	cat >"$dir/kubelet.yaml" <<-E
		apiVersion: kubelet.config.k8s.io/v1beta1
		kind: KubeletConfiguration
		address: $(node_ip "$n")
		healthzPort: 0
		tlsCertFile: $state/pki/kubelet.crt
		tlsPrivateKeyFile: $state/pki/kubelet.key
		authentication: {anonymous: {enabled: false}, webhook: {enabled: true}, x509: {clientCAFile: $state/pki/ca.crt}}
		authorization: {mode: Webhook}
		containerRuntimeEndpoint: unix:///run/containerd/containerd.sock
		cgroupDriver: cgroupfs
		cgroupRoot: /$cgroup/n$n
		failCgroupV1: false
		failSwapOn: false
		makeIPTablesUtilChains: false
		resolvConf: $state/resolv.conf
		evictionHard: {memory.available: 64Mi, nodefs.available: 1%, nodefs.inodesFree: 1%, imagefs.available: 1%}
		imageGCHighThresholdPercent: 100
		nodeStatusUpdateFrequency: 5s
		syncFrequency: 10s
		crashLoopBackOff: {maxContainerRestartPeriod: 2s}
	E
}
