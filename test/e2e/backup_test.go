//go:build e2e

package e2e

import (
	"fmt"
	"io/fs"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// objectStore is an S3 server with the bucket "backups" in the network of the cluster.
type objectStore struct {
	url string
	dir string // the directory of the bucket
}

// The key of the S3 server.
const (
	s3User   = "backup"
	s3Secret = "object-store"
)

// startS3 starts an S3 server until the end of the test.
func startS3(t *testing.T) objectStore {
	t.Helper()
	address := net.JoinHostPort(kubectl(t, "get", "node", nodes()[0].name, "-o", `jsonpath={.status.addresses[?(@.type=="InternalIP")].address}`), "7070")
	root := t.TempDir()
	store := objectStore{"http://" + address, filepath.Join(root, "backups")}
	must(t, os.Mkdir(store.dir, 0o755))
	log, err := os.Create(filepath.Join(os.Getenv("TRIVET_E2E_STATE"), "log", "versitygw.log"))
	must(t, err)
	defer log.Close()
	c := exec.Command("versitygw", "--access", s3User, "--secret", s3Secret, "--port", address, "posix", root)
	c.Stdout, c.Stderr = log, log
	must(t, c.Start())
	t.Cleanup(func() { _, _ = c.Process.Kill(), c.Wait() })
	eventually(t, time.Minute, "the S3 server accepts connections", func() (string, bool) {
		conn, err := net.Dial("tcp", address)
		if err != nil {
			return err.Error(), false
		}
		return "", conn.Close() == nil
	})
	return store
}

// credentials writes the file with the key that AWS' programs read, and returns its path.
func (s objectStore) credentials(t *testing.T) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "credentials")
	must(t, os.WriteFile(path, fmt.Appendf(nil, "[default]\naws_access_key_id=%s\naws_secret_access_key=%s\n", s3User, s3Secret), 0o600))
	return path
}

// size returns the size of all objects in bytes.
func (s objectStore) size(t *testing.T) (sum int64) {
	t.Helper()
	must(t, filepath.WalkDir(s.dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return err
		}
		info, err := d.Info()
		sum += info.Size()
		return err
	}))
	return sum
}

// importBackupImages imports the images of the programs for backups into all nodes.
func importBackupImages(t *testing.T) {
	t.Helper()
	archives, err := filepath.Glob(filepath.Join(os.Getenv("TRIVET_E2E_STATE"), "backup", "*.tar"))
	must(t, err)
	if len(archives) == 0 {
		t.Fatal("the images of the programs for backups are missing: run test/e2e/cluster/build.sh backup")
	}
	for _, n := range nodes() {
		for _, archive := range archives {
			run(t, "nsenter", "-t", strings.TrimSpace(read(t, filepath.Join(n.dir, "pid"))), "-m", "-p", "--", "ctr", "-n", "k8s.io", "images", "import", "--local", archive)
		}
	}
}

// TestRestic runs the examples of backups with restic. It backs up a snapshot and then a clone of a volume to which a
// pod writes, and restores the newest backup.
func TestRestic(t *testing.T) {
	ns := newNamespace(t, "restic")
	installSnapshotAPI(t)
	installLocal(t, "--set", "snapshots.enabled=true")
	importBackupImages(t)
	store := startS3(t)
	applySnapshots(t, ns, "1-volume.yaml")
	waitReady(t, ns)
	execIn(t, ns, "example-original", "dd if=/dev/urandom of=/data/random bs=1M count=32 conv=fsync")
	before := waitLogged(t, ns, "example-original", "/data/log")
	applySnapshots(t, ns, "2-snapshot.yaml")
	waitSnapshot(t, ns, "example")

	secret := strings.NewReplacer("https://s3.example.com", store.url, "the-key", s3User, "the-secret", s3Secret)
	applyText(t, ns, secret.Replace(read(t, filepath.Join(examples, "backup", "1-repository.yaml"))))
	t.Cleanup(func() { kubectlLast(t, "delete", "storageclass", "example-backup") })
	runJob(t, ns, "example-backup", "2-backup.yaml")
	first := store.size(t)
	execIn(t, ns, "example-original", "dd if=/dev/urandom of=/data/random bs=1M count=4 seek=8 conv=fsync,notrunc")
	sum := execIn(t, ns, "example-original", "sha256sum /data/random")
	kubectl(t, "-n", ns, "apply", "-f", filepath.Join(examples, "backup", "3-nightly.yaml"))
	kubectl(t, "-n", ns, "create", "job", "tonight", "--from=cronjob/example-nightly")
	waitJob(t, ns, "tonight")
	after := waitLogged(t, ns, "example-original", "/data/log")
	moved := store.size(t) - first
	t.Logf("the first backup stored %d bytes, and the second one %d", first, moved)
	if first < 32<<20 || moved > 16<<20 {
		t.Errorf("the backups stored %d and %d bytes, want at least 32 MiB and, for 4 MiB of changes, at most 16 MiB", first, moved)
	}

	runJob(t, ns, "example-restore", "4-restore.yaml")
	applyText(t, ns, fmt.Sprintf(readerOf, "example-from-backup"))
	kubectl(t, "-n", ns, "wait", "pod", "reader", "--for=condition=Ready", "--timeout=3m")
	checkLog(t, ns, "reader", "/data/log", before, after)
	if got := execIn(t, ns, "reader", "sha256sum /data/random"); got != sum {
		t.Errorf("got the checksum %s of the restored file, want %s", got, sum)
	}
	kubectl(t, "-n", ns, "delete", "cronjob,job,pod,pvc,volumesnapshot", "--all", "--timeout=3m")
	checkLimitedEmpty(t)
}

// readerOf is a pod that mounts a claim.
const readerOf = `
apiVersion: v1
kind: Pod
metadata: {name: reader}
spec:
  terminationGracePeriodSeconds: 1
  containers:
  - name: c
    image: docker.io/library/busybox:1.37
    command: [sleep, "1000000"]
    volumeMounts: [{name: data, mountPath: /data}]
  volumes: [{name: data, persistentVolumeClaim: {claimName: %s}}]
`

// runJob applies an example of backups and waits until its Job is complete.
func runJob(t *testing.T, ns, job, file string) {
	t.Helper()
	kubectl(t, "-n", ns, "apply", "-f", filepath.Join(examples, "backup", file))
	waitJob(t, ns, job)
}

// waitJob waits until a Job is complete.
func waitJob(t *testing.T, ns, job string) {
	t.Helper()
	if out, err := try(t.Context(), "kubectl", "-n", ns, "wait", "job", job, "--for=condition=Complete", "--timeout=3m"); err != nil {
		logs, _ := try(t.Context(), "kubectl", "-n", ns, "logs", "job/"+job, "--tail=40")
		t.Fatalf("%s\n%s", out, logs)
	}
}
