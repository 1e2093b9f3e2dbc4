//go:build e2e

package e2e

import (
	"context"
	"fmt"
	"strings"
	"testing"
)

// shop is a pod with a filesystem and a block volume.
const shop = `
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: files}
spec:
  storageClassName: trivet-loop
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 256Mi}}
---
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: device}
spec:
  storageClassName: trivet-loop
  volumeMode: Block
  accessModes: [ReadWriteOnce]
  resources: {requests: {storage: 64Mi}}
---
apiVersion: v1
kind: Pod
metadata: {name: shop}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    command: [sleep, "1000000"]
    volumeMounts: [{name: files, mountPath: /files}]
    volumeDevices: [{name: device, devicePath: /dev/device}]
  volumes:
  - {name: files, persistentVolumeClaim: {claimName: files}}
  - {name: device, persistentVolumeClaim: {claimName: device}}
`

// The size of the data in each volume of shop, and the part of it that changes between two backups, in MiB.
const (
	shopData    = 48
	shopChanged = 8
)

// TestVelero runs the commands of the documentation for Velero: it backs up a namespace with a filesystem and a block
// volume, which Velero reads from snapshots, and restores it to another namespace and onto the other node. The second
// backup must transfer little more than the changed data.
func TestVelero(t *testing.T) {
	ns := newNamespace(t, "shop")
	installSnapshotAPI(t)
	installLocal(t)
	importBackupImages(t)
	store := startS3(t)
	t.Cleanup(func() {
		if t.Failed() {
			describe(t, "velero")
		}
		if out, err := try(context.Background(), "velero", "uninstall", "--force"); err != nil {
			t.Error(out)
		}
	})
	runPart(t, "velero install", "S3_URL="+store.url, "CREDENTIALS="+store.credentials(t))
	waitDriver(t)

	applyText(t, ns, shop)
	waitReady(t, ns)
	execIn(t, ns, "shop", fmt.Sprintf("for i in 1 2 3; do dd if=/dev/urandom of=/files/$i bs=1M count=%d; done; dd if=/dev/urandom of=/dev/device bs=1M count=%d conv=fsync; sync", shopData/3, shopData))
	runPart(t, "velero backup", "BACKUP=monday")
	checkPhase(t, "backups.velero.io/monday")
	first := store.size(t)
	logMoved(t, "monday", first)

	change := "dd if=/dev/urandom of=%s bs=1M count=%d seek=4 conv=fsync,notrunc; "
	execIn(t, ns, "shop", fmt.Sprintf(change+change, "/files/2", shopChanged, "/dev/device", shopChanged))
	want := shopSums(t, ns)
	runPart(t, "velero backup", "BACKUP=tuesday")
	checkPhase(t, "backups.velero.io/tuesday")
	moved := store.size(t) - first
	logMoved(t, "tuesday", moved)
	if changed := int64(2 * shopChanged << 20); moved > 3*changed {
		t.Errorf("the second backup stored %d bytes, want at most three times the %d changed bytes", moved, changed)
	}

	from := nodeOf(t, ns, "shop")
	kubectl(t, "cordon", from)
	t.Cleanup(func() { kubectlLast(t, "uncordon", from) })
	runPart(t, "velero restore", "BACKUP=tuesday")
	checkPhase(t, "restores.velero.io/tuesday")
	const restored = "shop-restored"
	t.Cleanup(func() { kubectlLast(t, "delete", "namespace", restored, "--ignore-not-found", "--timeout=3m") })
	waitReady(t, restored)
	if got := nodeOf(t, restored, "shop"); got == from {
		t.Errorf("the restored pod is on the node %s of the first pod, want another one", got)
	}
	if got := shopSums(t, restored); got != want {
		t.Errorf("got the checksums %s of the restored volumes, want %s", got, want)
	}

	kubectl(t, "delete", "namespace", restored, "--timeout=3m")
	kubectl(t, "-n", ns, "delete", "pod,pvc", "--all", "--timeout=3m")
	checkLimitedEmpty(t)
}

// shopSums returns the checksums of the files and of the device of shop.
func shopSums(t *testing.T, ns string) string {
	t.Helper()
	return execIn(t, ns, "shop", "sha256sum /files/1 /files/2 /files/3 /dev/device")
}

// checkPhase fails the test unless a backup or restore of Velero is complete.
func checkPhase(t *testing.T, object string) {
	t.Helper()
	if phase := kubectl(t, "-n", "velero", "get", object, "-o", "jsonpath={.status.phase}"); phase != "Completed" {
		logs, _ := try(t.Context(), "kubectl", "-n", "velero", "logs", "deployment/velero", "--tail=60")
		t.Fatalf("%s has the phase %s, want Completed:\n%s", object, phase, logs)
	}
}

// logMoved logs how many bytes Velero has read and found changed in each volume of a backup, and how many bytes it has
// stored for all volumes.
func logMoved(t *testing.T, backup string, stored int64) {
	t.Helper()
	uploads := kubectl(t, "-n", "velero", "get", "datauploads", "-l", "velero.io/backup-name="+backup, "-o",
		`jsonpath={range .items[*]}{.spec.sourcePVC} {.status.progress.bytesDone} {.status.incrementalBytes}{"\n"}{end}`)
	lines := strings.Split(strings.TrimSpace(uploads), "\n")
	if len(lines) != 2 {
		t.Fatalf("got the data uploads %q of backup %s, want two", lines, backup)
	}
	for _, line := range lines {
		words := append(strings.Fields(line), "0") // without incremental bytes, the field is missing
		t.Logf("backup %s: volume %s, read %s bytes, of them changed %s", backup, words[0], words[1], words[2])
	}
	t.Logf("backup %s: stored %d bytes", backup, stored)
}
