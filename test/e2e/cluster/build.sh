#!/usr/bin/env bash
# Builds the parts of a cluster into the cache: Kubernetes, etcd, the CSI sidecars and
# containerd, their images, and the manifests of the snapshot API. With `suite`, it also
# builds the storage tests of Kubernetes. With `backup`, it also builds Velero, restic and an
# S3 server. With `vm`, it also unpacks the images of the sidecars for up.sh, which is faster
# than to import them in a virtual machine.
set -euo pipefail
. "$(dirname "$0")/env.sh"
. "$here/bases.sh"
. "$here/images.sh"
cd "$here"
case $* in '' | suite | backup | vm) ;; *) fail "usage: build.sh [suite | backup | vm]" ;; esac

export CGO_ENABLED=0 GOFLAGS="-trimpath -buildvcs=false" GOWORK=off

# version MODULE: prints the module's version in kubernetes/go.mod.
version() { go -C kubernetes list -m -f '{{.Version}}' "$1"; }

kubernetes() {
	local v minor k8s=k8s.io/kubernetes/cmd csi=github.com/kubernetes-csi info=k8s.io/component-base/version
	v=$(version k8s.io/kubernetes)
	minor=${v#v1.} minor=${minor%%.*}
	# The servers do not start unless their version is set.
	go -C kubernetes build -o "$bin/" -ldflags "-s -w -X main.version=local -X $info.gitVersion=$v -X $info.gitMajor=1 -X $info.gitMinor=$minor -X $info.gitTreeState=clean" \
		$k8s/kube-apiserver $k8s/kube-controller-manager $k8s/kube-scheduler $k8s/kubelet $k8s/kubectl \
		$csi/external-provisioner/v6/cmd/csi-provisioner $csi/external-attacher/v4/cmd/csi-attacher \
		$csi/external-resizer/v2/cmd/csi-resizer \
		$csi/external-snapshotter/v8/cmd/csi-snapshotter $csi/external-snapshotter/v8/cmd/snapshot-controller
	go -C kubernetes build -o "$bin/etcd" -ldflags "-s -w" go.etcd.io/etcd/server/v3
}

# snapshot_api writes the manifests that a distribution installs for snapshots: the CRDs, and
# snapshot-controller with one replica.
snapshot_api() {
	local m=github.com/kubernetes-csi/external-snapshotter crds controller
	go -C kubernetes mod download $m/v8 $m/client/v8
	crds=$(go -C kubernetes list -m -f '{{.Dir}}' $m/client/v8)/config/crd
	controller=$(go -C kubernetes list -m -f '{{.Dir}}' $m/v8)/deploy/kubernetes/snapshot-controller
	{
		cat "$crds"/*snapshot.storage.k8s.io_*.yaml "$controller/rbac-snapshot-controller.yaml"
		echo ---
		sed -e 's/replicas: .*/replicas: 1/; s/minReadySeconds: .*/minReadySeconds: 0/' \
			-e "s/snapshot-controller:v.*/snapshot-controller:$(version $m/v8)/" \
			-e 's/--leader-election=true/--feature-gates=CSIVolumeGroupSnapshot=true/' "$controller/setup-snapshot-controller.yaml"
	} >"$cache/snapshots.yaml"
}

standins() {
	go -C kubernetes build -o "$bin/" -ldflags "-s -w" ./registrar ./livenessprobe ./pause ./imagenames
	"$bin/imagenames" >"$cache/imagenames"
}

containerd() {
	local c=github.com/containerd/containerd/v2 p=github.com/containernetworking/plugins/plugins v
	v=$(go -C containerd list -m -f '{{.Version}}' $c)
	go -C containerd build -o "$bin/" -ldflags "-s -w -X $c/version.Version=$v" $c/cmd/containerd $c/cmd/containerd-shim-runc-v2 $c/cmd/ctr
	go -C containerd build -o "$bin/cni/" -ldflags "-s -w" $p/ipam/host-local $p/main/bridge $p/main/loopback
}

registry() {
	go -C ../../.. build -modfile=release/tools/go.mod -o "$bin/registry" -ldflags "-s -w" github.com/distribution/distribution/v3/cmd/registry
}

suite() {
	go -C kubernetes build -o "$bin/" -ldflags "-s -w" k8s.io/kubernetes/test/images/agnhost github.com/onsi/ginkgo/v2/ginkgo
	go -C kubernetes test -c -o "$bin/e2e.test" -ldflags "-s -w" ./suite
}

# backup_version MODULE: prints the module's version in backup/go.mod.
backup_version() { go -C backup list -m -f '{{.Version}}' "$1"; }

backup() {
	local v=github.com/vmware-tanzu
	# The version determines the image that `velero install` uses.
	go -C backup build -o "$bin/" -ldflags "-s -w -X $v/velero/pkg/buildinfo.Version=$(backup_version $v/velero)" \
		$v/velero/cmd/velero $v/velero-plugin-for-aws/velero-plugin-for-aws $v/velero-plugin-for-aws/hack/cp-plugin \
		github.com/restic/restic/cmd/restic github.com/versity/versitygw/cmd/versitygw
}

debian_packages runc:runc busybox:busybox-static debootstrap:debootstrap openssl:openssl ip:iproute2 losetup:mount
lock
mkdir -p "$bin/cni" "$images"
once kubernetes kubernetes kubernetes/go.mod kubernetes/go.sum
once snapshot-api snapshot_api kubernetes/go.mod kubernetes/go.sum
once standins standins kubernetes/go.mod kubernetes/go.sum kubernetes/{registrar,livenessprobe,pause,imagenames}
once containerd containerd containerd
once registry registry ../../../release/tools
once debian debian_rootfs "$here/bases.sh"
once images make_images images.sh "$cache"/stamps/{kubernetes,standins,debian} /bin/busybox
if [ "${1:-}" = suite ]; then
	once suite suite kubernetes/go.mod kubernetes/go.sum kubernetes/suite
	once suite-images make_suite_images images.sh "$cache"/stamps/{standins,debian,suite} /bin/busybox
fi
if [ "${1:-}" = backup ]; then
	once backup backup backup
	once backup-images make_backup_images images.sh "$cache"/stamps/backup /bin/busybox
fi
if [ "${1:-}" = vm ]; then
	once unpacked unpack_images images.sh "$cache"/stamps/{containerd,images}
fi
