//go:build e2e

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	"github.com/container-storage-interface/spec/lib/go/csi"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
)

// TestSnapshots installs the chart with snapshots, on a pool that shares blocks, and applies the examples of
// snapshots in order while pods write. A restored volume must contain the data that was synced before the
// snapshot, even if the source is deleted, and nothing may be left of deleted volumes and snapshots.
func TestSnapshots(t *testing.T) {
	ns := newNamespace(t, "snapshots")
	installSnapshotAPI(t)
	installLocal(t, "--set", "snapshots.enabled=true,snapshots.groups=true")
	const volume, taken = "example-original", "example"
	applySnapshots(t, ns, "1-volume.yaml")
	waitReady(t, ns)
	before := waitLogged(t, ns, volume, "/data/log")
	applySnapshots(t, ns, "2-snapshot.yaml")
	waitSnapshot(t, ns, taken)
	after := waitLogged(t, ns, volume, "/data/log")

	t.Run("restore", func(t *testing.T) {
		applySnapshots(t, ns, "3-restore.yaml")
		waitReady(t, ns)
		checkLog(t, ns, "example-restored", "/data/log", before, after)
		if got := execIn(t, ns, "example-restored", "df -m /data | awk 'END {print ($2 > 500)}'"); got != "1" {
			t.Errorf("got a restored filesystem %s, want more than 500 MiB", execIn(t, ns, "example-restored", "df -m /data"))
		}
	})
	t.Run("clone", func(t *testing.T) {
		before := waitLogged(t, ns, volume, "/data/log")
		applySnapshots(t, ns, "4-clone.yaml")
		waitReady(t, ns)
		checkLog(t, ns, "example-clone", "/data/log", before, waitLogged(t, ns, volume, "/data/log"))
	})
	t.Run("source deleted", func(t *testing.T) {
		kubectl(t, "-n", ns, "delete", "pod,pvc", volume, "example-restored", "--timeout=3m")
		applySnapshots(t, ns, "3-restore.yaml")
		waitReady(t, ns)
		checkLog(t, ns, "example-restored", "/data/log", before, after)
	})
	t.Run("volume mode", func(t *testing.T) { checkVolumeMode(t, ns) })
	t.Run("group", func(t *testing.T) { checkGroup(t, ns) })
	t.Run("changed blocks", func(t *testing.T) { checkChangedBlocks(t, ns) })

	kubectl(t, "-n", ns, "delete", "volumegroupsnapshot", "--all", "--timeout=3m")
	kubectl(t, "-n", ns, "delete", "pod,pvc,volumesnapshot", "--all", "--timeout=3m")
	checkLimitedEmpty(t)
}

// installSnapshotAPI installs the snapshot API in the cluster until the end of the test.
func installSnapshotAPI(t *testing.T) {
	t.Helper()
	api := filepath.Join(os.Getenv("TRIVET_E2E_STATE"), "snapshots.yaml")
	kubectl(t, "apply", "--server-side", "-f", api)
	t.Cleanup(func() { kubectlLast(t, "delete", "-f", api, "--timeout=3m") })
	kubectl(t, "-n", "kube-system", "rollout", "status", "deployment/snapshot-controller", "--timeout=3m")
}

// applySnapshots applies an example of snapshots. TestSnapshots deletes its objects.
func applySnapshots(t *testing.T, ns, name string) {
	t.Helper()
	kubectl(t, "-n", ns, "apply", "-f", filepath.Join(examples, "snapshots", name))
}

// waitSnapshot waits until a snapshot can be used.
func waitSnapshot(t *testing.T, ns, snapshot string) {
	t.Helper()
	kubectl(t, "-n", ns, "wait", "volumesnapshot", snapshot, "--for=jsonpath={.status.readyToUse}=true", "--timeout=2m")
}

// waitLogged waits until a pod has written at least six more lines to its log, and returns the number of
// lines.
func waitLogged(t *testing.T, ns, pod, log string) (lines int) {
	t.Helper()
	count := func() int {
		n, err := strconv.Atoi(execIn(t, ns, pod, "wc -l <"+log))
		must(t, err)
		return n
	}
	begin := count()
	eventually(t, time.Minute, pod+" has written more lines", func() (string, bool) {
		lines = count()
		return strconv.Itoa(lines), lines > begin+5
	})
	return lines
}

// checkLog checks a copy of a log that was made when the log had between atLeast and atMost lines. The copy
// must contain consecutive numbers from the first one on. It returns the number of lines.
func checkLog(t *testing.T, ns, pod, log string, atLeast, atMost int) (lines int) {
	t.Helper()
	out := execIn(t, ns, pod, "awk '$1 != NR-1 {print \"line\", NR, \"is\", $0; exit} END {print NR}' "+log)
	lines, err := strconv.Atoi(out)
	if err != nil || lines < atLeast || lines > atMost {
		t.Errorf("%s in %s: got %s, want %d to %d lines with consecutive numbers", log, pod, out, atLeast, atMost)
	}
	return lines
}

// restoredClaim is a claim for a volume restored from a snapshot.
const restoredClaim = `
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: %s}
spec:
  storageClassName: example-original
  dataSource: {apiGroup: snapshot.storage.k8s.io, kind: VolumeSnapshot, name: %s}
  volumeMode: %s
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: %s}}
---
`

// converted is a pod with a block volume that is restored from the snapshot of a filesystem.
const converted = `
apiVersion: v1
kind: Pod
metadata: {name: converted}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    command: [sleep, "1000000"]
    volumeDevices: [{name: device, devicePath: /dev/device}]
  volumes: [{name: device, persistentVolumeClaim: {claimName: converted}}]
`

// checkVolumeMode restores the snapshot of a filesystem as a block volume, which Kubernetes refuses before the
// administrator has annotated the snapshot.
func checkVolumeMode(t *testing.T, ns string) {
	applyText(t, ns, fmt.Sprintf(restoredClaim, "converted", "example", "Block", "320Mi")+converted)
	waitDescribed(t, 2*time.Minute, ns, "pvc/converted", "ProvisioningFailed", "mode")
	content := kubectl(t, "-n", ns, "get", "volumesnapshot", "example", "-o", "jsonpath={.status.boundVolumeSnapshotContentName}")
	runPart(t, "volume mode", "CONTENT="+content)
	waitReady(t, ns)
	if got := execIn(t, ns, "converted", "head -c 4 /dev/device"); got != "XFSB" {
		t.Errorf("the device begins with %q, want the superblock of the xfs", got)
	}
}

// reader is a pod that mounts two claims.
const reader = `
apiVersion: v1
kind: Pod
metadata: {name: reader}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    command: [sleep, "1000000"]
    volumeMounts: [{name: first, mountPath: /first}, {name: second, mountPath: /second}]
  volumes:
  - {name: first, persistentVolumeClaim: {claimName: restored-first}}
  - {name: second, persistentVolumeClaim: {claimName: restored-second}}
`

// checkGroup takes a group snapshot of two volumes. The pod writes each line to the first volume and then to
// the second, so the snapshots must differ by at most one line.
func checkGroup(t *testing.T, ns string) {
	applySnapshots(t, ns, "5-two-volumes.yaml")
	waitReady(t, ns)
	before := waitLogged(t, ns, "example-group", "/second/log")
	applySnapshots(t, ns, "6-group.yaml")
	kubectl(t, "-n", ns, "wait", "volumegroupsnapshot", "example-group", "--for=jsonpath={.status.readyToUse}=true", "--timeout=2m")
	after := waitLogged(t, ns, "example-group", "/first/log")

	var manifest string
	for _, name := range []string{"first", "second"} {
		snapshot := kubectl(t, "-n", ns, "get", "volumesnapshot", "-o", `jsonpath={.items[?(@.spec.source.persistentVolumeClaimName=="example-`+name+`")].metadata.name}`)
		waitSnapshot(t, ns, snapshot)
		manifest += fmt.Sprintf(restoredClaim, "restored-"+name, snapshot, "Filesystem", "320Mi")
	}
	applyText(t, ns, manifest+reader)
	waitReady(t, ns)
	first := checkLog(t, ns, "reader", "/first/log", before, after)
	second := checkLog(t, ns, "reader", "/second/log", before, after)
	if ahead := first - second; ahead != 0 && ahead != 1 {
		t.Errorf("got %d lines in the first volume and %d in the second, want at most one more in the first", first, second)
	}
}

// device is a pod with a block volume.
const device = `
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: device}
spec:
  storageClassName: example-original
  volumeMode: Block
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 64Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: device}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    command: [sleep, "1000000"]
    volumeDevices: [{name: device, devicePath: /dev/device}]
  volumes: [{name: device, persistentVolumeClaim: {claimName: device}}]
`

// backup is a pod with two block volumes that are restored from snapshots.
const backup = `
apiVersion: v1
kind: Pod
metadata: {name: backup}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    command: [sleep, "1000000"]
    volumeDevices: [{name: older, devicePath: /dev/older}, {name: newer, devicePath: /dev/newer}]
  volumes:
  - {name: older, persistentVolumeClaim: {claimName: older}}
  - {name: newer, persistentVolumeClaim: {claimName: newer}}
`

// checkChangedBlocks takes two snapshots of a block volume and restores both. It copies the blocks that the
// driver reports as changed from the newer to the older volume, which must make them equal.
func checkChangedBlocks(t *testing.T, ns string) {
	applyText(t, ns, device)
	waitReady(t, ns)
	execIn(t, ns, "device", "dd if=/dev/urandom of=/dev/device bs=1M count=16 conv=fsync")
	snapshot(t, ns, "older", "device")
	// Overwrite one block of existing data, and write 64 KiB to an unwritten place.
	execIn(t, ns, "device", "dd if=/dev/urandom of=/dev/device bs=4096 count=1 seek=300 conv=fsync,notrunc; dd if=/dev/urandom of=/dev/device bs=64k count=1 seek=700 conv=fsync,notrunc")
	snapshot(t, ns, "newer", "device")
	applyText(t, ns, fmt.Sprintf(restoredClaim, "older", "older", "Block", "64Mi")+fmt.Sprintf(restoredClaim, "newer", "newer", "Block", "64Mi")+backup)
	waitReady(t, ns)

	metadata := csi.NewSnapshotMetadataClient(controllerSocket(t))
	older, newer := snapshotHandle(t, ns, "older"), snapshotHandle(t, ns, "newer")
	allocated, err := readBlocks(metadata.GetMetadataAllocated(t.Context(), &csi.GetMetadataAllocatedRequest{SnapshotId: newer, MaxResults: 2}))
	must(t, err)
	changed, err := readBlocks(metadata.GetMetadataDelta(t.Context(), &csi.GetMetadataDeltaRequest{BaseSnapshotId: older, TargetSnapshotId: newer, MaxResults: 2}))
	must(t, err)
	if size := sizeOf(allocated); size < 16<<20 || size > 24<<20 {
		t.Errorf("got %d allocated bytes, want 16 to 24 MiB", size)
	}
	if size := sizeOf(changed); size < 68<<10 || size > 8<<20 {
		t.Errorf("got %d changed bytes, want 68 KiB to 8 MiB", size)
	}
	for _, b := range changed {
		execIn(t, ns, "backup", fmt.Sprintf("dd if=/dev/newer of=/dev/older bs=4096 skip=%[1]d seek=%[1]d count=%[2]d conv=fsync,notrunc", b.ByteOffset/4096, b.SizeBytes/4096))
	}
	execIn(t, ns, "backup", "cmp /dev/older /dev/newer")
}

// snapshot takes a snapshot of a claim.
func snapshot(t *testing.T, ns, name, claim string) {
	t.Helper()
	applyText(t, ns, fmt.Sprintf(`{apiVersion: snapshot.storage.k8s.io/v1, kind: VolumeSnapshot, metadata: {name: %s},
  spec: {volumeSnapshotClassName: example-snapshot, source: {persistentVolumeClaimName: %s}}}`, name, claim))
	waitSnapshot(t, ns, name)
}

// snapshotHandle returns the driver's ID of a snapshot.
func snapshotHandle(t *testing.T, ns, snapshot string) string {
	t.Helper()
	content := kubectl(t, "-n", ns, "get", "volumesnapshot", snapshot, "-o", "jsonpath={.status.boundVolumeSnapshotContentName}")
	return kubectl(t, "get", "volumesnapshotcontent", content, "-o", "jsonpath={.status.snapshotHandle}")
}

// sizeOf returns the sum of the sizes of blocks in bytes.
func sizeOf(blocks []*csi.BlockMetadata) (sum int64) {
	for _, b := range blocks {
		sum += b.SizeBytes
	}
	return sum
}

// readBlocks reads all blocks of a stream.
func readBlocks[M interface{ GetBlockMetadata() []*csi.BlockMetadata }](stream interface{ Recv() (M, error) }, err error) (blocks []*csi.BlockMetadata, _ error) {
	for err == nil {
		var part M
		part, err = stream.Recv()
		blocks = append(blocks, part.GetBlockMetadata()...)
	}
	if errors.Is(err, io.EOF) {
		err = nil
	}
	return blocks, err
}

// controllerSocket connects to the socket over which the sidecars of a controller's pod call the driver.
func controllerSocket(t *testing.T) *grpc.ClientConn {
	t.Helper()
	pod := driverPods(t, "app.kubernetes.io/component=controller")[0]
	uid := kubectl(t, "-n", namespace, "get", "pod", pod, "-o", "jsonpath={.metadata.uid}")
	n := nodeNamed(t, nodeOf(t, namespace, pod))
	dir, err := os.Open(n.path("/var/lib/kubelet/pods/" + uid + "/volumes/kubernetes.io~empty-dir/plugin-dir"))
	must(t, err)
	t.Cleanup(func() { dir.Close() })
	// The path of the socket is too long for a socket address.
	conn, err := grpc.NewClient("passthrough:///socket", grpc.WithTransportCredentials(insecure.NewCredentials()),
		grpc.WithContextDialer(func(ctx context.Context, _ string) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "unix", fmt.Sprintf("/proc/self/fd/%d/csi.sock", dir.Fd()))
		}))
	must(t, err)
	t.Cleanup(func() { conn.Close() })
	return conn
}
