package volumemanager

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/trivet-csi/trivet/internal/testenv"
	"github.com/trivet-csi/trivet/volumemanager"
	"github.com/trivet-csi/trivet/volumemanager/state"
)

// TestFullDisk: while the disk is full, new volumes fail with a message, pods can be removed, and
// existing volumes are still updated.
func TestFullDisk(t *testing.T) {
	m := newMachine(t)
	m.manager.kill()
	m.root = testenv.SimpleQuotas(t, "256M")
	t.Cleanup(m.end) // before the disk is removed
	m.startManager()
	m.put("config", settings)
	m.put("early", podOf("early", "{name: secret, secret: {secretName: keys}}", "{name: dir, emptyDir: {}}"))
	early := m.await("early")

	ballast := filepath.Join(m.root, "ballast")
	t.Cleanup(func() { _ = os.Remove(ballast) }) // in case the test fails before it removes the file
	fillUp(t, ballast)
	late := podOf("late", "{name: dir, emptyDir: {sizeLimit: 8Mi}}", "{name: memory, emptyDir: {medium: Memory}}",
		fmt.Sprintf("{name: host, hostPath: {path: %q, type: Directory}}", m.dir))
	m.put("late", late)
	m.awaitVolume("late", "dir", state.Failed, "no space left on device: make room on the filesystem of "+m.root)
	m.awaitVolume("late", "host", state.Mounted, "")
	m.awaitVolume("early", "dir", state.Mounted, "")
	m.put("config", strings.Replace(settings, "s3cret", "changed", 1))
	m.awaitStatus(func(volumemanager.Status) error {
		b, err := os.ReadFile(filepath.Join(early["secret"].Path, "password"))
		if err == nil && string(b) != "changed" {
			err = fmt.Errorf("password in the volume: got %q, want changed", b)
		}
		return err
	})
	m.remove("late")
	m.awaitRemoved("late")

	m.put("late", late)
	m.awaitVolume("late", "dir", state.Failed, "make room")
	must(t, os.Remove(ballast))
	m.await("late")
	m.removeAll()
}

// fillUp writes a file until its disk is full.
func fillUp(t *testing.T, path string) {
	t.Helper()
	for _, size := range []string{"1M", "4K", "1"} {
		out, err := exec.Command("dd", "if=/dev/zero", "of="+path, "bs="+size, "oflag=append", "conv=notrunc,fsync", "status=none").CombinedOutput()
		if err == nil || !strings.Contains(string(out), "No space left") {
			t.Fatalf("dd: got output %q, error %v; want No space left", out, err)
		}
	}
}
